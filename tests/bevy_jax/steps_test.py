"""Segments of a model and the control vector, without running anything."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from bevy_jax import steps
from bevy_jax.layers import config as config_lib


class SegmentsTest(absltest.TestCase):
  def test_a_plain_model(self):
    config = config_lib.tiny(num_layers=3, moe_layers=(True,) * 3)
    segments = steps.segments(config)
    self.assertEqual([order for _, order in segments], [(1,), (2,), (0,)])
    self.assertEqual([s.head for s, _ in segments], [None, None, 0])
    self.assertEqual(segments[0][0], segments[1][0])  # compiled once
    self.assertEqual(steps.entry_segment(config)[1], (0,))
    prefill = steps.prefill_segments(config)
    self.assertEqual([p and p[1] for p in prefill], [(1,), (2,), None])

  def test_dense_layers_lie_within_segments(self):
    config = config_lib.tiny(
      num_layers=6,
      moe_layers=(False, True, False, True, False, False),
      windows=(1, 2, 3, 4, 5, 6),
    )
    (first, order), (last, around) = steps.segments(config)
    self.assertEqual((order, first.moe), ((2, 3), (False, True)))
    self.assertEqual((first.head, first.windows), (None, (3, 4)))
    # Behind the last experts: two layers, the head, then the new token.
    self.assertEqual((around, last.head), ((4, 5, 0, 1), 2))
    self.assertEqual(last.moe, (False, False, False, True))
    self.assertEqual(steps.entry_segment(config)[1], (0, 1))
    prefill = steps.prefill_segments(config)
    self.assertEqual([p and p[1] for p in prefill], [(2, 3), (4, 5)])
    self.assertEqual([p and p[0].head for p in prefill], [None, None])

  def test_one_layer_with_experts(self):
    config = config_lib.tiny(num_layers=1, moe_layers=(True,))
    ((segment, order),) = steps.segments(config)
    self.assertEqual((order, segment.head), ((0,), 0))
    self.assertEqual(steps.prefill_segments(config), [None])


class ControlTest(absltest.TestCase):
  def test_the_vector_is_taken_apart(self):
    config = config_lib.tiny()  # top-2 of 8
    self.assertEqual(steps.distinct_limit(config, 3), 6)
    self.assertEqual(steps.distinct_limit(config, 30), 8)
    self.assertEqual(steps.work_size(config, 3), 1 + 6 + 3 + 6)
    vector = [2, 5, 9, -1, -1, -1, -1, 4, 0, 7, 5, 9, 9, -1, 5, 5]
    rows, work = steps.work(config, 3, jnp.array(vector))
    np.testing.assert_array_equal(rows, [4, 0, 7])
    np.testing.assert_array_equal(work.distinct, [5, 9, -1, -1, -1, -1])
    np.testing.assert_array_equal(work.slots, [[5, 9], [9, -1], [5, 5]])


if __name__ == '__main__':
  absltest.main()
