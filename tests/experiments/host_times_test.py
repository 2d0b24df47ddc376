"""What calibration makes of short runs: a simulated machine is found again.

Seen to fail with rows or landings left out of the sums, with answers counted
as decisions, with factors below 0, with interrupted launches kept, and with the
head counted among the layers.
"""

import numpy as np
from absl.testing import absltest

from bevy_jax import config as config_lib
from bevy_jax import costs as costs_lib
from bevy_jax import engine, synthetic, virtual
from bevy_jax import request as request_lib
from bevy_jax.experiments import host_times, layer_times
from bevy_jax.layers import config as model_config

_LAYERS, _EXPERTS, _ROWS = 3, 8, 4
_ALONE = {(1, 2): 100.0, (1, 4): 120.0, (4, 2): 150.0, (4, 8): 210.0}
_HOST = {
  'host_launch': 70_000,
  'host_answer': 30_000,
  'host_row': 6000,
  'host_load': 9000,
  'host_land': 4000,
}


def _runs(slower: float = 1.0, head: int = 0) -> list[layer_times.Decoded]:
  """Runs of few and of many rows, where launches take so many times as long."""
  table = costs_lib.Table(
    costs_lib.Measured(*key, 1, us * 1e3 * slower) for key, us in _ALONE.items()
  )
  costs = costs_lib.Costs(load=150_000, table=table, head=head, **_HOST)
  model = model_config.tiny(
    num_layers=_LAYERS,
    num_experts=_EXPERTS,
    top_k=2,
    moe_layers=(True,) * _LAYERS,
  )
  found = []
  for scheduler in ('lockstep', 'bevy', 'solo'):
    watched = layer_times.Watched(
      virtual.VirtualExecutor(
        synthetic.Hash(_EXPERTS, 2, 7), costs, _LAYERS, told=False
      )
    )
    run = engine.Engine(
      model,
      watched,
      config_lib.SCHEDULERS[scheduler],
      config_lib.EVICTIONS['lru'],
      rows=_ROWS,
      slots=12,
      link_depth=2,
    )
    for number in range(_ROWS):
      run.submit(
        request_lib.Request(number=number, prompt=(number,), new_tokens=40)
      )
    while run.busy:
      run.step()
    found.append(layer_times.Decoded(run.log, watched.naps, watched.awaited))
  return found


class HostTest(absltest.TestCase):
  def test_finds_what_the_host_of_a_simulated_machine_does(self):
    found = host_times.host(_runs(), _ROWS, 2)
    self.assertAlmostEqual(found.launch, 70, delta=0.5)
    self.assertAlmostEqual(found.answer, 30, delta=0.5)
    self.assertAlmostEqual(found.row, 6, delta=0.2)
    self.assertAlmostEqual(found.load, 9, delta=0.2)
    self.assertAlmostEqual(found.land, 4, delta=0.2)
    self.assertGreater(found.loads, 0)
    self.assertGreater(found.wake, 0)

  def test_nothing_costs_less_than_nothing(self):
    # The second term would help with a factor of -1.
    found = host_times._factors([[1, 1, 1], [1, 2, 3]], [3, 2, 1])
    self.assertEqual(found[1], 0)

  def test_what_was_interrupted_does_not_count(self):
    rng = np.random.default_rng(0)
    rows = rng.integers(1, 9, 400)
    spent = 50.0 + 3 * rows
    spent[rng.choice(400, 6, replace=False)] += 5000
    found = host_times._factors([np.ones(400), rows], spent)
    self.assertAlmostEqual(found[0], 50, delta=0.1)
    self.assertAlmostEqual(found[1], 3, delta=0.1)


class BesideTest(absltest.TestCase):
  def test_finds_how_much_longer_launches_take_and_the_head(self):
    table = [layer_times.Launch(*key, us) for key, us in _ALONE.items()]
    runs = _runs(1.25, head=40_000)
    found = host_times.beside(runs, table, _LAYERS, (1, 2, 4), _ROWS, 2)
    whole = {b.rows: b for b in found}
    self.assertIn(4, whole)
    self.assertAlmostEqual(whole[4].factor, 1.25, places=3)
    self.assertAlmostEqual(whole[4].head_us, 40, delta=0.1)
    fixed, head = host_times.corrected(
      table, [(1, 10.0), (4, 20.0)], [whole[4]], (1, 2, 4)
    )
    for before, now in zip(table, fixed, strict=True):
      factor = 1.25 if before.rows == 4 else 1
      self.assertAlmostEqual(now.us, factor * before.us, delta=0.2)
    self.assertEqual(head[0], (1, 10.0))
    self.assertAlmostEqual(head[1][1], 40, delta=0.1)


if __name__ == '__main__':
  absltest.main()
