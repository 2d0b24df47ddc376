"""Host memory as a cache of experts that lie on disk."""

import math
from collections import deque
from typing import Any

import jax
import numpy as np

from bevy_jax.offload import (
  disk,
  eviction,
  host_store,
  pinned,
  slot_table,
  store,
  uses,
)

_TOKENS = 16  # In so many of them do counts halve, see `uses`.


class DiskStore:
  """See `store.Store`; owns its blocks, its slot table and its readers.

  It starts cold and reads what is asked for, nothing else. A block is read
  into the memory that then keeps it, and the eviction chooses which key makes
  room among those that nobody copies from. Its uses are fetches. It sees no
  tokens: counts that decay halve once as many fetches have been made as there
  are experts.

  Attributes:
    shape: of every block.
    dtype: of every block.
    hits: fetches that found their block in host memory.
    reads: reads that ended well.
  """

  def __init__(
    self,
    file: disk.BlockFile,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    *,
    layers: int,
    blocks: int,
    policy: eviction.Eviction,
    memory: pinned.Memory | None = None,
    readers: int = disk.READERS,
  ):
    """Pins `blocks` blocks and starts the threads.

    Args:
      file: where the experts lie; closed with the store.
      shape: of every block.
      dtype: of every block.
      layers: layers of the model that have experts.
      blocks: how many experts fit in host memory.
      policy: which of them makes room.
      memory: where the blocks come from; JAX's own where not given.
      readers: threads.

    Raises:
      ValueError: the blocks do not fit the host's memory, or the backend
        could not pin them.
    """
    self.shape, self.dtype = tuple(shape), np.dtype(dtype)
    memory = memory or pinned.JaxMemory(
      self.shape, self.dtype, jax.local_devices()[0]
    )
    self._blocks = host_store.pin(memory, blocks, self.block_bytes)
    self._file, self._policy = file, policy
    self._layers, self._experts = layers, len(file) // layers
    self._readers = disk.Readers(file, readers)
    self._awaited: dict[int, int] = {}  # Fetches of a key that wait for it.
    self._queue: deque[int] = deque()  # Keys that wait for a block.
    self._reset()

  def __len__(self) -> int:
    return len(self._file)

  @property
  def block_bytes(self) -> int:
    """Bytes of one block."""
    return math.prod(self.shape) * self.dtype.itemsize

  @property
  def capacity(self) -> int:
    """Blocks that host memory has room for."""
    return len(self._blocks)

  @property
  def remark(self) -> str:
    """See `Store`."""
    if self._file.direct:
      return ''
    return (
      f'{self._file.path.name} lies on a file system without direct reads: '
      'they went through the page cache'
    )

  def fetch(self, key: int) -> bool:
    """See `Store`."""
    self._fetches += 1
    self._uses.advance(_TOKENS * self._fetches / len(self))
    self._uses.touch(key)
    layer, expert = divmod(key, self._experts)
    if self._table.resident[layer] >> expert & 1:
      self._table.hold(layer, 1 << expert)
      self.hits += 1
      return True
    self._awaited[key] = self._awaited.get(key, 0) + 1
    if self._table.slot_of[key] < 0 and self._awaited[key] == 1:
      self._queue.append(key)
      self._read_on()
    return False

  def fetched(self) -> list[store.Fetched]:
    """See `Store`."""
    out: list[store.Fetched] = []
    for found in self._readers.done():
      out += [found] * self._came(found)
    return out

  def release(self, key: int) -> None:
    """See `Store`."""
    if key not in self._awaited:
      layer, expert = divmod(key, self._experts)
      self._table.release(layer, 1 << expert)
      self._read_on()
      return
    self._awaited[key] -= 1
    if not self._awaited[key]:
      del self._awaited[key]
      if key in self._queue:
        self._queue.remove(key)

  def block(self, key: int) -> pinned.Block:
    """See `Store`."""
    layer, expert = divmod(key, self._experts)
    assert self._table.reading[layer] >> expert & 1, f'key {key} is not held'
    return self._blocks[self._table.slot_of[key]]

  def array(self, key: int) -> jax.Array:
    """See `Store`."""
    array = self.block(key).array
    assert array is not None, 'JAX does not know this memory'
    return array

  def read(self, key: int) -> np.ndarray:
    """See `Store`; always from the disk."""
    out = pinned.aligned(self.shape, self.dtype)
    self._file.read(key, out, self._file.spare())
    return out

  def clear(self) -> None:
    """See `Store`; waits for reads that go on."""
    self._queue.clear()
    self._awaited.clear()
    while any(self._table.loading):
      self._came(self._readers.next())
    assert not any(self._table.reading), 'a block is still held'
    self._reset()

  def close(self) -> None:
    """See `Store`."""
    self._readers.close()

  def check_integrity(self) -> None:
    """Adds everything up; AssertionError says what does not agree."""
    self._table.check_integrity()
    for key in self._awaited:
      at = self._table.slot_of[key]
      assert (at < 0) == (key in self._queue), f'key {key} is forgotten'
    assert not (self._queue and self._table.free), 'a block lies idle'

  def _reset(self) -> None:
    self._table = slot_table.SlotTable(
      self._layers, self._experts, self.capacity
    )
    self._uses = uses.Uses(self._layers, self._experts)
    self._fetches = self.hits = self.reads = 0

  def _came(self, found: store.Fetched) -> int:
    """A read has ended; how many fetches waited for it."""
    waited = self._awaited.pop(found.key, 0)
    if found.fault:
      self._table.abort_load(found.key)
    else:
      self.reads += 1
      self._table.finish_load(found.key)
      layer, expert = divmod(found.key, self._experts)
      for _ in range(waited):
        self._table.hold(layer, 1 << expert)
    self._read_on()
    return waited

  def _read_on(self) -> None:
    """Reads what waits for a block, as far as there is room."""
    while self._queue and (self._table.free or self._make_room()):
      key = self._queue.popleft()
      slot = self._table.begin_load(key)
      self._uses.load(key)
      self._readers.ask(key, self._blocks[slot].view)

  def _make_room(self) -> bool:
    barred = self._table.barring(())
    key = self._policy.victim(barred, self._uses)
    if barred[key]:
      return False
    self._table.evict(key)
    return True
