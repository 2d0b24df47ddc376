"""Pinned blocks that are rewritten in place."""

import gc
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest

from bevy_jax.offload import cuda, cuda_fake, pinned

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


class RegisteredMemoryTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.fake = cuda_fake.Runtime()
    self.runtime = cuda.Runtime(jax.devices()[0], self.fake)

  def memory(self, count: int, piece: int = 2**14) -> pinned.RegisteredMemory:
    with mock.patch.object(pinned, '_PIECE', piece):
      return pinned.RegisteredMemory(
        count, SHAPE, np.dtype(np.float16), self.runtime
      )

  def test_blocks_begin_at_pages_and_share_nothing(self):
    memory = self.memory(9)
    blocks = [memory.block() for _ in range(9)]
    for number, block in enumerate(blocks):
      block.view[...] = number
    for number, block in enumerate(blocks):
      self.assertEqual((block.view.shape, block.array), (SHAPE, None))
      self.assertEqual(block.address % pinned.PAGE, 0)
      self.assertEqual(set(block.view.ravel().tolist()), {number})
    self.assertLen({b.address for b in blocks}, 9)

  def test_every_block_lies_in_one_piece_that_was_pinned_before(self):
    """A copy across two pieces is one of memory that CUDA does not know.

    Seen to fail: pieces pinned two pages short.
    """
    memory = self.memory(9)
    for _ in range(9):
      block = memory.block()
      first, last = block.address, block.address + block.view.nbytes
      self.assertTrue(
        any(a <= first and last <= a + n for a, n in self.fake.pinned.items())
      )
    self.assertLen(self.fake.pinned, 3)  # four pages a piece

  def test_no_more_is_pinned_than_blocks_need(self):
    memory = self.memory(9)
    self.assertEmpty(self.fake.pinned)
    memory.block()
    self.assertEqual(sum(self.fake.pinned.values()), 4 * pinned.PAGE)
    for _ in range(8):
      memory.block()
    self.assertEqual(sum(self.fake.pinned.values()), 9 * pinned.PAGE)
    with self.assertRaisesRegex(MemoryError, 'all 9 blocks'):
      memory.block()

  def test_a_block_larger_than_a_piece_is_one(self):
    memory = self.memory(2, piece=100)
    for _ in range(2):
      memory.block()
    self.assertEqual(set(self.fake.pinned.values()), {pinned.PAGE})

  def test_it_lives_as_long_as_a_view_and_is_unpinned_once_all_is_idle(self):
    """Seen to fail: a finalizer on the memory in place of its area."""
    memory = self.memory(9)
    blocks = [memory.block() for _ in range(9)]
    del memory
    gc.collect()
    self.assertLen(self.fake.pinned, 3)
    last = blocks[4].view
    del blocks
    gc.collect()
    self.assertLen(self.fake.pinned, 3)
    del last
    gc.collect()
    self.assertEmpty(self.fake.pinned)
    names = [name for name, *_ in self.fake.calls]
    self.assertLess(
      names.index('cudaDeviceSynchronize'), names.index('cudaHostUnregister')
    )

  def test_what_cannot_be_pinned_is_an_error(self):
    self.fake.failing = {'cudaHostRegister'}
    with self.assertRaisesRegex(cuda.Error, 'cudaHostRegister failed'):
      self.memory(1).block()


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
