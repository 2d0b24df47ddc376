"""Prefetchers on a trace: by hand, and the recorded finding."""

import functools
import pathlib
import unittest

import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax import foresight, replay, trace
from bevy_jax.offload import eviction, prefetch

_FILE = (
  pathlib.Path(__file__).resolve().parents[3]
  / 'shared/data/traces/gptoss20b/gptoss20b_lite64x256.npz'
)
_LRU = eviction.EVICTIONS['lru']


def _small(seed: int) -> trace.Trace:
  rng = np.random.default_rng(seed)
  experts = np.argsort(rng.random((3, 20, 3, 5)), axis=-1)[..., :2]
  return trace.Trace(
    experts=experts.astype(np.int16),
    lengths=np.full(3, 20, np.int32),
    num_experts=5,
  )


class ForesightTest(parameterized.TestCase):
  @parameterized.product(
    seed=(0, 1, 2), slots=(4, 7, 11), name=('lru', 'lfu_decayed', 'reuse')
  )
  def test_who_only_looks_changes_nothing(self, seed, slots, name):
    rule = eviction.EVICTIONS[name]
    args = _small(seed), range(3), range(2, 18), slots, rule
    seen = foresight.see(*args, prefetch.Transition())
    self.assertEqual(seen.misses, replay.misses(*args))
    self.assertEqual(seen.figures['prefetch_loads'], 0)

  def test_by_hand(self):
    """One request, two layers of three experts, top-1, three slots."""
    ids = [[0, 1], [0, 1], [1, 1], [0, 2], [0, 1]]
    found = trace.Trace(
      experts=np.array(ids, np.int16)[None, :, :, None],
      lengths=np.array([5], np.int32),
      num_experts=3,
    )
    rule = prefetch.Transition(confidence=0)
    seen = foresight.see(found, [0], range(5), 3, _LRU, rule)
    # Keys 0 4 | 0 4 | 1 4 | 0 5 | 0 4: misses 0 4, 1, 5, and 4, which left
    # for 5? No: 5 took the place of 1, so 4 stayed.
    self.assertEqual(seen.misses, [1, 1, 0, 0, 1, 0, 0, 1, 0, 0])
    # Guessed are, from the second token on: 1 (right); 0 (wrong: 1); nothing,
    # as 1 is new; 0 (right); 1 (wrong: 2); nothing; 1 (right).
    self.assertAlmostEqual(seen.figures['guess_accuracy'], 3 / 5)
    # All that were guessed were there, all that were missing were not guessed.
    self.assertEqual(seen.figures['missing_recall'], 0)
    self.assertEqual(seen.figures['missing_precision'], 0)

  def test_an_oracle_loads_in_time(self):
    args = _small(0), range(3), range(20), 7, _LRU
    plain = foresight.see(*args, prefetch.Nothing())
    sure = foresight.see(*args, prefetch.Oracle(), ahead=5)
    # Nobody foresees the first step, and what looks as warm as can be is not
    # given up for a guess.
    self.assertGreater(sum(plain.misses[3:]), 100)
    self.assertLess(sum(sure.misses[3:]), 15)
    self.assertEqual(sure.figures['missing_recall'], 1)
    self.assertEqual(sure.figures['missing_precision'], 1)
    self.assertEqual(sure.figures['wasted_prefetches'], 0)
    half = foresight.see(*args, prefetch.Oracle(p=0.5), ahead=5)
    self.assertBetween(sum(half.misses), 40, sum(plain.misses))
    self.assertGreater(half.figures['wasted_prefetches'], 0)

  def test_a_trace_has_no_routers(self):
    with self.assertRaisesRegex(ValueError, "replay 'oracle'"):
      foresight.see(
        _small(0), range(3), range(20), 7, _LRU, prefetch.NextGate()
      )


@unittest.skipUnless(_FILE.is_file(), 'the recorded routing is not here')
class RealRoutingTest(absltest.TestCase):
  @functools.cached_property
  def counts(self):
    """Of requests that do not decode here."""
    return trace.Trace(
      experts=self.trace.experts[16:],
      lengths=self.trace.lengths[16:],
      num_experts=self.trace.num_experts,
    ).counts()

  @functools.cached_property
  def trace(self):
    return trace.load(_FILE)

  def test_the_larger_the_cache_the_less_is_foreseen_of_its_misses(self):
    """Recorded: recall .57 .50 .33 .18, precision .53 .42 .25 .09."""
    rule = prefetch.Transition(confidence=0, counts=self.counts)
    pairs = self.trace.layers * self.trace.num_experts
    recalls, precisions = [], []
    for cache in (0.1, 0.25, 0.5, 0.75):
      found = [
        foresight.see(
          self.trace,
          [request],
          range(64, 128),
          int(cache * pairs),
          _LRU,
          rule,
          warmup=32,
        ).figures
        for request in range(2)
      ]
      recalls.append(np.mean([f['missing_recall'] for f in found]))
      precisions.append(np.mean([f['missing_precision'] for f in found]))
    for found in (recalls, precisions):
      self.assertEqual(found, sorted(found, reverse=True))
    np.testing.assert_allclose(recalls, [0.57, 0.5, 0.33, 0.18], atol=0.15)
    np.testing.assert_allclose(precisions, [0.53, 0.42, 0.25, 0.09], atol=0.15)


if __name__ == '__main__':
  absltest.main()
