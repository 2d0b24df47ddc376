"""Segments of a model and the control vector, without running anything."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from bevy_jax import prompt_steps, segments, steps
from bevy_jax.layers import config as config_lib


class SegmentsTest(absltest.TestCase):
  def test_a_plain_model(self):
    config = config_lib.tiny(num_layers=3, moe_layers=(True,) * 3)
    found = segments.segments(config)
    self.assertEqual([order for _, order in found], [(1,), (2,), (0,)])
    self.assertEqual([s.head for s, _ in found], [None, None, 0])
    self.assertEqual(found[0][0], found[1][0])  # compiled once
    self.assertEqual(segments.entry_segment(config)[1], (0,))
    prefill = segments.prefill_segments(config)
    self.assertEqual([p and p[1] for p in prefill], [(1,), (2,), None])

  def test_dense_layers_lie_within_segments(self):
    config = config_lib.tiny(
      num_layers=6,
      moe_layers=(False, True, False, True, False, False),
      windows=(1, 2, 3, 4, 5, 6),
    )
    (first, order), (last, around) = segments.segments(config)
    self.assertEqual((order, first.moe), ((2, 3), (False, True)))
    self.assertEqual((first.head, first.windows), (None, (3, 4)))
    # Behind the last experts: two layers, the head, then the new token.
    self.assertEqual((around, last.head), ((4, 5, 0, 1), 2))
    self.assertEqual(last.moe, (False, False, False, True))
    self.assertEqual(segments.entry_segment(config)[1], (0, 1))
    prefill = segments.prefill_segments(config)
    self.assertEqual([p and p[1] for p in prefill], [(2, 3), (4, 5)])
    self.assertEqual([p and p[0].head for p in prefill], [None, None])

  def test_one_layer_with_experts(self):
    config = config_lib.tiny(num_layers=1, moe_layers=(True,))
    ((segment, order),) = segments.segments(config)
    self.assertEqual((order, segment.head), ((0,), 0))
    self.assertEqual(segments.prefill_segments(config), [None])


class ControlTest(absltest.TestCase):
  def test_a_vector_is_taken_apart(self):
    config = config_lib.tiny()  # top-2 of 8
    self.assertEqual(
      steps.control_parts(config, 3, 2), [(1,), (1,), (3,), (2, 8)]
    )
    tables = np.arange(16).reshape(2, 8) - 1
    vector = [1, 3, 4, 0, 7, *tables.ravel()]
    asked = steps.read_control(config, 3, 2, jnp.array(vector))
    np.testing.assert_array_equal(asked.rows, [4, 0, 7])
    np.testing.assert_array_equal(asked.tables, tables)
    self.assertTrue(asked.together)

  def test_one_of_prompts_too(self):
    config = config_lib.tiny()
    self.assertEqual(steps.distinct_limit(config, 3), 6)
    self.assertEqual(steps.distinct_limit(config, 30), 8)
    self.assertEqual(
      prompt_steps.control_parts(config, 3), [(1,), (1,), (6,), (3, 2)]
    )
    vector = [2, 3, 5, 9, -1, -1, -1, -1, 5, 9, 9, -1, 5, 5]
    work = prompt_steps.work(config, 3, jnp.array(vector))
    np.testing.assert_array_equal(work.distinct, [5, 9, -1, -1, -1, -1])
    np.testing.assert_array_equal(work.slots, [[5, 9], [9, -1], [5, 5]])


if __name__ == '__main__':
  absltest.main()
