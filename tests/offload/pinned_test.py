"""Pinned blocks that are rewritten in place."""

import jax
import numpy as np
from absl.testing import absltest

from bevy_jax.offload import pinned

SHAPE = (3, 5, 7)


class JaxMemoryTest(absltest.TestCase):
  def memory(self) -> pinned.JaxMemory:
    return pinned.JaxMemory(SHAPE, np.dtype(np.float16), jax.devices()[0])

  def test_copies_see_what_was_written_last(self):
    block = self.memory().block()
    for value in (1, 2, 3):
      block.view[...] = value
      there = jax.device_put(block.array, jax.memory.Space.Device)
      got = np.array(jax.jit(lambda x: x + 0)(there))
      np.testing.assert_array_equal(got, np.full(SHAPE, value, np.float16))

  def test_blocks_share_nothing(self):
    memory = self.memory()
    blocks = [memory.block() for _ in range(3)]
    for number, block in enumerate(blocks):
      block.view[...] = number
    for number, block in enumerate(blocks):
      self.assertEqual(set(block.view.ravel().tolist()), {number})

  def test_a_block_begins_at_a_page_where_that_is_ours(self):
    block = self.memory().block()
    self.assertEqual(block.view.shape, SHAPE)
    self.assertEqual(block.address, block.array.unsafe_buffer_pointer())
    if jax.default_backend() == 'cpu':
      self.assertEqual(block.address % pinned.PAGE, 0)


class AlignedTest(absltest.TestCase):
  def test_a_read_may_be_rounded_up(self):
    for _ in range(20):
      array = pinned.aligned((3, 1000), np.dtype(np.uint8))
      self.assertEqual(array.ctypes.data % pinned.PAGE, 0)
      base = array
      while base.base is not None:
        base = base.base
      behind = base.ctypes.data + base.nbytes - array.ctypes.data
      self.assertGreaterEqual(behind, 4096)


if __name__ == '__main__':
  absltest.main()
