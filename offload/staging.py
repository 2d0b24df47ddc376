"""From wherever an expert lies into its slot: a fetch, then a transfer."""

from collections import deque
from collections.abc import Iterable, Sequence

import jax

from bevy_jax.offload import store as store_lib
from bevy_jax.offload import transfer


class Staging:
  """See `Transfer`; loads land in any order.

  A load fetches its block from the store, and the inner transfer begins once
  it is in host memory: what lies there overtakes what is read from disk, and
  a throttled link counts from then. A host block is released when the copy
  out of it has ended, for it may be rewritten then. Where the block was staged
  on the device, or copied into its slot directly, that is when it arrives.
  Where the host block itself arrives (on a CPU), the slot write is the copy,
  and that is ready when its token is.
  """

  def __init__(self, store: store_lib.Store, inner: transfer.Transfer):
    self._store, self._inner = store, inner
    self._fetching: dict[int, int] = {}  # Key -> slot.
    self._read: dict[int, tuple[int, ...]] = {}
    self._moving: set[int] = set()
    self._lent: set[int] = set()  # Arrived as they lie in host memory.
    self._writing: deque[tuple[jax.Array, list[int]]] = deque()

  def begin(self, key: int, slot: int) -> None:
    """See `Transfer`."""
    if self._store.fetch(key):
      self._move(key, slot)
    else:
      self._fetching[key] = slot

  def flush(self) -> None:
    """See `Transfer`."""
    self._inner.flush()

  def arrived(self) -> list[transfer.Moved]:
    """See `Transfer`."""
    while self._writing and transfer.is_ready(self._writing[0][0]):
      self._release(self._writing.popleft()[1])
    out = []
    for found in self._store.fetched():
      slot = self._fetching.pop(found.key)
      if found.fault:
        out.append(transfer.Moved(found.key, slot, None, found.fault))
      else:
        self._read[found.key] = found.read
        self._move(found.key, slot)
    for moved in self._inner.arrived():
      key = moved.key
      self._moving.discard(key)
      if moved.block is not None and moved.block is self._store.array(key):
        self._lent.add(key)
      else:
        self._store.release(key)
      read = self._read.pop(key, ())
      out.append(moved._replace(read=read) if read else moved)
    return out

  def written(
    self, moved: Sequence[transfer.Moved], token: jax.Array | None
  ) -> None:
    """A slot write has begun that reads these; `token` is ready after it."""
    lent = [m.key for m in moved if m.key in self._lent]
    if lent:
      self._lent.difference_update(lent)
      assert token is not None, 'nobody can tell when the write has ended'
      self._writing.append((token, lent))

  def due(self) -> int | None:
    """See `Transfer`."""
    return None if self._fetching else self._inner.due()

  def pending(self) -> int:
    """See `Transfer`."""
    return len(self._fetching) + self._inner.pending()

  def close(self) -> None:
    """See `Transfer`."""
    self._inner.close()
    for token, keys in self._writing:
      token.block_until_ready()
      self._release(keys)
    self._release([*self._moving, *self._lent, *self._fetching])
    self._writing.clear()
    for held in (self._moving, self._lent, self._fetching, self._read):
      held.clear()

  def _move(self, key: int, slot: int) -> None:
    self._moving.add(key)
    self._inner.begin(key, slot)

  def _release(self, keys: Iterable[int]) -> None:
    for key in keys:
      self._store.release(key)
