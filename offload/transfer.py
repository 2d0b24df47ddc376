"""How an expert gets from pinned host memory into its slot."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from bevy_jax.offload import pinned

# Loads that one slot write takes; fewer are padded by repeating the last.
BATCHES = (1, 2, 4, 8)


class Moved(NamedTuple):
  """A load that has ended.

  Attributes:
    key: the expert.
    slot: where it goes.
    block: array with the expert's shape, in the stored type: on the device,
      or the host block itself where the slot write is the copy; None where
      the load failed, or the block lies in its slot already.
    fault: why the load failed; empty where it did not.
    read: nanoseconds at which its read from disk began and ended, if any.
  """

  key: int
  slot: int
  block: jax.Array | None
  fault: str = ''
  read: tuple[int, ...] = ()


class Transfer(Protocol):
  """Moves blocks over the link; every load arrives, or says why not."""

  def begin(self, key: int, slot: int) -> None:
    """Starts to move an expert, at the latest with `flush`; never waits."""

  def flush(self) -> None:
    """No more loads begin for now: all of them are on their way."""

  def arrived(self) -> list[Moved]:
    """What has arrived or failed since the last call; never waits."""

  def due(self) -> int | None:
    """Nanoseconds at which the next may arrive: None unknown or none."""

  def pending(self) -> int:
    """Loads begun and not yet returned by `arrived`."""

  def close(self) -> None:
    """Waits until it copies nothing any more, and forgets its loads."""


class DevicePut:
  """`jax.device_put` from the pinned buffer: portable.

  Loads that begin together go in one call: each further one costs the host a
  third of the first. A CPU's device memory is host memory, and staging a
  block there would copy it twice; so there the slot write itself is the copy.
  """

  def __init__(self, block: Callable[[int], pinned.Block], device: jax.Device):
    self._block = block
    self._staged = device.platform != 'cpu'
    self._sharding = jax.sharding.SingleDeviceSharding(device)
    self._asked: list[tuple[int, int]] = []
    self._moving: deque[Moved] = deque()

  def begin(self, key: int, slot: int) -> None:
    """See `Transfer`."""
    self._asked.append((key, slot))

  def flush(self) -> None:
    """See `Transfer`."""
    if not self._asked:
      return
    asked, self._asked = self._asked, []
    found = [self._block(key) for key, _ in asked]
    # Memory that is pinned, but not by JAX, goes as fast (H200, jax 0.11.2).
    blocks: list[Any] = [b.view if b.array is None else b.array for b in found]
    moved = [Moved(key, slot, None) for key, slot in asked]
    if self._staged or any(b.array is None for b in found):
      try:
        blocks = jax.device_put(blocks, self._sharding)
      except (MemoryError, jax.errors.JaxRuntimeError) as error:
        self._moving.extend(_failed(m, error) for m in moved)
        return
    for m, block in zip(moved, blocks, strict=True):
      self._moving.append(m._replace(block=block))

  def arrived(self) -> list[Moved]:
    """See `Transfer`."""
    self.flush()
    out = []
    while self._moving:
      block = self._moving[0].block
      if block is not None and not is_ready(block):
        break
      out.append(_checked(self._moving.popleft()))
    return out

  def due(self) -> int | None:
    """See `Transfer`."""
    return None

  def pending(self) -> int:
    """See `Transfer`."""
    return len(self._asked) + len(self._moving)

  def close(self) -> None:
    """See `Transfer`."""
    self._asked.clear()
    while self._moving:
      _checked(self._moving.popleft())


class Throttled:
  """Another transfer, made to take as long as on a slower link.

  A load lands no earlier than its real landing, the landing before it plus
  bytes / bandwidth, and its issue plus latency plus bytes / bandwidth. A real
  landing counts from when it is seen, and only where the load was seen to be
  late: looking seldom does not make the link slower.
  """

  def __init__(
    self,
    inner: Transfer,
    clock: Callable[[], int],
    block_bytes: int,
    gb_per_s: float,
    latency_us: float = 0.0,
  ):
    self._inner, self._clock = inner, clock
    self._each = int(block_bytes / gb_per_s)
    self._latency = int(latency_us * 1000)
    self._starts: deque[int] = deque()
    self._ready: deque[Moved] = deque()
    self._last = 0
    self._late = False

  def begin(self, key: int, slot: int) -> None:
    """See `Transfer`."""
    self._starts.append(self._clock() + self._latency)
    self._inner.begin(key, slot)

  def flush(self) -> None:
    """See `Transfer`."""
    self._inner.flush()

  def arrived(self) -> list[Moved]:
    """See `Transfer`."""
    self._ready.extend(self._inner.arrived())
    now, out = self._clock(), []
    while (due := self.due()) is not None and due <= now:
      if not self._ready:
        self._late = True
        break
      self._last = now if self._late else due
      self._late = False
      self._starts.popleft()
      out.append(self._ready.popleft())
    return out

  def due(self) -> int | None:
    """See `Transfer`."""
    if not self._starts:
      return None
    return max(self._last, self._starts[0]) + self._each

  def pending(self) -> int:
    """See `Transfer`."""
    return len(self._starts)

  def close(self) -> None:
    """See `Transfer`."""
    self._inner.close()
    self._starts.clear()
    self._ready.clear()
    self._late = False


def is_ready(array: Any) -> bool:
  """Whether an array has its value; never waits."""
  return bool(array.is_ready())  # The stubs of jax.Array do not know it.


def _checked(moved: Moved) -> Moved:
  """A block that is ready, or failed on its way; waits where it is neither."""
  if moved.block is None:
    return moved
  try:
    moved.block.block_until_ready()
  except jax.errors.JaxRuntimeError as error:
    return _failed(moved, error)
  return moved


def _failed(moved: Moved, error: Exception) -> Moved:
  first = (str(error).splitlines() or [type(error).__name__])[0]
  fault = f'expert {moved.key} cannot be copied to the device: {first}'
  return moved._replace(block=None, fault=fault)


def write_slots(
  pool: jax.Array, slots: jax.Array, blocks: list[jax.Array], told: bool = False
) -> tuple[jax.Array, jax.Array | None]:
  """Puts blocks into slots of the pool, in the pool's type.

  To be jitted with the pool donated. Equal slots must get equal blocks.

  Returns:
    The pool, and where `told` a scalar, the sum of `slots`, that is ready
    when the write has run: the pool itself cannot be asked once the next
    program has taken it.
  """
  for i, block in enumerate(blocks):
    here = jax.device_put(block, jax.memory.Space.Device)
    pool = jax.lax.dynamic_update_index_in_dim(
      pool, here.astype(pool.dtype), slots[i], 0
    )
  if not told:
    return pool, None
  # All that a program returns is ready when the program has ended. A value
  # read from the pool would say no more, and makes XLA copy the whole pool.
  return pool, slots.sum()


def pool_bytes(slots: int, block: tuple[int, ...], dtype: jnp.dtype) -> int:
  """Bytes of a pool of `slots` blocks."""
  size = jnp.dtype(dtype).itemsize
  for n in block:
    size *= n
  return slots * size
