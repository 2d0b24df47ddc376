"""Replays, against a scan by hand and the recorded facts of real routing."""

import functools
import pathlib
import unittest

import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax import replay, trace
from bevy_jax.offload import eviction

_FILE = (
  pathlib.Path(__file__).resolve().parents[3]
  / 'shared/data/traces/gptoss20b/gptoss20b_lite64x256.npz'
)
_TOKENS = range(64, 160)
_FACTS = (
  (1, 0.25, {'lru': 0.323, 'lfu': 0.294, 'belady': 0.176}),
  (1, 0.5, {'lru': 0.085, 'lfu': 0.062, 'belady': 0.052}),
  (4, 0.25, {'lru': 1.0, 'lfu': 0.553, 'belady': 0.386}),
  (4, 0.5, {'lru': 0.296, 'lfu': 0.195, 'belady': 0.109}),
  (4, 0.75, {'lru': 0.051, 'lfu': 0.043, 'belady': 0.031}),
  (8, 0.25, {'lru': 1.0, 'lfu': 0.695, 'belady': 0.577}),
  (8, 0.5, {'lru': 0.958, 'lfu': 0.288, 'belady': 0.178}),
  (8, 0.75, {'lru': 0.081, 'lfu': 0.056, 'belady': 0.036}),
  (16, 0.5, {'lru': 1.0, 'lfu': 0.436, 'belady': 0.327}),
  (16, 0.75, {'lru': 0.164, 'lfu': 0.101, 'belady': 0.062}),
)


@functools.cache
def _real():
  return trace.load(_FILE)


def _misses(rows, cache, name, skip=0):
  rule = None if name == 'belady' else eviction.EVICTIONS[name]
  slots = int(cache * _real().layers * _real().num_experts)
  found = replay.misses(_real(), range(rows), _TOKENS, slots, rule)
  return sum(found[skip * _real().layers :])


def _small(seed):
  rng = np.random.default_rng(seed)
  experts = np.argsort(rng.random((3, 20, 2, 5)), axis=-1)[..., :2]
  lengths = np.array([20, 20, 12], np.int32)
  return trace.Trace(
    experts=experts.astype(np.int16), lengths=lengths, num_experts=5
  )


class ReplayTest(parameterized.TestCase):
  @parameterized.parameters(range(4))
  def test_lru_by_hand(self, seed):
    small, slots = _small(seed), 7
    held: list[int] = []  # Oldest use first.
    wanted = []
    for token in range(2, 12):
      for layer in range(2):
        ids = set(small.experts[:2, token, layer].ravel().tolist())
        keys = sorted(layer * 5 + e for e in ids)
        missing = [key for key in keys if key not in held]
        wanted.append(len(missing))
        room = len(held) + len(missing) - slots
        gone = [key for key in held if key not in keys][: max(0, room)]
        held = [k for k in held if k not in keys and k not in gone] + keys
    lru = eviction.EVICTIONS['lru']
    self.assertEqual(
      replay.misses(small, range(2), range(2, 12), slots, lru), wanted
    )

  def test_nothing_beats_belady(self):
    for seed in range(4):
      best = replay.misses(_small(seed), range(2), range(20), 6, None)
      for name, rule in eviction.EVICTIONS.items():
        found = replay.misses(_small(seed), range(2), range(20), 6, rule)
        self.assertGreaterEqual(sum(found), sum(best), name)

  def test_refuses_what_is_not_there(self):
    with self.assertRaisesRegex(ValueError, 'request 3 is not in the trace'):
      replay.path(_small(0), [0, 3], range(5))
    with self.assertRaisesRegex(ValueError, 'request 2 are asked for.* 12'):
      replay.path(_small(0), range(3), range(5, 13))


@unittest.skipUnless(_FILE.is_file(), 'the recorded routing is not here')
class RealRoutingTest(parameterized.TestCase):
  @parameterized.parameters(*_FACTS)
  def test_recorded_miss_rates(self, rows, cache, rates):
    steps = replay.path(_real(), range(rows), _TOKENS)
    uses = sum(len(step.keys) for step in steps)
    for name, rate in rates.items():
      found = _misses(rows, cache, name) / uses
      self.assertAlmostEqual(found, rate, delta=0.003, msg=name)

  def test_reuse_keeps_its_bar(self):
    ratios = []
    for rows in (4, 8, 16):
      for cache in (0.25, 0.5, 0.75):
        best, lfu, decayed, reuse = (
          _misses(rows, cache, name, skip=32)
          for name in ('belady', 'lfu', 'lfu_decayed', 'reuse')
        )
        ratios.append(reuse / best)
        self.assertLessEqual(reuse, min(lfu, decayed), (rows, cache))
    self.assertLessEqual(np.mean(ratios), 1.50)


if __name__ == '__main__':
  absltest.main()
