"""What has been used, when and how often."""

import numpy as np
from absl.testing import absltest

from bevy_jax.offload import uses as uses_lib


class UsesTest(absltest.TestCase):
  def test_counts_halve_every_sixteen_tokens(self):
    uses = uses_lib.Uses(1, 3)
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
    uses = uses_lib.Uses(1, 2)
    for clock in range(0, 100_000, 8):
      uses.advance(float(clock))
      uses.touch(0)
      uses.touch(1, times=2)
    # 1 + 2^-1/2 + 2^-1 + ... against twice that.
    self.assertAlmostEqual(uses.weight[1] / uses.weight[0], 2.0)
    self.assertLess(uses.weight[1], 1e250)

  def test_last_use_load_and_layer(self):
    uses = uses_lib.Uses(2, 3)
    self.assertEqual(uses.layer, -1)
    uses.load(4)
    uses.touch(4, times=3)
    uses.touch(1)
    uses.load(1)
    self.assertEqual(uses.last.tolist(), [0, 3, 0, 0, 2, 0])
    self.assertEqual(uses.loaded.tolist(), [0, 4, 0, 0, 1, 0])
    self.assertEqual([int(c) for c in uses.count], [0, 1, 0, 0, 1, 0])
    self.assertEqual(uses.layer, 0)
    # Equally often used: the later load counts as more.
    self.assertGreater(uses.count[1], uses.count[4])

  def test_many_at_once_are_touched_one_after_another(self):
    for count in (3, 20, 40):
      times = {(7 * i) % 41: 1 + i % 3 for i in range(count)}
      one, two = uses_lib.Uses(2, 41), uses_lib.Uses(2, 41)
      for uses in (one, two):
        uses.load(45)
        uses.advance(9.0)
      for expert in sorted(times):
        one.touch(41 + expert, times[expert])
      two.touch_all(1, [e for e, n in times.items() for _ in range(n)])
      for name in ('last', 'count', 'weight'):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
      self.assertEqual((one.tick, one.layer), (two.tick, two.layer))

  def test_no_estimate_unless_asked_for(self):
    uses = uses_lib.Uses(1, 3, 2)
    uses.reveal(0, [0], [[1]])
    uses.leave(0)
    self.assertIsNone(uses.estimate)


if __name__ == '__main__':
  absltest.main()
