"""Floors of a log that was made by hand."""

import jax.numpy as jnp
from absl.testing import absltest

from bevy_jax import events
from bevy_jax import window as window_lib
from bevy_jax.experiments import bench_models, floors


def _log() -> list[events.Event]:
  """Two requests, two layers, one pass: three distinct experts, then two."""
  begun = events.LaunchBegun(
    0, 0, 'decode', 0, (0, 1), (), True, 1, (0, 0, 0, 0)
  )
  return [
    begun,
    events.Routed(10, 0, 4, 0, (1, 2), 2, 8),
    events.Routed(10, 1, 4, 0, (2, 3), 2, 8),
    events.Routed(20, 0, 4, 1, (0, 5), 2, 9),
    events.Routed(20, 1, 4, 1, (0, 5), 2, 9),
    events.Token(30, 0, 4, 7),
    events.Token(30, 1, 4, 7),
    events.LaunchEnded(2000, 0),
  ]


class FloorsTest(absltest.TestCase):
  def test_by_hand(self):
    """Seen to fail with experts counted twice."""
    log = _log()
    window = window_lib.Window(begin=0, end=2000, first=0, last=7)
    found = floors.find(
      log, window, floors.Bytes(shared=1000, expert=100, kv=3),
      floors.Rates(2.0, 0.5), rows=2, layers=2, past=10, loads=2,
    )  # fmt: skip
    # One pass: 1000 shared, 5 experts, 2 rows x 15 positions x 3 bytes.
    self.assertAlmostEqual(found['memory_floor_s'], (1000 + 500 + 90) / 2e9)
    self.assertAlmostEqual(found['link_floor_s'], 200 / 0.5e9)
    self.assertAlmostEqual(found['memory_floor_tokens_per_s'], 2 / 795e-9)
    self.assertAlmostEqual(found['of_the_floor'], 795 / 2000)
    self.assertEqual(found['distinct_a_pass'], 5)

  def test_bytes_of_a_model(self):
    config = bench_models.MODELS['tiny']
    params = bench_models.shared(config, 0, 'bfloat16')
    sizes = floors.count(config, params, 77)
    params['layers'][0]['forced'] = jnp.zeros((9, 9, 2), jnp.int16)
    self.assertEqual(floors.count(config, params, 77), sizes)
    layer = 2 * 64 + 2 * 64 * 32 + 2 * 64 * 16 + 2 * 8 + 64 * 8
    whole = 2 * (96 * 64 + 64 + 4 * layer)
    self.assertEqual(sizes, floors.Bytes(whole, 77, 2 * 4 * 2 * 8 * 2))


if __name__ == '__main__':
  absltest.main()
