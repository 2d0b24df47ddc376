"""Laws that every scheduler and eviction obeys, on a scripted executor.

The laws are `bevy_jax.testing`'s; here every variant of ours is put to them.
Each law was seen to fail with the code broken on purpose:

  a launch misses no expert     lagging.ready without its readiness test
  a launch carries somebody     Runahead.launch going through all who wait
  an expert lands before use    begin_load setting `resident` at once
  a slot being read is kept     `evictable` without `& ~self.reading`
  so is what hops may read      Flights.begin with (i, 0) for i in later
  nobody ends twice             Answers.settle without `_notes = []`
  slots are never exceeded      SlotTable made with one slot more
  a layer keeps to its part     SlotTable.room of the free slots alone
  a wave fits into its layer    View.room of all slots
  a layer robs its own alone    Loads._to_rob without its test of the layer
  no deadlock                   Lockstep asking for one layer of all waiting
  no starvation                 lagging.wants most advanced first
  only the unwanted give way    SlotTable.barring without its loop over bitmaps
  nobody robs those before it   Loads._to_rob without the earlier wants
  prefill spares decode         Engine._prefill_wave with room = slots, and
                                Engine._load without the wants of who waits
  tokens in order               Answers._end taking tokens[-1 - i]
  equal runs, equal decisions   Lru.victim by the hash of a fresh object
  the finished load nothing     Answers.moved without its look at `over`
  a row is given back           Answers._end without `_rows[...] = None`
  who joins joins the last one  Engine._seat with position 0
  the identical share loads     Loads.issue without `& ~table.loading[layer]`
  demand before prefetch        Loads.prefetch without its look at the wants
  few prefetches in flight      PREFETCHED = 3
  prompts before prefetch       Engine._load prefetching beside a prefill
  no prefetch takes the wanted  Loads.prefetch barring only what is spared
  a prefetch is kept for use    Loads.issue barring the wants alone
  it gives way to the wanted    Loads._make_room without its second look
  no guess outlives its row     Guesses.leave without its clear
  a guess ends where it tells   Guesses.reveal with get for pop
  one copy                      Guesses.missing without `& ~table.loading`
  counters add up               figures._outcomes without its discard
  what failed is not guessed    Guesses.missing without `& ~self._broken`
  seeded errors are the same    Oracle.guess with a generator of no seed
  every load ends or is told    Engine._failed without `_loads.failed`
  a failure ends who waits      affected() that leaves who waits where they are
  it ends nobody else           affected() without the test of `need`, and
                                Prefill.drop taking out the whole group
  who ended loads nothing       Prefill.drop without `need & kept`
"""

import dataclasses
import itertools

import pytest
from absl.testing import absltest, parameterized

from bevy_jax import baselines, events, log_laws, runahead, testing, worlds
from bevy_jax import config as config_lib
from bevy_jax import request as request_lib
from bevy_jax.layers import config as model_config
from bevy_jax.offload import prefetch

# These two under every eviction, the others under two: time is short.
_FIRST = ('lockstep', 'runahead')
_FEW = ('lru', 'reuse')
_PLAIN = (
  {
    f'{name}_{eviction}': (scheduler, policy)
    for (name, scheduler), (eviction, policy) in itertools.product(
      config_lib.SCHEDULERS.items(),
      # What is popular depends on the world, which makes it.
      [*config_lib.EVICTIONS.items(), ('static', None)],
    )
    if name in _FIRST or eviction in _FEW
  }
  | {
    f'{name}_{eviction}': (scheduler, config_lib.EVICTIONS[eviction])
    for (name, scheduler), eviction in itertools.product(
      [
        ('runahead_near', runahead.Runahead(max_lag=1)),
        ('runahead_deep', runahead.Runahead(depth=5)),
        ('largest_near', baselines.Largest(max_lag=2)),
      ],
      ['lfu_decayed', 'reuse'],
    )
  }
  | {
    f'{name}_hops{hops}_{eviction}': (
      dataclasses.replace(scheduler, hops=hops),
      config_lib.EVICTIONS[eviction],
    )
    for (name, scheduler), (hops, eviction) in itertools.product(
      [
        ('lockstep', baselines.Lockstep()),
        ('runahead', runahead.Runahead()),
        ('runahead_free', runahead.Runahead(max_lag=None, near=None, depth=3)),
      ],
      [(2, 'lru'), (4, 'reuse'), (8, 'lfu_decayed')],
    )
  }
)
# Scheduler, eviction, prefetcher: each of them at least once, each prefetcher
# guarded and not, near and far, under both schedulers.
_PREFETCHED = {
  'gate_lru': ('lockstep', 'lru', prefetch.NextGate(guarded=False)),
  'gate_deep': ('runahead', 'lfu_decayed', prefetch.NextGate(depth=2)),
  'transition_deep': ('lockstep', 'reuse', prefetch.Transition(depth=3)),
  'transition': (
    'runahead',
    'lfu',
    prefetch.Transition(confidence=0, guarded=False),
  ),
  'popularity': ('lockstep', 'fifo', prefetch.Popularity(depth=2)),
  'history': ('runahead', 'reuse', prefetch.History(guarded=False, depth=2)),
  'mixture': ('runahead', 'reuse', prefetch.Mixture(confidence=0.1)),
  'mixture_deep': ('lockstep', 'lru', prefetch.Mixture(depth=2)),
  'oracle': ('runahead', 'lru', prefetch.Oracle(p=0.7, guarded=False)),
  'oracle_sure': ('lockstep', 'lfu_decayed', prefetch.Oracle(depth=2)),
}
_NONE = prefetch.Nothing()
_VARIANTS = {
  name: worlds.Trio(*both, far='hops' in name) for name, both in _PLAIN.items()
} | {
  name: worlds.Trio(
    config_lib.SCHEDULERS[scheduler], config_lib.EVICTIONS[policy], rule
  )
  for name, (scheduler, policy, rule) in _PREFETCHED.items()
}
_VARIANTS['history_hops'] = worlds.Trio(
  runahead.Runahead(hops=4),
  config_lib.EVICTIONS['lfu_decayed'],
  prefetch.History(guarded=False, depth=2),
  far=True,
)
# Variants in which every layer has its own part of the slots.
_VARIANTS |= {
  f'{scheduler}_{eviction}_layer': worlds.Trio(
    config_lib.SCHEDULERS[scheduler],
    config_lib.EVICTIONS[eviction],
    rule,
    parted=True,
  )
  for (scheduler, eviction), rule in zip(
    itertools.product(_FIRST, ['lru', 'random', 'least_stale', 'reuse']),
    [_NONE, prefetch.Transition(depth=2), prefetch.NextGate(), _NONE] * 2,
    strict=True,
  )
}
_SEEDS = 60
_TWICE = 10  # Of so many worlds one asks every policy twice.


@pytest.mark.slow
class LawsTest(parameterized.TestCase):
  @parameterized.parameters(*_VARIANTS)
  def test_laws(self, variant: str):
    for seed in range(_SEEDS):
      with self.subTest(seed=seed):
        testing.check(_VARIANTS[variant], seed, pure=not seed % _TWICE)

  @parameterized.parameters(*_VARIANTS)
  def test_equal_runs_make_equal_decisions(self, variant: str):
    for seed in range(100, 104):
      trio = _VARIANTS[variant]
      world = worlds.world(seed, trio.far)
      self.assertEqual(worlds.run(trio, world), worlds.run(trio, world))

  @parameterized.parameters(*_PLAIN)
  def test_the_identical_share_their_loads(self, variant: str):
    model = model_config.tiny()
    loads = []
    for count in (1, 6):
      requests = [
        request_lib.Request(number=i, prompt=(3, 4, 5, 6, 7, 8), new_tokens=12)
        for i in range(count)
      ]
      world = worlds.World(model, 6, 12, 3, requests, [0] * count, None, 0)
      log = worlds.run(_VARIANTS[variant], world)
      texts = {
        tuple(t.token for t in log_laws.of(log, events.Token) if t.request == i)
        for i in range(count)
      }
      self.assertLen(texts, 1)
      loads.append(len(log_laws.of(log, events.LoadIssued)))
    self.assertGreater(loads[0], 12)
    self.assertLessEqual(loads[1], 1.05 * loads[0])


if __name__ == '__main__':
  absltest.main()
