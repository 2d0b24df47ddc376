"""Host memory as a cache: what is fetched is right, stays, and is let go."""

import pathlib
import random
import tempfile
import time
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax.offload import (
  checkpoint,
  disk,
  disk_store,
  eviction,
  host_store,
  store,
)

_SHAPE = (3, 8, 50)  # 4,800 bytes: no whole page.
_KEYS = 12


def _fill(key: int, out: np.ndarray) -> None:
  out[...] = key + np.arange(out.size).reshape(out.shape) / 1024


def _block(key: int) -> np.ndarray:
  out = np.empty(_SHAPE, np.float32)
  _fill(key, out)
  return out


def _file(folder: str) -> disk.BlockFile:
  stride = checkpoint.stride(_SHAPE, np.dtype(np.float32))
  blocks = [_block(key) for key in range(_KEYS)]
  with open(f'{folder}/experts.bin', 'wb') as file:
    for block in blocks:
      file.write(block.tobytes().ljust(stride, b'\0'))
  return disk.BlockFile(
    pathlib.Path(folder) / 'experts.bin',
    [key * stride for key in range(_KEYS)],
    [checkpoint.checksum(block) for block in blocks],
    blocks[0].nbytes,
  )


def _open(file: disk.BlockFile, blocks: int, policy: str = 'lru'):
  return disk_store.DiskStore(
    file,
    _SHAPE,
    np.dtype(np.float32),
    layers=3,
    blocks=blocks,
    policy=eviction.EVICTIONS[policy],
  )


def _come(found: disk_store.DiskStore, count: int) -> list[store.Fetched]:
  out: list[store.Fetched] = []
  while len(out) < count:
    out += found.fetched()
    found.check_integrity()
    time.sleep(1e-4)
  return out


class DiskStoreTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory())
    self.file = _file(folder)

  def make(self, blocks: int, policy: str = 'lru') -> disk_store.DiskStore:
    found = _open(self.file, blocks, policy)
    self.addCleanup(found.close)
    return found

  def have(self, found: disk_store.DiskStore, key: int) -> bool:
    """Fetches and releases; whether it was there."""
    there = found.fetch(key)
    if not there:
      self.assertEqual([f.key for f in _come(found, 1)], [key])
    np.testing.assert_array_equal(found.block(key).view, _block(key))
    found.release(key)
    return there

  def test_what_it_is(self):
    found = self.make(4)
    self.assertEqual((len(found), found.capacity), (_KEYS, 4))
    self.assertEqual((found.shape, found.dtype), (_SHAPE, np.float32))
    self.assertEqual(found.block_bytes, 4800)
    self.assertEqual(found.remark, '')
    for key in range(_KEYS):
      np.testing.assert_array_equal(found.read(key), _block(key))
    with mock.patch.object(self.file, 'direct', False):
      self.assertIn('page cache', found.remark)

  def test_the_oldest_makes_room(self):
    found = self.make(3)
    self.assertEqual([self.have(found, k) for k in (0, 5, 9)], [False] * 3)
    self.assertEqual([self.have(found, k) for k in (0, 9, 5)], [True] * 3)
    self.assertFalse(self.have(found, 7))  # 0 made room.
    self.assertTrue(self.have(found, 9))
    self.assertFalse(self.have(found, 0))
    self.assertEqual((found.hits, found.reads), (4, 5))

  @parameterized.parameters(
    n for n, e in eviction.EVICTIONS.items() if not e.estimates
  )
  def test_blocks_that_are_held_or_read_into_stay(self, policy: str):
    # Seen to fail with a `victim` that was asked with nothing barred.
    found = self.make(2, policy)
    found.fetch(3)
    _come(found, 1)
    self.assertTrue(found.fetch(3))  # Held twice.
    found.fetch(4)
    found.fetch(8)  # Waits: one block is held, the other one read into.
    self.assertEqual([f.key for f in _come(found, 1)], [4])
    time.sleep(0.01)
    self.assertEqual(found.fetched(), [])
    found.release(3)
    time.sleep(0.01)
    self.assertEqual(found.fetched(), [])
    np.testing.assert_array_equal(found.block(3).view, _block(3))
    found.release(3)
    self.assertEqual([f.key for f in _come(found, 1)], [8])
    np.testing.assert_array_equal(found.block(8).view, _block(8))
    np.testing.assert_array_equal(found.block(4).view, _block(4))

  def test_a_fetch_that_fails_is_told_and_tried_again(self):
    # Seen to fail with `_came` finishing the load whatever the fault.
    found = self.make(2)
    with mock.patch.object(self.file, 'read', side_effect=OSError('broken')):
      self.assertFalse(found.fetch(6))
      (said,) = _come(found, 1)
    self.assertIn('broken', said.fault)
    self.assertFalse(self.have(found, 6))

  def test_a_fetch_may_be_taken_back(self):
    found = self.make(1)
    found.fetch(1)
    found.fetch(2)
    found.release(2)  # It still waited for a block.
    found.release(1)  # It was being read.
    self.assertFalse(self.have(found, 3))
    self.assertTrue(self.have(found, 3))

  def test_two_fetches_of_one_key_share_the_read(self):
    found = self.make(2)
    self.assertFalse(found.fetch(1))
    self.assertFalse(found.fetch(1))
    self.assertEqual([f.key for f in _come(found, 2)], [1, 1])
    self.assertEqual(found.reads, 1)
    found.release(1)
    np.testing.assert_array_equal(found.block(1).view, _block(1))
    found.release(1)

  def test_cleared_is_cold(self):
    found = self.make(4)
    self.have(found, 3)
    found.fetch(5)
    found.clear()
    self.assertEqual((found.hits, found.reads), (0, 0))
    self.assertFalse(self.have(found, 3))

  def test_random_fetches_against_a_model_of_them(self):
    found, rng = self.make(5, 'lfu_decayed'), random.Random(0)
    held: list[int] = []
    waiting: list[int] = []
    for _ in range(50_000):
      if min(found.hits, found.reads) > 200:
        break
      if len(held) + len(waiting) < 8 and rng.random() < 0.6:
        key = rng.randrange(_KEYS)
        (held if found.fetch(key) else waiting).append(key)
      elif held:
        found.release(held.pop(rng.randrange(len(held))))
      elif rng.random() < 0.1 and waiting:
        found.release(waiting.pop(rng.randrange(len(waiting))))
      for come in found.fetched():
        waiting.remove(come.key)
        held.append(come.key)
      found.check_integrity()
      for key in held:
        self.assertEqual(found.block(key).view[0, 0, 0], key)
      if not held:
        time.sleep(1e-4)
    self.assertGreater(min(found.hits, found.reads), 200)

  def test_more_than_the_memory_is_refused(self):
    with (
      mock.patch.object(host_store, 'available', lambda: 1000),
      self.assertRaisesRegex(ValueError, '4 experts of 4,800 bytes'),
    ):
      _open(self.file, 4)

  def test_what_jax_does_not_know(self):
    found = self.make(1)
    found.fetch(0)
    _come(found, 1)
    self.assertIsInstance(found.array(0), jax.Array)


if __name__ == '__main__':
  absltest.main()
