"""Experts in pinned host memory."""

import tracemalloc
from unittest import mock

import jax
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax.offload import cuda, cuda_fake, host_store, pinned

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (3, 4, 8)


def fill(key, out):
  out[...] = np.arange(out.size).reshape(out.shape) % 13 + key


class HostStoreTest(parameterized.TestCase):
  @parameterized.parameters(BF16, np.float16, np.float32)
  def test_blocks_keep_dtype_and_contents_after_the_last_is_filled(self, dtype):
    store = host_store.HostStore.build(5, SHAPE, np.dtype(dtype), fill)
    wanted = np.empty(SHAPE, dtype)
    for key in range(5):
      fill(key, wanted)
      np.testing.assert_array_equal(store.block(key).view, wanted)
      self.assertEqual(store.array(key).dtype, wanted.dtype)
      self.assertEqual(store.fingerprint(key), host_store.fingerprint(wanted))

  def test_blocks_are_pinned(self):
    store = host_store.HostStore.build(2, SHAPE, BF16, fill)
    self.assertEqual(store.array(1).sharding.memory_kind, 'pinned_host')

  def test_bytes(self):
    store = host_store.HostStore.build(5, SHAPE, BF16, fill)
    self.assertEqual(store.block_bytes, 3 * 4 * 8 * 2)
    self.assertEqual(store.nbytes, 5 * 192)
    self.assertLen(store, 5)

  def test_a_fingerprint_tells_what_a_slot_holds(self):
    store = host_store.HostStore.build(3, SHAPE, BF16, fill)
    slot = jax.device_put(store.array(1), jax.memory.Space.Device)
    self.assertEqual(host_store.fingerprint(slot), store.fingerprint(1))
    self.assertNotEqual(host_store.fingerprint(slot), store.fingerprint(2))
    changed = np.array(slot)
    changed[2, 3, 7] += 1
    self.assertNotEqual(host_store.fingerprint(changed), store.fingerprint(1))

  def test_a_fingerprint_of_a_slot_of_another_dtype(self):
    store = host_store.HostStore.build(1, SHAPE, BF16, fill)
    slot = store.array(0).astype(np.float32)
    got = store.fingerprint(0, np.dtype(np.float32))
    self.assertEqual(got, host_store.fingerprint(slot))

  def test_the_cpu_backend_takes_buffers_without_a_copy(self):
    if jax.default_backend() != 'cpu':
      self.skipTest('other backends copy into memory of their own')
    addresses = []
    store = host_store.HostStore.build(
      2, SHAPE, BF16, lambda key, out: addresses.append(out.ctypes.data)
    )
    got = [b.array.unsafe_buffer_pointer() for b in store.blocks]
    self.assertEqual(got, addresses)

  def test_no_block_is_filled_where_they_do_not_fit(self):
    with (
      mock.patch.object(host_store, 'available', lambda: 1000),
      self.assertRaisesRegex(ValueError, '6 experts of 192 bytes need 1,152'),
    ):
      host_store.HostStore.build(6, SHAPE, BF16, self.fail)

  def test_pinning_that_fails_says_how_much_was_pinned(self):
    put, calls = jax.device_put, []

    def device_put(*args):
      calls.append(args)
      if len(calls) == 3:
        raise jax.errors.JaxRuntimeError(
          'RESOURCE_EXHAUSTED: Out of host memory allocating 192 bytes.'
        )
      return put(*args)

    with (
      mock.patch.object(jax, 'device_put', device_put),
      self.assertRaisesRegex(
        ValueError,
        r'after 384 bytes \(2 of 6 experts, 1,152.*RESOURCE_EXHAUSTED.*'
        r'XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=2 ',
      ),
    ):
      host_store.HostStore.build(6, SHAPE, BF16, fill)

  def test_memory_that_cuda_cannot_pin_says_so(self):
    fake = cuda_fake.Runtime()
    memory = pinned.RegisteredMemory(
      6, SHAPE, BF16, cuda.Runtime(jax.devices()[0], fake)
    )
    fake.failing = {'cudaHostRegister'}
    with self.assertRaisesRegex(
      ValueError, r'after 0 bytes \(0 of 6 experts.*cudaHostRegister.*ulimit -l'
    ):
      host_store.HostStore.build(6, SHAPE, BF16, fill, memory=memory)

  @parameterized.parameters('jax', 'cuda')
  def test_threads_fill_every_block_once(self, kind: str):
    """Seen to fail with blocks pinned before they are filled."""
    count, fake, done, pinned_then = 40, cuda_fake.Runtime(), [], []
    memory = None
    if kind == 'cuda':
      runtime = cuda.Runtime(jax.devices()[0], fake)
      memory = pinned.RegisteredMemory(count, SHAPE, BF16, runtime)
    keys = []

    def noting(key, out):
      keys.append(key)
      pinned_then.append(len(fake.pinned))
      fill(key, out)

    store = host_store.HostStore.build(
      count, SHAPE, BF16, noting, memory=memory, threads=4, done=done.append
    )
    self.assertCountEqual(keys, range(count))
    self.assertEqual(done, [192] * count)
    wanted = np.empty(SHAPE, BF16)
    for key in range(count):
      fill(key, wanted)
      np.testing.assert_array_equal(store.block(key).view, wanted)
    # Pages of ours are filled first and pinned then, all of them.
    self.assertEqual(set(pinned_then), {0})
    if kind == 'cuda':
      stride = -(-192 // pinned.PAGE) * pinned.PAGE
      self.assertEqual(sum(fake.pinned.values()), count * stride)

  def test_an_error_of_a_thread_is_passed_on(self):
    def broken(key, out):
      raise ValueError(f'{key} is broken')

    with self.assertRaisesRegex(ValueError, 'is broken'):
      host_store.HostStore.build(9, SHAPE, BF16, broken, threads=3)

  def test_a_backend_without_pinned_memory_is_refused(self):
    device = mock.Mock(addressable_memories=lambda: [mock.Mock(kind='device')])
    with self.assertRaisesRegex(ValueError, "kinds.*'device'.*'pinned_host'"):
      host_store.HostStore.build(1, SHAPE, BF16, fill, device)

  def test_an_error_of_the_reader_is_passed_on(self):
    def broken(key, out):
      raise ValueError(f'{key} is broken')

    with self.assertRaisesRegex(ValueError, '^0 is broken$'):
      host_store.HostStore.build(2, SHAPE, BF16, broken)

  def test_available_memory_is_known_here(self):
    free = host_store.available()
    self.assertTrue(free is None or free > 2**20, free)
    host_store.check_memory(1, 'a byte')

  def test_building_takes_one_buffer_a_block(self):
    if jax.default_backend() != 'cpu':
      self.skipTest('other backends hold blocks outside of Python')
    tracemalloc.start()
    self.addCleanup(tracemalloc.stop)
    shape = (3, 128, 256)
    store = host_store.HostStore.build(
      8, shape, BF16, lambda key, out: out.fill(key)
    )
    _, peak = tracemalloc.get_traced_memory()
    self.assertLess(peak, 1.1 * store.nbytes)


if __name__ == '__main__':
  absltest.main()
