"""Pinned control buffers: what is written is what a program reads."""

import jax
import numpy as np
from absl.testing import absltest

from bevy_jax import control, steps


class RingTest(absltest.TestCase):
  def test_buffers_come_in_turn_and_carry_what_is_written(self):
    ring = control.ControlRing([(1,), (2, 2)], 3, jax.local_devices()[0])
    program = jax.jit(lambda a: steps.to_device(a) * 2)
    seen = set()
    for turn in range(7):
      (first, rest), array = ring.take()
      seen.add(array.unsafe_buffer_pointer())
      first[0] = turn
      rest[:] = np.array([[1, 2], [3, 4]]) + turn
      got = np.asarray(program(array))
      np.testing.assert_array_equal(got, 2 * (np.arange(5) + turn))
    self.assertLen(seen, 3)
    self.assertEqual(program._cache_size(), 1)


if __name__ == '__main__':
  absltest.main()
