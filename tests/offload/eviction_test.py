"""Which expert gives up its slot."""

from absl.testing import absltest

from bevy_jax.offload import eviction


class UsesTest(absltest.TestCase):
  def test_counts_halve_every_sixteen_tokens(self):
    uses = eviction.Uses(3)
    uses.touch(0, times=4)
    uses.advance(16.0)
    uses.touch(1, times=2)
    self.assertAlmostEqual(uses.weight[0] / uses.weight[1], 1.0)
    uses.advance(48.0)
    uses.touch(2)
    # Two halvings more for both: 4 / 8 and 2 / 4 against 1.
    self.assertAlmostEqual(uses.weight[0] / uses.weight[2], 0.5)
    self.assertAlmostEqual(uses.weight[1] / uses.weight[2], 0.5)

  def test_a_long_run_does_not_overflow(self):
    uses = eviction.Uses(2)
    for clock in range(0, 100_000, 8):
      uses.advance(float(clock))
      uses.touch(0)
      uses.touch(1, times=2)
    # 1 + 2^-1/2 + 2^-1 + ... against twice that.
    self.assertAlmostEqual(uses.weight[1] / uses.weight[0], 2.0)
    self.assertLess(uses.weight[1], 1e250)


class VictimTest(absltest.TestCase):
  def test_lru_gives_up_what_was_used_longest_ago(self):
    uses = eviction.Uses(5)
    for key in (3, 1, 4, 3):
      uses.touch(key)
    lru = eviction.EVICTIONS['lru']
    self.assertEqual(lru.victim([1, 3, 4], uses), 1)
    self.assertEqual(lru.victim([3, 4], uses), 4)
    # Never used: before all others, the lowest first.
    self.assertEqual(lru.victim([0, 1, 2, 3], uses), 0)

  def test_lfu_gives_up_what_was_used_least(self):
    uses = eviction.Uses(5)
    for key, times in ((0, 3), (1, 1), (2, 2), (3, 1)):
      uses.touch(key, times)
    lfu = eviction.EVICTIONS['lfu_decayed']
    self.assertEqual(lfu.victim([0, 1, 2, 3], uses), 1)
    self.assertEqual(lfu.victim([0, 2, 3], uses), 3)
    self.assertEqual(lfu.victim([0, 2, 4], uses), 4)

  def test_lfu_forgets(self):
    uses = eviction.Uses(2)
    uses.touch(0, times=8)
    uses.advance(64.0)
    uses.touch(1)
    self.assertEqual(eviction.LfuDecayed().victim([0, 1], uses), 0)


if __name__ == '__main__':
  absltest.main()
