"""All experts in pinned host memory, each one packed block."""

import concurrent.futures
import dataclasses
import math
import pathlib
import zlib
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np

from bevy_jax.offload import cuda, pinned, store

_NO_MORE = (MemoryError, jax.errors.JaxRuntimeError, cuda.Error)


@dataclasses.dataclass(frozen=True)
class HostStore:
  """See `store.Store`: pinned blocks by key, all of them at hand.

  What a block means is its maker's business.

  Attributes:
    blocks: one a key, in pinned host memory.
    shape: of every block.
    dtype: of every block.
  """

  blocks: tuple[pinned.Block, ...] = dataclasses.field(repr=False)
  shape: tuple[int, ...]
  dtype: np.dtype[Any]

  @classmethod
  def build(
    cls,
    count: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    fill: Callable[[int, np.ndarray], None],
    device: jax.Device | None = None,
    memory: pinned.Memory | None = None,
    threads: int = 1,
    done: Callable[[int], None] = lambda nbytes: None,
  ) -> Self:
    """Allocates and fills `count` blocks.

    Args:
      count: how many.
      shape: of each block.
      dtype: of each block.
      fill: called once a key, with one thread in order, with a fresh buffer
        to write in full and not to keep.
      device: whose pinned memory; the default device where not given.
      memory: where the blocks come from; JAX's own where not given.
      threads: how many call `fill`, each for keys of its own.
      done: called with the bytes of a block whenever one has been filled.

    Raises:
      ValueError: the blocks do not fit the host's memory, or the backend
        could not pin them.
    """
    dtype = np.dtype(dtype)
    device = device or jax.local_devices()[0]
    memory = memory or pinned.JaxMemory(shape, dtype, device)
    nbytes = math.prod(shape) * dtype.itemsize
    if threads > 1:
      blocks = _pin_parallel(memory, count, nbytes, fill, threads, done)
      return cls(tuple(blocks), tuple(shape), dtype)

    def one(key: int, out: np.ndarray) -> None:
      fill(key, out)
      done(nbytes)

    blocks = pin(memory, count, nbytes, one)
    return cls(tuple(blocks), tuple(shape), dtype)

  def __len__(self) -> int:
    return len(self.blocks)

  @property
  def block_bytes(self) -> int:
    """Bytes of one block."""
    return math.prod(self.shape) * self.dtype.itemsize

  @property
  def nbytes(self) -> int:
    """Bytes of all blocks."""
    return len(self.blocks) * self.block_bytes

  @property
  def capacity(self) -> int:
    """Blocks that host memory has room for: all."""
    return len(self.blocks)

  @property
  def remark(self) -> str:
    """See `Store`."""
    return ''

  def fetch(self, key: int) -> bool:
    """See `Store`: everything is here."""
    del key
    return True

  def fetched(self) -> list[store.Fetched]:
    """See `Store`."""
    return []

  def release(self, key: int) -> None:
    """See `Store`."""

  def block(self, key: int) -> pinned.Block:
    """The pinned block of one expert; not to be donated or written."""
    return self.blocks[key]

  def read(self, key: int) -> np.ndarray:
    """See `Store`."""
    return self.blocks[key].view.copy()

  def clear(self) -> None:
    """See `Store`."""

  def close(self) -> None:
    """See `Store`."""

  def array(self, key: int) -> jax.Array:
    """The same as a JAX array; its memory must be JAX's."""
    array = self.blocks[key].array
    assert array is not None, 'JAX does not know this memory'
    return array

  def fingerprint(self, key: int, dtype: np.dtype[Any] | None = None) -> int:
    """Checksum of a block, as it is or as its copy in `dtype` would be."""
    block = self.blocks[key].view
    return fingerprint(block if dtype is None else block.astype(dtype))


def pin(
  memory: pinned.Memory,
  count: int,
  nbytes: int,
  fill: Callable[[int, np.ndarray], None] = lambda key, out: None,
) -> list[pinned.Block]:
  """`count` blocks of `nbytes`, each filled before the next is made.

  Raises:
    ValueError: they do not fit the host's memory, or cannot be pinned.
  """
  check_memory(count * nbytes, f'{count} experts of {nbytes:,} bytes')
  return _blocks(memory, count, nbytes, fill)


def _blocks(
  memory: pinned.Memory,
  count: int,
  nbytes: int,
  fill: Callable[[int, np.ndarray], None] = lambda key, out: None,
) -> list[pinned.Block]:
  blocks: list[pinned.Block] = []
  for key in range(count):
    try:
      blocks.append(memory.block())
      fill(key, blocks[-1].view)
    except _NO_MORE as error:
      raise _cannot_pin(error, key, count, nbytes) from error
  return blocks


def _pin_parallel(
  memory: pinned.Memory,
  count: int,
  nbytes: int,
  fill: Callable[[int, np.ndarray], None],
  threads: int,
  done: Callable[[int], None],
) -> list[pinned.Block]:
  """As `pin`, where several threads fill: our own memory before it is pinned.

  JAX's memory comes block by block and is filled behind that.
  """
  check_memory(count * nbytes, f'{count} experts of {nbytes:,} bytes')
  late = not isinstance(memory, pinned.RegisteredMemory)
  blocks = pin(memory, count, nbytes) if late else []
  views = [b.view for b in blocks]
  if isinstance(memory, pinned.RegisteredMemory):
    views = memory.views()

  def one(key: int) -> None:
    fill(key, views[key])

  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    for _ in pool.map(one, range(count)):
      done(nbytes)
  # The pages are taken by now: asking again whether they fit would refuse.
  return blocks or _blocks(memory, count, nbytes)


def fingerprint(block: jax.Array | np.ndarray) -> int:
  """CRC-32 of an array's bytes in row-major order, to compare a slot with."""
  host = np.ascontiguousarray(np.asarray(block))
  return zlib.crc32(host.reshape(-1).view(np.uint8).data)


def check_memory(needed: int, what: str) -> None:
  """Refuses before anything is filled.

  Raises:
    ValueError: `what`, of `needed` bytes, is more than the host has free.
  """
  free = available()
  if free is not None and needed > free:
    raise ValueError(
      f'{what} need {needed:,} bytes of host memory, but only {free:,} are '
      'available. Use a smaller model or a machine with more memory.'
    )


def available() -> int | None:
  """Bytes of memory that this process may still take; None if not known."""
  free = _fields('/proc/meminfo').get('MemAvailable')
  if free is None:
    return None
  free *= 1024
  group = pathlib.Path('/sys/fs/cgroup')
  try:
    limit = int((group / 'memory.max').read_text())
    used = int((group / 'memory.current').read_text())
  except (OSError, ValueError):  # no such group, or 'max': not limited
    return free
  cached = _fields(str(group / 'memory.stat')).get('file', 0)
  return min(free, limit - used + cached)


def _fields(path: str) -> dict[str, int]:
  """Lines of `name[:] number ...` as a dict; empty where there is no file."""
  try:
    lines = pathlib.Path(path).read_text().splitlines()
  except OSError:
    return {}
  words = [line.replace(':', ' ').split() for line in lines]
  return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}


def _cannot_pin(
  error: Exception, done: int, count: int, nbytes: int
) -> ValueError:
  first = (str(error).splitlines() or [type(error).__name__])[0]
  gigabytes = math.ceil(count * nbytes / 2**30) + 1
  if isinstance(error, cuda.Error):
    advice = 'Raise the limit on locked memory (ulimit -l)'
  else:
    advice = (
      f'Set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={gigabytes} before starting '
      '(JAX pins 64 GiB at most by default)'
    )
  return ValueError(
    f'Pinning host memory failed after {done * nbytes:,} bytes ({done} of '
    f'{count} experts, {count * nbytes:,} bytes in all): {first}. {advice}, '
    'free memory, or use a smaller model.'
  )
