"""Copies straight into the slots of the pool."""

import collections
import functools
import gc
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax.offload import (
  cuda,
  cuda_fake,
  direct,
  host_store,
  pinned,
  slot_table,
  transfer,
)

_DEVICE = jax.devices()[0]
_SHAPE = (3, 8, 16)
_WHY = cuda.obstacle(_DEVICE)


def _runtime(fake: cuda_fake.Runtime | None = None) -> cuda.Runtime:
  """The real one where there is one and no fake is asked for."""
  if fake is None and _WHY:
    fake = cuda_fake.Runtime()
  return cuda.Runtime(_DEVICE, fake)


def _pool(slots: int, shape=_SHAPE, dtype=jnp.float32) -> jax.Array:
  return jax.block_until_ready(jnp.zeros((slots, *shape), dtype))


def _store(
  count: int, shape=_SHAPE, dtype=np.float32, runtime=None
) -> host_store.HostStore:
  """Random blocks, in memory that CUDA pins where there is a runtime.

  No bits at random: what is not a number may change its bits where it is read.
  """
  rng = np.random.default_rng(0)

  def fill(key: int, out: np.ndarray) -> None:
    if out.dtype.kind == 'u':
      out[...] = rng.integers(0, np.iinfo(out.dtype).max, out.shape, out.dtype)
    else:
      out[...] = rng.normal(size=out.shape)

  memory = None
  if runtime is not None:
    memory = pinned.RegisteredMemory(count, shape, np.dtype(dtype), runtime)
  return host_store.HostStore.build(
    count, shape, np.dtype(dtype), fill, memory=memory
  )


def _drain(link: transfer.Transfer, count: int) -> list[transfer.Moved]:
  out: list[transfer.Moved] = []
  while len(out) < count:
    out += link.arrived()
  return out


class FakeTest(parameterized.TestCase):
  """The order of calls, and what becomes of failures."""

  def setUp(self):
    super().setUp()
    if jax.default_backend() != 'cpu':
      self.skipTest('the fake writes to the pool as to host memory')
    self.fake = cuda_fake.Runtime(lag=1)
    self.pool, self.store = _pool(4), _store(6)
    self.link = direct.Direct(self.store.block, self.pool, _runtime(self.fake))

  def test_a_load_is_a_copy_and_an_event(self):
    self.fake.calls.clear()
    self.link.begin(5, 2)
    self.assertEqual(self.link.pending(), 1)
    (_, flags), copy, record = self.fake.calls
    nbytes = self.store.block_bytes
    to = self.pool.unsafe_buffer_pointer() + 2 * nbytes
    self.assertEqual(flags, self.fake.cudaEventDisableTiming)
    self.assertEqual(
      copy[:5], ('cudaMemcpyAsync', to, self.store.block(5).address, nbytes, 1)
    )
    self.assertEqual(record[0], 'cudaEventRecord')
    self.assertEqual(record[2], copy[5])  # the same stream
    self.assertEqual(self.link.arrived(), [])
    self.assertEqual(self.link.arrived(), [transfer.Moved(5, 2, None)])
    self.assertEqual((self.link.pending(), self.link.due()), (0, None))

  def test_loads_arrive_in_order_and_none_before_its_bytes(self):
    """Seen to fail: `is_done` that takes 'not ready' for done."""
    for key, slot in ((4, 0), (1, 2), (5, 1)):
      self.link.begin(key, slot)
    seen = []
    while self.link.pending():
      for moved in self.link.arrived():
        seen.append((moved.key, moved.slot))
        got = host_store.fingerprint(np.array(self.pool[moved.slot]))
        self.assertEqual(got, self.store.fingerprint(moved.key))
    self.assertEqual(seen, [(4, 0), (1, 2), (5, 1)])

  def test_events_are_used_again_and_asked_one_at_a_time(self):
    for _ in range(10):
      self.link.begin(0, 0)
      self.link.begin(1, 1)
      _drain(self.link, 2)
    names = collections.Counter(name for name, *_ in self.fake.calls)
    self.assertEqual(names['cudaEventCreateWithFlags'], 2)
    self.assertEqual(names['cudaEventRecord'], 20)
    self.link.begin(0, 0)
    self.link.begin(1, 1)
    self.fake.calls.clear()
    self.link.arrived()
    self.assertLen(self.fake.calls, 1)  # the first is not done: no more asked

  @parameterized.parameters(
    'cudaMemcpyAsync', 'cudaEventRecord', 'cudaEventQuery'
  )
  def test_a_failure_is_the_loads_own(self, name: str):
    """Seen to fail: an error that `begin` raises."""
    self.link.begin(0, 0)
    _drain(self.link, 1)
    self.fake.failing = {name}
    self.link.begin(3, 1)
    (moved,) = _drain(self.link, 1)
    self.assertEqual((moved.key, moved.slot, moved.block), (3, 1, None))
    self.assertRegex(moved.fault, f'expert 3 cannot be copied .*{name} failed')
    self.fake.failing = set()
    self.link.begin(2, 1)
    self.assertEqual(_drain(self.link, 1), [transfer.Moved(2, 1, None)])

  def test_close_waits_for_the_copies_and_more_may_begin(self):
    self.link.begin(3, 1)
    self.link.close()
    self.link.close()
    self.assertEqual((self.link.pending(), self.link.arrived()), (0, []))
    got = host_store.fingerprint(np.array(self.pool[1]))
    self.assertEqual(got, self.store.fingerprint(3))
    self.link.begin(2, 1)
    self.assertEqual(_drain(self.link, 1), [transfer.Moved(2, 1, None)])

  def test_nothing_is_left_behind(self):
    """Seen to fail: events of loads in flight that nobody destroys."""
    self.link.begin(3, 1)
    self.assertLen(self.fake.live, 2)
    del self.link
    gc.collect()
    names = [name for name, *_ in self.fake.calls]
    self.assertLess(
      names.index('cudaStreamSynchronize'), names.index('cudaStreamDestroy')
    )
    self.assertEmpty(self.fake.live)

  def test_a_pool_that_somebody_donated_is_noticed(self):
    self.pool.delete()
    with self.assertRaisesRegex(AssertionError, 'donated the pool'):
      self.link.begin(0, 0)

  def test_throttled_tells_of_faults_too(self):
    slow = transfer.Throttled(self.link, lambda: 10**9, 1000, 1.0)
    self.fake.failing = {'cudaMemcpyAsync'}
    slow.begin(3, 1)
    slow._clock = lambda: 2 * 10**9
    (moved,) = slow.arrived()
    self.assertIn('cudaMemcpyAsync', moved.fault)


class BytesTest(parameterized.TestCase):
  @parameterized.parameters(
    ((3, 8, 16), 'bfloat16'), ((3, 64, 96), 'float32'), ((6913,), 'uint8')
  )
  def test_the_same_bytes_as_device_put(self, shape, dtype: str):
    dtype = np.dtype(dtype)
    runtime = _runtime()
    store, pool = _store(9, shape, dtype, runtime), _pool(5, shape, dtype)
    link = direct.Direct(store.block, pool, runtime)
    slow = transfer.DevicePut(store.block, _DEVICE)
    write = jax.jit(transfer.write_slots, static_argnums=3, donate_argnums=0)
    other = _pool(5, shape, dtype)
    rng = np.random.default_rng(1)
    for _ in range(20):
      key, slot = int(rng.integers(9)), int(rng.integers(5))
      for each in (link, slow):
        each.begin(key, slot)
        (moved,) = _drain(each, 1)
        if moved.block is not None:
          slots = np.array([slot], np.int32)
          other, _ = write(other, slots, [moved.block], False)
      got = np.array(pool[slot]), np.array(other[slot])
      for bits in got:
        self.assertEqual(host_store.fingerprint(bits), store.fingerprint(key))


class _Read(NamedTuple):
  """A launch in flight and the experts in the slots that it reads."""

  answer: jax.Array
  layer: int
  experts: int
  keys: list[int]


@functools.partial(jax.jit, static_argnums=2)
def _sums(pool: jax.Array, slots: jax.Array, turns: int) -> jax.Array:
  """For each slot a sum of its words times odd numbers, modulo 2**32.

  Read turn by turn, for a copy to change what a later one reads: as far as a
  compiler can know, what is read depends on the turn before. No loop of
  XLA's: it may copy the whole pool before the first turn.
  """
  odd = 2 * jnp.arange(pool.shape[1], dtype=jnp.uint32) + 1
  total = jnp.zeros(slots.shape, jnp.uint32)
  for i in range(turns):
    here = pool[jnp.where(total == 0x5EEDBEEF, 0, slots)]
    total += (i + 1) * jnp.sum(here * odd[None], 1, dtype=jnp.uint32)
  return total


class StressTest(absltest.TestCase):
  def test_random_loads_against_running_kernels(self):
    """Every launch sees the experts that the slot table names, and no others.

    Seen to fail: a table that gives up slots which launches in flight read,
    and an `is_done` that says yes before the copy has ended.
    """
    gpu = not _WHY
    # On a GPU a copy takes 150 us, a launch longer.
    loads, words, turns = (10_000, 2**21, 32) if gpu else (400, 2**8, 16)
    runtime = _runtime()
    store = _store(64, (words,), np.uint32, runtime)
    odd = 2 * np.arange(words, dtype=np.uint32) + 1
    wanted = np.array(
      [(store.block(k).view * odd).sum(dtype=np.uint32) for k in range(64)]
    )
    wanted *= np.uint32(sum(range(1, turns + 1)))
    pool = _pool(24, (words,), jnp.uint32)
    link = direct.Direct(store.block, pool, runtime)
    table = slot_table.SlotTable(4, 16, 24)
    rng = np.random.default_rng(2)
    reading: collections.deque[_Read] = collections.deque()
    begun = ended = launches = beside = 0
    newest: int | None = None
    while ended < loads:
      # At times a copy begins at once, at times behind others: then a slot is
      # written late, and who reads it too early or for too long is found out.
      while begun < loads and link.pending() < rng.integers(1, 5):
        key = self._absent(table, rng)
        if key is None:
          break
        link.begin(key, table.begin_load(key))
        begun += 1
        beside += bool(reading) and not reading[-1].answer.is_ready()
      for moved in link.arrived():
        self.assertEqual(moved.fault, '')
        table.finish_load(moved.key)
        newest = moved.key
        ended += 1
      while reading and (len(reading) > 2 or reading[0].answer.is_ready()):
        self._check(table, reading.popleft(), wanted)
      # At times nothing is queued before a launch: it reads what landed last
      # at once, and what a queue would have given time to arrive is missed.
      few = len(reading) < rng.integers(1, 4)
      if few and newest is not None and table.resident[newest // 16]:
        reading.append(self._launch(table, newest, pool, turns, rng))
        launches += 1
    while reading:
      self._check(table, reading.popleft(), wanted)
    table.check_integrity()
    print(
      f'{loads} loads of {store.block_bytes:,} bytes, {beside} begun beside '
      f'launches in flight; {launches} launches read only what they should'
    )
    if gpu:  # A CPU has done with a launch before the next load begins.
      self.assertGreater(beside, loads // 4)

  def _absent(
    self, table: slot_table.SlotTable, rng: np.random.Generator
  ) -> int | None:
    """A key to load, once there is room for it."""
    if not table.free:
      may = [k for k in table.key_of if k >= 0 and table.can_evict(k)]
      if not may:
        return None
      table.evict(may[rng.integers(len(may))])
    absent = [k for k, slot in enumerate(table.slot_of) if slot < 0]
    return absent[rng.integers(len(absent))]

  def _launch(
    self,
    table: slot_table.SlotTable,
    newest: int,
    pool: jax.Array,
    turns: int,
    rng: np.random.Generator,
  ) -> _Read:
    """Reads the newest expert, if it is still there, and others beside it."""
    layer, expert = divmod(newest, table.experts)
    resident = list(slot_table.bits(table.resident[layer]))
    few = rng.permutation(resident)[:3].tolist()
    if expert in resident:
      few = list({expert, *few[:2]})
    experts = sum(1 << e for e in few)
    table.hold(layer, experts)
    keys = [layer * table.experts + e for e in sorted(few)]
    slots = [table.slot_of[key] for key in keys]
    padded = (slots * 3)[:3]  # One shape alone is compiled.
    answer = _sums(pool, np.array(padded, np.int32), turns)
    return _Read(answer, layer, experts, keys)

  def _check(
    self, table: slot_table.SlotTable, read: _Read, wanted: np.ndarray
  ) -> None:
    got = np.array(read.answer)[: len(read.keys)]
    np.testing.assert_array_equal(got, wanted[read.keys])
    table.release(read.layer, read.experts)


if __name__ == '__main__':
  absltest.main()
