"""Recorded runs again, from their own times.

Seen to fail: `Relived.poll` that goes past a decision, answers in another
order, an eviction other than the run's own, a landing left out of the log, a
failure told as a landing, no quota or another prefetcher.
"""

import dataclasses
import random
from typing import Any

from absl.testing import absltest, parameterized

from bevy_jax import config as config_lib
from bevy_jax import costs as costs_lib
from bevy_jax import engine, events, protocols, relive, synthetic, virtual
from bevy_jax import hops as hops_lib
from bevy_jax import request as request_lib
from bevy_jax.layers import config as model_config
from bevy_jax.offload import prefetch, slot_table

_SEEDS = 25
_NONE = prefetch.Nothing()


def _told(log: list[events.Event]) -> list[Any]:
  """Everything that is counted, in order: no times."""
  out: list[Any] = []
  for e in log:
    if isinstance(e, events.LoadIssued):
      out.append(('load', e.key, e.slot, e.cause))
    elif isinstance(e, events.LoadLanded):
      out.append(('landed', e.key))
    elif isinstance(e, events.LoadFailed):
      out.append(('failed', e.key, e.reason))
    elif isinstance(e, events.Judged):
      out.append(dataclasses.replace(e, time=0))
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
      out.append((e.request, e.reason, e.detail))
  return out


def _break(executor: virtual.VirtualExecutor, rate: float, seed: int) -> None:
  """Lets some loads fail in place of landing."""
  dice, poll = random.Random(seed), executor.poll

  def broken() -> list[protocols.Happened]:
    return [
      protocols.Failed(e.time, e.key, f'{e.key} is broken')
      if isinstance(e, protocols.Landed) and dice.random() < rate
      else e
      for e in poll()
    ]

  executor.poll = broken  # type: ignore[method-assign]


def _simulated(
  seed: int,
  scheduler: str,
  eviction: str,
  *,
  hops: int | str = 1,
  prefetcher: protocols.Prefetcher = _NONE,
  parted: bool = False,
  faults: float = 0.0,
):
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
    'prefetcher': prefetcher,
  }
  if parted:
    settings['slots'] = max(settings['slots'], layers * top_k)
    settings['quota'] = slot_table.split(settings['slots'], layers)
  executor = virtual.VirtualExecutor(
    synthetic.Hash(experts, top_k, seed), costs, layers, chunk=4, hops=most
  )
  if faults:
    _break(executor, faults, seed)
  found = engine.Engine(
    model,
    executor,
    hops_lib.give(config_lib.SCHEDULERS[scheduler], hops, layers),
    config_lib.EVICTIONS[eviction],
    **settings,
  )
  for number in range(rng.randint(1, 9)):
    found.submit(
      request_lib.Request(
        number=number,
        prompt=tuple(
          rng.randrange(20) for _ in range(1 if faults else rng.choice((1, 6)))
        ),
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
      log, model, settings = _simulated(seed, scheduler, eviction, hops=hops)
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

  @parameterized.product(
    scheduler=('lockstep', 'runahead'),
    prefetcher=(
      prefetch.Transition(depth=2, confidence=0),
      prefetch.Popularity(guarded=False),
      prefetch.History(depth=2, guarded=False),
    ),
    parted=(False, True),
  )
  def test_prefetches_and_parts_come_again(self, scheduler, prefetcher, parted):
    policies = config_lib.SCHEDULERS[scheduler], config_lib.EVICTIONS['lru']
    loads = 0
    for seed in range(_SEEDS // 2):
      log, model, settings = _simulated(
        seed, scheduler, 'lru', prefetcher=prefetcher, parted=parted
      )
      again = relive.relive(log, model, *policies, **settings)
      self.assertEqual(_told(again), _told(log))
      loads += sum(
        isinstance(e, events.LoadIssued) and e.cause == 'prefetch' for e in log
      )
    self.assertGreater(loads, 20)

  @parameterized.parameters('lockstep', 'runahead')
  def test_failed_loads_end_the_same_requests_again(self, scheduler):
    policies = config_lib.SCHEDULERS[scheduler], config_lib.EVICTIONS['lru']
    failed = 0
    for seed in range(_SEEDS):
      log, model, settings = _simulated(seed, scheduler, 'lru', faults=0.1)
      again = relive.relive(log, model, *policies, **settings)
      self.assertEqual(_told(again), _told(log))
      failed += sum(isinstance(e, events.LoadFailed) for e in log)
    self.assertGreater(failed, 20)

  def test_what_a_log_does_not_keep_is_refused(self):
    log, model, settings = _simulated(3, 'lockstep', 'lru')
    policies = config_lib.SCHEDULERS['lockstep'], config_lib.EVICTIONS['lru']
    with self.assertRaisesRegex(ValueError, 'which no log keeps'):
      relive.relive(
        log, model, *policies,
        **settings | {'prefetcher': prefetch.NextGate()},
      )  # fmt: skip
    at = next(i for i, e in enumerate(log) if isinstance(e, events.Prefilled))
    number = log[at].requests[0]
    broken = [
      events.LoadFailed(1, 0, 0, 'broken'),
      events.Finished(1, number, 'error', 'broken'),
    ]
    with self.assertRaisesRegex(ValueError, f'prompt of request {number} wait'):
      relive.relive([*log[:at], *broken], model, *policies, **settings)

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
