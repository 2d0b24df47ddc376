"""Bounds against schedules counted by hand, brute force and the engine."""

import functools

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from bevy_jax import baselines, bounds, busy, engine, events, protocols
from bevy_jax import request as request_lib
from bevy_jax.layers import config as model_config
from bevy_jax.offload import eviction, slot_table

LAYERS, EXPERTS, TOP_K = 4, 8, 2


class Scripted:
  """Executor on a clock of its own; routing drawn by row and turn."""

  chunk, hops = 4, 1

  def __init__(self, seed):
    self.seed, self.clock, self.link_free, self.gpu_free = seed, 0, 0, 0
    self.turns, self.happening = {}, []

  def load(self, key, slot):
    del slot
    self.link_free = max(self.clock, self.link_free) + 70
    self.happening.append(protocols.Landed(self.link_free, key))

  def launch(self, number, batch):
    rows = list(batch.rows) or [e.row for e in batch.entries]
    duration = 20 + 3 * batch.experts.bit_count() + 2 * len(rows)
    self.gpu_free = max(self.clock, self.gpu_free) + duration
    last = batch.kind == 'decode' and batch.layer == LAYERS - 1
    self.happening.append(
      protocols.Ended(
        self.gpu_free,
        number,
        [
          protocols.Hop(
            [7 if last else -1] * len(rows),
            [True] * len(rows),
            [self.choose(row) for row in rows],
          )
        ]
        if batch.finish
        else [],
      )
    )

  def choose(self, row):
    turn = self.turns[row] = self.turns.get(row, 0) + 1
    rng = np.random.default_rng((self.seed, row, turn))
    return tuple(rng.permutation(EXPERTS)[:TOP_K].tolist())

  def poll(self):
    due = [e for e in self.happening if e.time <= self.clock]
    self.happening = [e for e in self.happening if e.time > self.clock]
    return sorted(due, key=lambda e: e.time)

  def wait(self):
    self.clock = min(e.time for e in self.happening)

  def now(self):
    return self.clock

  def close(self):
    self.happening = []


@functools.cache
def lockstep_log(name, slots, rows, lengths, depth=3, quota=()):
  """A log of the engine: lockstep, cold cache, prompts of one token."""
  run = engine.Engine(
    model_config.tiny(num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K),
    Scripted(slots),
    baselines.Lockstep(),
    eviction.EVICTIONS[name],
    rows=rows,
    slots=slots,
    link_depth=depth,
    quota=quota,
  )
  for number, length in enumerate(lengths):
    run.submit(
      request_lib.Request(number=number, prompt=(5,), new_tokens=length)
    )
  while run.busy:
    run.step()
    run.table.check_integrity()
  return run.log


def path_of(*uses, experts=10):
  """Steps of one request: layer = key // experts."""
  return [
    bounds.Step(keys[0] // experts, (dict.fromkeys(keys, 1),), 1)
    for keys in uses
  ]


def fewest(path, slots):
  """Least misses over every choice of victims; keys of a step stay put."""

  @functools.cache
  def best(i, held):
    if i == len(path):
      return 0
    keys = frozenset(path[i].keys)
    after = {held | keys}
    while len(next(iter(after))) > slots:
      after = {h - {key} for h in after for key in h - keys}
    return len(keys - held) + min(best(i + 1, h) for h in after)

  return best(0, frozenset())


class BeladyTest(parameterized.TestCase):
  def test_by_hand(self):
    # Two slots. 1, 2 load; 3 replaces 2 (1 is next), 1 hits; 2 replaces 1 or
    # 3, of which neither comes again before 3: 1 goes; 3 hits.
    path = path_of([1], [2], [3], [1], [2], [3])
    self.assertEqual(bounds.belady_misses(path, 2), [1, 1, 1, 0, 1, 0])

  def test_a_step_never_gives_up_its_own(self):
    # Three slots hold 1, 2, 3. The step {4, 1} must keep 1 though its next use
    # is the farthest: 3, needed after 2, goes, and is loaded again.
    path = path_of([1, 2, 3], [1, 4], [2], [4], [3], [1])
    self.assertEqual(bounds.belady_misses(path, 3), [3, 1, 0, 0, 1, 0])

  def test_all_beyond_the_cache_misses(self):
    # {1..5} in two slots: five loads; 2 and 4, wanted soonest, stay.
    path = path_of([1, 2, 3, 4, 5], [4], [2], [1, 3, 4])
    self.assertEqual(bounds.belady_misses(path, 2), [5, 0, 0, 2])

  def test_with_a_quota_each_layer_is_a_cache_of_its_own(self):
    # One pool of four keeps all; with two slots a layer 2 gives way to 3, for
    # layer 1 may not lend its second slot, and is loaded again.
    path = path_of([1], [11], [2], [11], [3], [11], [1], [2], [3])
    wanted = [1, 1, 1, 0, 1, 0, 0, 1, 0]
    self.assertEqual(bounds.belady_misses(path, 4, (2, 2)), wanted)
    self.assertEqual(sum(bounds.belady_misses(path, 4)), 4)

  @parameterized.parameters(range(6))
  def test_nothing_beats_it(self, seed):
    rng = np.random.default_rng(seed)
    steps = [
      sorted(int(k) for k in rng.choice(6, rng.integers(1, 4), replace=False))
      for _ in range(9)
    ]
    path = path_of(*steps)
    for slots in (3, 4):
      found = sum(bounds.belady_misses(path, slots))
      self.assertEqual(found, fewest(path, slots), f'{steps}, {slots} slots')


@pytest.mark.slow
class LockstepTest(parameterized.TestCase):
  def replay(self, path, name, slots, rows, quota=()):
    return bounds.lockstep_misses(
      path,
      layers=LAYERS,
      experts=EXPERTS,
      slots=slots,
      rows=rows,
      eviction=eviction.EVICTIONS[name],
      quota=quota,
    )

  @parameterized.product(
    name=('lru', 'random', 'least_stale', 'reuse'),
    quota=((2,) * 4, (3, 3, 2, 2), (8, 2, 5, 4), (8,) * 4),
    lengths=((9, 9, 9), (5, 1, 7, 4, 6, 2)),
  )
  def test_equals_the_engine_with_a_quota(self, name, quota, lengths):
    slots = sum(quota)
    log = lockstep_log(name, slots, 3, lengths, quota=quota)
    path = bounds.steps(log, EXPERTS, -1, len(log))
    misses = self.replay(path, name, slots, 3, quota)
    loads = [e.key // EXPERTS for e in log if isinstance(e, events.LoadIssued)]
    each = [0] * LAYERS
    for step, count in zip(path, misses, strict=True):
      each[step.layer] += count
    self.assertEqual(each, [loads.count(layer) for layer in range(LAYERS)])
    best = bounds.belady_misses(path, slots, quota)
    self.assertLessEqual(sum(best), len(loads))

  def test_a_split_is_as_even_as_may_be(self):
    self.assertEqual(slot_table.split(11, 4), (3, 3, 3, 2))
    self.assertEqual(slot_table.split(8, 4), (2, 2, 2, 2))

  @parameterized.product(
    name=('lru', 'lfu_decayed', 'lfu', 'fifo', 'least_stale', 'reuse'),
    slots=(2, 3, 5, 8, 16, 31, 32),
    lengths=((9, 9, 9), (6, 20, 3), (5, 1, 7, 4, 6, 2), (3,) * 6),
  )
  def test_equals_the_engine(self, name, slots, lengths):
    log = lockstep_log(name, slots, 3, lengths)
    path = bounds.steps(log, EXPERTS, -1, len(log))
    misses = self.replay(path, name, slots, 3)
    loads = [e for e in log if isinstance(e, events.LoadIssued)]
    self.assertEqual(sum(misses), len(loads))
    # Not the sum alone: each layer's loads, in order.
    layers = [s.layer for s, n in zip(path, misses, strict=True) if n]
    ran = [e.key // EXPERTS for e in loads]
    turns = [x for i, x in enumerate(ran) if i == 0 or ran[i - 1] != x]
    again = [x for i, x in enumerate(layers) if i == 0 or layers[i - 1] != x]
    self.assertEqual(turns, again)
    self.assertLessEqual(sum(bounds.belady_misses(path, slots)), len(loads))

  def test_by_hand_lru(self):
    # Layer 0 has keys 0.., layer 1 keys 8... Two slots, one request: 0 and 1
    # load, 8 takes the place of 0, 9 that of 1, then 0 that of 8; 9 stays,
    # and 8 replaces it for it was used before 0.
    path = path_of([0, 1], [8], [9], [0], [8], experts=EXPERTS)
    self.assertEqual(self.replay(path, 'lru', 2, 1), [2, 1, 1, 1, 1])

  def test_a_step_never_gives_up_its_own(self):
    # Three slots hold 1, 2, 3, and 3 is used least: yet for {3, 4} it stays
    # and 1, the lower of equals, goes.
    path = path_of([3], *[[1, 2]] * 4, [3, 4], [3], [1], experts=EXPERTS)
    found = self.replay(path, 'lfu_decayed', 3, 1)
    self.assertEqual(found, [1, 2, 0, 0, 0, 1, 0, 1])

  def test_waves_take_ascending_ids(self):
    # {1, 2, 3} in two slots: 1, 2, then 3 instead of 1, the lower of equals.
    # What is resident at the end is 2, 3: the next step hits both.
    path = path_of([1, 2, 3], [2, 3], [1], experts=EXPERTS)
    self.assertEqual(self.replay(path, 'lru', 2, 1), [3, 0, 1])


class StepsTest(absltest.TestCase):
  def routed(self, request, token, layer, experts, position):
    return events.Routed(0, request, token, layer, experts, 0, position)

  def test_runahead_comes_back_into_lockstep_order(self):
    log = [
      events.Admitted(0, 0, 0, 1, 0),
      events.Admitted(0, 1, 1, 1, 0),
      self.routed(0, 0, 0, (3, 1), 0),
      self.routed(0, 0, 1, (2, 4), 1),
      self.routed(1, 0, 0, (1, 5), 0),
      self.routed(1, 0, 1, (0, 2), 1),
    ]
    path = bounds.steps(log, 8, 2, 5)
    self.assertEqual([s.keys for s in path], [[1, 3, 5], [8, 10, 12]])
    self.assertEqual(path[1].uses, ({8: 1, 10: 2, 12: 1},))
    # Of step 0 only request 1 lies in the window, of step 1 only request 0.
    self.assertEqual([s.share for s in path], [0.5, 0.5])
    self.assertEqual(bounds.inside(path, [6, 10]), 8)

  def test_a_new_pack_has_steps_of_its_own(self):
    log = [
      events.Admitted(0, 0, 0, 1, 0),
      self.routed(0, 0, 0, (3,), 0),
      events.Finished(0, 0, 'length'),
      events.Admitted(0, 1, 0, 1, 0),
      self.routed(1, 0, 0, (4,), 0),
    ]
    path = bounds.steps(log, 8, 0, 9)
    self.assertEqual([s.keys for s in path], [[3], [4]])

  def test_those_who_enter_come_apart(self):
    log = [
      events.Admitted(0, 0, 0, 1, 0),
      self.routed(0, 2, 0, (5,), 8),
      events.Admitted(0, 1, 1, 1, 0),
      self.routed(1, 0, 0, (1,), 8),
    ]
    self.assertEqual(bounds.steps(log, 8, 0, 9)[0].uses, ({5: 1}, {1: 1}))


class FitTest(parameterized.TestCase):
  def ran(self, samples, finish=True):
    return [
      busy.Ran(
        events.LaunchBegun(
          0,
          0,
          'decode',
          0,
          tuple(range(rows)),
          tuple(range(distinct)),
          finish,
          1,
          (0,) * 4,
        ),
        0,
        ns,
      )
      for distinct, rows, ns in samples
    ]

  def test_exact_costs_come_back(self):
    shapes = [(2, 1), (3, 1), (5, 2), (4, 3), (8, 4)]
    samples = [(d, r, 20_000 + 3_000 * d + 2_000 * r) for d, r in shapes]
    # A wave that does not finish costs less and says nothing of the whole.
    waves = self.ran([(2, 4, 1)], finish=False)
    cost = bounds.fit(self.ran(samples) + waves)
    np.testing.assert_allclose(cost, (20e-6, 3e-6, 2e-6), rtol=1e-6)
    self.assertAlmostEqual(cost.seconds(10, 4) * 1e6, 20 + 30 + 8, places=4)

  def test_no_cost_is_negative(self):
    # Fewer rows took longer: 90 - 10 r by plain least squares.
    cost = bounds.fit(self.ran([(1, 1, 80), (1, 2, 70), (1, 3, 60)]))
    self.assertGreaterEqual(min(cost), 0)
    # The best constant is the mean, however it is split up.
    self.assertAlmostEqual(cost.seconds(1, 2) * 1e9, 70, places=4)

  def test_one_launch_is_a_constant(self):
    self.assertEqual(bounds.fit(self.ran([(4, 2, 50)]))[1:], (0.0, 0.0))

  def test_no_launch_costs_nothing(self):
    self.assertEqual(bounds.fit([]), (0.0, 0.0, 0.0))


class HeadroomTest(absltest.TestCase):
  def test_the_link_works_ahead(self):
    # Loads land at 4, 5, 14 and 14; launches end at 7, 10, 17 and 20.
    found = bounds.headroom([4, 1, 9, 0], [3, 3, 3, 3])
    self.assertEqual(found, 20)

  def test_what_it_lies_between(self):
    rng = np.random.default_rng(0)
    for _ in range(20):
      loads, device = rng.integers(0, 9, (2, 12)).tolist()
      found = bounds.headroom(loads, device)
      self.assertGreaterEqual(found, max(sum(loads), sum(device)))
      self.assertLessEqual(found, sum(loads) + sum(device))
    self.assertEqual(bounds.headroom([], []), 0)


if __name__ == '__main__':
  absltest.main()
