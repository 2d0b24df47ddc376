"""Launches of a tiny model, timed: what is counted is there."""

import pytest
from absl.testing import absltest, parameterized

from bevy_jax.experiments import launch_times


@pytest.mark.slow
class MeasureTest(parameterized.TestCase):
  @parameterized.parameters(('int8', 1 + 2 / 32))
  def test_a_tiny_model(self, form, width):
    point = launch_times.Point(
      'tiny', form, rows=2, hops=1, context=16, turns=2
    )
    cost = launch_times.measure(point, lambda words: None)
    self.assertGreater(cost.layer_us, 0)
    self.assertGreater(cost.host_us, 0)
    self.assertGreater(cost.floor_us, 0)
    self.assertFalse(cost.kernels)
    # Two rows choose two of eight experts each.
    self.assertBetween(cost.distinct, 2, 4)
    # Queries, keys, values, output, router, four norms; here in float32.
    shared = 64 * (32 + 16 + 16) + 32 * 64 + 64 * 8 + 2 * 64 + 2 * 8
    kept = 2 * 2 * 8 * 2 * 16  # Keys and values of two heads of 8.
    experts = cost.distinct * 3 * 64 * 64 * width
    self.assertAlmostEqual(cost.layer_bytes, 4 * (shared + kept) + experts)


if __name__ == '__main__':
  absltest.main()
