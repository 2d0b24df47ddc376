"""Loads through a store: any order, faults told, host blocks kept in time."""

import pathlib
import tempfile
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from bevy_jax.offload import (
  checkpoint,
  disk,
  disk_store,
  eviction,
  staging,
  transfer,
)

_SHAPE = (3, 16, 64)
_KEYS = 6


def _file(folder: str) -> disk.BlockFile:
  stride = checkpoint.stride(_SHAPE, np.dtype(np.float32))
  blocks = [np.full(_SHAPE, key, np.float32) for key in range(_KEYS)]
  path = pathlib.Path(folder) / 'experts.bin'
  path.write_bytes(b''.join(b.tobytes().ljust(stride, b'\0') for b in blocks))
  return disk.BlockFile(
    path,
    [key * stride for key in range(_KEYS)],
    [checkpoint.checksum(block) for block in blocks],
    blocks[0].nbytes,
  )


def _arrive(link: staging.Staging, count: int) -> list[transfer.Moved]:
  out: list[transfer.Moved] = []
  for _ in range(20_000):
    out += link.arrived()
    if len(out) >= count:
      return out
    time.sleep(1e-4)
  raise AssertionError(f'{len(out)} of {count} arrived')


@jax.jit
def _slowly(pool: jax.Array) -> jax.Array:
  """The pool, after some tenths of a second."""
  x = jnp.full((400, 400), 1e-3)
  x = jax.lax.fori_loop(0, 150, lambda i, y: y @ x, x)
  return pool + x[0, 0] * 0


class StagingTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.file = _file(self.enterContext(tempfile.TemporaryDirectory()))
    self.device = jax.devices()[0]
    home = jax.sharding.SingleDeviceSharding(self.device)
    self.write = jax.jit(
      transfer.write_slots,
      static_argnums=3,
      donate_argnums=0,
      out_shardings=home,
    )

  def make(self, blocks: int, **throttle: float) -> staging.Staging:
    self.store = disk_store.DiskStore(
      self.file,
      _SHAPE,
      np.dtype(np.float32),
      layers=1,
      blocks=blocks,
      policy=eviction.Lru(),
    )
    self.addCleanup(self.store.close)
    inner: transfer.Transfer
    inner = transfer.DevicePut(self.store.block, self.device)
    if throttle:
      inner = transfer.Throttled(
        inner, time.perf_counter_ns, self.store.block_bytes, **throttle
      )
    return staging.Staging(self.store, inner)

  def put(
    self, link: staging.Staging, pool: jax.Array, moved: list[transfer.Moved]
  ) -> jax.Array:
    slots = np.array([m.slot for m in moved], np.int32)
    pool, token = self.write(pool, slots, [m.block for m in moved], True)
    link.written(moved, token)
    return pool

  def test_loads_land_and_say_where_they_came_from(self):
    link = self.make(3)
    pool = jnp.zeros((2, *_SHAPE))
    for key in (4, 2, 4):
      link.begin(key, key % 3)
      self.assertEqual(link.pending(), 1)
      moved = _arrive(link, 1)
      self.assertEqual((moved[0].key, moved[0].slot), (key, key % 3))
      self.assertEqual(link.pending(), 0)
      self.assertEqual(len(moved[0].read), 2 * (self.store.hits == 0))
      if moved[0].slot < 2:
        pool = self.put(link, pool, moved)
      else:
        link.written(moved, jnp.zeros(1))
    np.testing.assert_array_equal(pool[1], np.full(_SHAPE, 4))

  def test_what_lies_in_memory_overtakes_the_disk(self):
    link = self.make(3)
    link.begin(1, 0)
    pool = self.put(link, jnp.zeros((3, *_SHAPE)), _arrive(link, 1))
    read = self.file.read

    def slow(*args: np.ndarray) -> None:
      time.sleep(0.2)
      read(*args)

    with mock.patch.object(self.file, 'read', slow):
      link.begin(2, 1)
      self.assertIsNone(link.due())
      link.begin(1, 2)
      moved = _arrive(link, 2)
    self.assertEqual([m.key for m in moved], [1, 2])
    pool = self.put(link, pool, moved)
    np.testing.assert_array_equal(pool[:, 0, 0, 0], [1, 2, 1])

  def test_a_block_is_kept_until_the_slot_write_has_run(self):
    # Seen to fail, with key 2 in the slot of key 1, where `arrived` released
    # every block that arrives.
    if self.device.platform != 'cpu':
      self.skipTest('a block is staged on this device before its slot write')
    link = self.make(1)
    pool = jax.block_until_ready(jnp.zeros((2, *_SHAPE)))
    # Both are compiled before it matters how long they take.
    jax.block_until_ready(_slowly(pool))
    link.begin(1, 0)
    pool = jax.block_until_ready(self.put(link, pool, _arrive(link, 1)))
    link.begin(1, 0)
    moved = _arrive(link, 1)
    pool = self.put(link, _slowly(pool), moved)
    link.begin(2, 1)  # The only block is still being copied from.
    self.assertFalse(transfer.is_ready(pool))
    pool = self.put(link, pool, _arrive(link, 1))
    np.testing.assert_array_equal(pool[:, 0, 0, 0], [1, 2])

  def test_a_block_staged_on_the_device_is_released_at_once(self):
    self.make(1)
    inner = transfer.DevicePut(self.store.block, self.device)
    inner._staged = True
    with mock.patch.object(
      jax, 'device_put', lambda x, _: jnp.array(np.array(x))
    ):
      link = staging.Staging(self.store, inner)
      link.begin(1, 0)
      (moved,) = _arrive(link, 1)
    link.written([moved], None)
    self.assertFalse(self.store.fetch(2))
    self.store.check_integrity()
    self.assertEqual(self.store._table.loading, [1 << 2])

  def test_faults_are_told_and_the_blocks_given_back(self):
    # Seen to fail (no end) without the `release` of a failed load.
    self.make(1)
    inner = transfer.DevicePut(self.store.block, self.device)
    inner._staged = True
    link = staging.Staging(self.store, inner)
    with mock.patch.object(self.file, 'read', side_effect=OSError('broken')):
      link.begin(1, 0)
      (moved,) = _arrive(link, 1)
    self.assertRegex(moved.fault, 'expert 1: broken')
    full = jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: full\nand more')
    with mock.patch.object(jax, 'device_put', side_effect=full):
      link.begin(1, 0)
      (moved,) = _arrive(link, 1)
    self.assertRegex(moved.fault, 'expert 1 .*: RESOURCE_EXHAUSTED: full$')
    self.assertIsNone(moved.block)
    link.begin(2, 0)
    (moved,) = _arrive(link, 1)
    self.assertEqual(moved.fault, '')

  def test_the_links_time_counts_from_the_end_of_the_read(self):
    each = 0.05
    gb_per_s = np.prod(_SHAPE) * 4 / each * 1e-9
    link = self.make(2, gb_per_s=gb_per_s)
    read = self.file.read

    def slow(*args: np.ndarray) -> None:
      time.sleep(0.1)
      read(*args)

    with mock.patch.object(self.file, 'read', slow):
      link.begin(1, 0)
      begun = time.perf_counter_ns()
      (moved,) = _arrive(link, 1)
    took = time.perf_counter_ns() - moved.read[1]
    self.assertGreaterEqual(moved.read[1] - begun, 0.09e9)
    self.assertGreaterEqual(took, each * 1e9)

  def test_closing_gives_everything_back(self):
    # Seen to fail without each line of `close`.
    if self.device.platform != 'cpu':
      self.skipTest('blocks are staged there: no slot write reads host memory')
    link = self.make(3)
    token = mock.Mock()  # A slot write that has not run.
    token.is_ready.return_value = False
    link.begin(1, 0)
    link.written(_arrive(link, 1), token)
    link.begin(1, 0)
    _arrive(link, 1)  # Nobody has written this one.
    link.begin(1, 0)  # On the link.
    link.begin(2, 1)  # Being read.
    link.close()
    token.block_until_ready.assert_called_once()
    self.assertEqual((link.pending(), link.arrived()), (0, []))
    self.assertEqual(self.store._table.reading, [0])
    self.assertEqual(self.store._awaited, {})
    self.store.clear()


if __name__ == '__main__':
  absltest.main()
