"""Recorded runs again, from their own times.

Seen to fail: `Relived.poll` that goes past a decision, answers in another
order, an eviction other than the run's own, a landing left out of the log.
"""

import random
from typing import Any

from absl.testing import absltest, parameterized

from bevy_jax import config as config_lib
from bevy_jax import costs as costs_lib
from bevy_jax import engine, events, relive, synthetic, virtual
from bevy_jax import hops as hops_lib
from bevy_jax import request as request_lib
from bevy_jax.layers import config as model_config

_SEEDS = 25


def _told(log: list[events.Event]) -> list[Any]:
  """Everything that is counted, in order: no times."""
  out: list[Any] = []
  for e in log:
    if isinstance(e, events.LoadIssued):
      out.append(('load', e.key, e.slot, e.cause))
    elif isinstance(e, events.LoadLanded):
      out.append(('landed', e.key))
    elif isinstance(e, events.Evicted):
      out.append(('evicted', e.key, e.slot, e.used))
    elif isinstance(e, events.LaunchBegun):
      out.append((e.kind, e.layer, e.requests, e.experts, e.finish, e.hops))
    elif isinstance(e, events.Crossed):
      out.append(('crossed', e.layers, e.experts))
    elif isinstance(e, events.Routed):
      out.append((e.request, e.token, e.layer, e.experts, e.hits, e.position))
    elif isinstance(e, events.PrefillRouted):
      out.append((e.layer, e.experts, e.uses, e.hits))
    elif isinstance(e, events.Token):
      out.append((e.request, e.index, e.token))
    elif isinstance(e, events.Finished):
      out.append((e.request, e.reason))
  return out


def _simulated(seed: int, scheduler: str, eviction: str, hops: int | str = 1):
  """A random run and what `relive` must know of it."""
  rng = random.Random(seed)
  layers, experts, top_k = rng.randint(1, 4), rng.randint(4, 9), 3
  layers *= 1 if hops == 1 else 2
  model = model_config.tiny(
    num_layers=layers,
    num_experts=experts,
    top_k=top_k,
    moe_layers=(True,) * layers,
  )
  costs = costs_lib.Costs(
    load=rng.randint(1, 40), launch=rng.randint(1, 40), host_load=3
  )
  most = hops_lib.most(hops, layers)
  settings = {
    'rows': rng.randint(1, 5),
    'slots': rng.randint(top_k, layers * experts),
    'link_depth': rng.randint(1, 5),
  }
  found = engine.Engine(
    model,
    virtual.VirtualExecutor(
      synthetic.Hash(experts, top_k, seed), costs, layers, chunk=4, hops=most
    ),
    hops_lib.give(config_lib.SCHEDULERS[scheduler], hops, layers),
    config_lib.EVICTIONS[eviction],
    **settings,
  )
  for number in range(rng.randint(1, 9)):
    found.submit(
      request_lib.Request(
        number=number,
        prompt=tuple(rng.randrange(20) for _ in range(rng.choice((1, 6)))),
        new_tokens=rng.randint(1, 4),
        eos_ids=(0, 1),
      )
    )
  while found.busy:
    found.step()
  return found.log, model, settings | {'chunk': 4, 'hops': most}


class ReliveTest(parameterized.TestCase):
  @parameterized.product(
    scheduler=('lockstep', 'runahead'),
    eviction=('lru', 'lfu_decayed', 'reuse', 'fifo'),
  )
  def test_everything_that_is_counted_comes_again(self, scheduler, eviction):
    policies = config_lib.SCHEDULERS[scheduler], config_lib.EVICTIONS[eviction]
    for seed in range(_SEEDS):
      log, model, settings = _simulated(seed, scheduler, eviction)
      again = relive.relive(log, model, *policies, **settings)
      self.assertEqual(_told(again), _told(log))

  @parameterized.product(
    scheduler=('lockstep', 'runahead'),
    eviction=('lru', 'reuse'),
    hops=(2, 4, 'pass'),
  )
  def test_launches_of_several_layers_too(self, scheduler, eviction, hops):
    crossed = set()
    for seed in range(_SEEDS):
      log, model, settings = _simulated(seed, scheduler, eviction, hops)
      layers = len(model.moe_ids)
      policies = (
        hops_lib.give(config_lib.SCHEDULERS[scheduler], hops, layers),
        config_lib.EVICTIONS[eviction],
      )
      again = relive.relive(log, model, *policies, **settings)
      self.assertEqual(_told(again), _told(log))
      for e in log:
        crossed |= set(e.layers) if isinstance(e, events.Crossed) else set()
    self.assertGreater(len(crossed), 1)

  def test_another_eviction_parts_from_it(self):
    parted = 0
    for seed in range(_SEEDS):
      log, model, settings = _simulated(seed, 'runahead', 'lru')
      try:
        relive.relive(
          log,
          model,
          config_lib.SCHEDULERS['runahead'],
          config_lib.EVICTIONS['random'],
          **settings,
        )
      except ValueError as error:
        self.assertIn('of the recorded run is', str(error))
        parted += 1
    self.assertGreater(parted, _SEEDS // 2)

  def test_half_a_log_is_refused(self):
    log, model, settings = _simulated(3, 'lockstep', 'lru')
    policies = config_lib.SCHEDULERS['lockstep'], config_lib.EVICTIONS['lru']
    half = [e for e in log if not isinstance(e, events.Finished)]
    with self.assertRaisesRegex(ValueError, 'have not ended'):
      relive.relive(half, model, *policies, **settings)
    at = next(i for i, e in enumerate(log) if isinstance(e, events.LoadLanded))
    with self.assertRaisesRegex(ValueError, 'of the recorded run is'):
      relive.relive(log[:at] + log[at + 1 :], model, *policies, **settings)


if __name__ == '__main__':
  absltest.main()
