"""Pinned host memory in equal blocks that may be rewritten in place."""

import contextlib
import ctypes
import math
import mmap
import weakref
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from bevy_jax.offload import cuda

_KIND = 'pinned_host'
_PIECE = 2**26  # bytes pinned at once; larger ones made no difference
_HUGE = 2**21  # bytes of a huge page
PAGE = 4096  # bytes; blocks begin at multiples of it wherever that is ours


class Block(NamedTuple):
  """One block of pinned memory.

  Rewriting it is seen by whoever copies from it next: nobody may be copying,
  and `array` must be read by copies alone, never by `np.asarray`, which may
  keep what it saw first.

  Attributes:
    view: what lies in it, writable, with the block's shape and type.
    array: the same memory as a JAX array; None where JAX does not own it.
    address: of the first byte; numpy takes 2 us to tell it, each time.
  """

  view: np.ndarray
  array: jax.Array | None
  address: int


class Memory(Protocol):
  """Where blocks come from."""

  def block(self) -> Block:
    """A fresh block, contents arbitrary.

    Raises:
      MemoryError, jax.errors.JaxRuntimeError, cuda.Error: no more can be
        pinned.
    """


class JaxMemory:
  """Blocks that belong to JAX: portable, each one a `pinned_host` array.

  On a CPU an array is the numpy buffer that it is made of, so the block
  begins at a page; elsewhere where JAX puts it.
  """

  def __init__(
    self, shape: tuple[int, ...], dtype: np.dtype[Any], device: jax.Device
  ):
    kinds = [memory.kind for memory in device.addressable_memories()]
    if _KIND not in kinds:
      raise ValueError(
        f'{device} offers memory kinds {kinds}, and experts need {_KIND!r}. '
        f'Use a JAX newer than {jax.__version__}, or another backend.'
      )
    self._sharding = jax.sharding.SingleDeviceSharding(
      device, memory_kind=_KIND
    )
    self._shape, self._dtype = shape, np.dtype(dtype)

  def block(self) -> Block:
    """See `Memory`."""
    buffer = aligned(self._shape, self._dtype)
    array = jax.block_until_ready(jax.device_put(buffer, self._sharding))
    pointer = array.unsafe_buffer_pointer()
    if pointer == buffer.ctypes.data:
      return Block(buffer, array, pointer)
    raw = (ctypes.c_uint8 * buffer.nbytes).from_address(pointer)
    view = np.frombuffer(memoryview(raw), np.uint8).view(self._dtype)
    return Block(view.reshape(self._shape), array, pointer)


class RegisteredMemory:
  """One area of host memory that CUDA pins and JAX does not know.

  It takes what its blocks take, rounded up to pages, where JAX's pool grows
  by doubling and ends at 64 GiB. Pages are pinned, and thereby taken, some
  blocks ahead of the first that needs them. All of it is unpinned and freed
  when the last view of it is gone, once the device has nothing left to do.
  """

  def __init__(
    self,
    count: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    runtime: cuda.Runtime,
  ):
    """An area of `count` blocks, of which none is pinned yet."""
    self._shape, self._dtype, self._runtime = shape, np.dtype(dtype), runtime
    self._nbytes = math.prod(shape) * self._dtype.itemsize
    self._stride = -(-self._nbytes // PAGE) * PAGE
    # A copy must not cross from one piece into the next: whole blocks.
    self._ahead = max(1, _PIECE // self._stride)
    self._count, self._used, self._pinned = count, 0, 0
    self._area = _area(count * self._stride)
    self._pieces: list[int] = []
    end = weakref.finalize(self._area, _unpin, runtime, self._pieces)
    end.atexit = False  # The process takes all of it along.

  def views(self) -> list[np.ndarray]:
    """All blocks as they will be, none pinned for it.

    Pages that threads have filled are pinned many times faster than pages
    that pinning itself must take, one after the other.
    """
    return [self._view(number) for number in range(self._count)]

  def block(self) -> Block:
    """See `Memory`; MemoryError after `count` of them."""
    if self._used == self._count:
      raise MemoryError(f'all {self._count} blocks of the area are taken')
    if self._used == self._pinned:
      some = min(self._ahead, self._count - self._pinned)
      begin = int(self._area.ctypes.data) + self._pinned * self._stride
      self._runtime.register(begin, some * self._stride)
      self._pieces.append(begin)
      self._pinned += some
    self._used += 1
    view = self._view(self._used - 1)
    return Block(view, None, int(view.ctypes.data))

  def _view(self, number: int) -> np.ndarray:
    at = number * self._stride
    view = self._area[at : at + self._nbytes].view(self._dtype)
    return view.reshape(self._shape)


def _area(nbytes: int) -> np.ndarray:
  """Fresh pages, huge ones where the system has them to give."""
  flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
  pages = mmap.mmap(-1, max(nbytes, 1) + _HUGE, flags=flags)
  with contextlib.suppress(OSError, AttributeError):  # It is but a hint.
    pages.madvise(mmap.MADV_HUGEPAGE)
  whole = np.frombuffer(pages, np.uint8)
  skip = -whole.ctypes.data % _HUGE
  # Slices of this very array keep it alive: it stands for the area.
  return np.frombuffer(pages, np.uint8, nbytes, skip)


def _unpin(runtime: cuda.Runtime, pieces: list[int]) -> None:
  # A device that failed keeps its pins until the process ends.
  with contextlib.suppress(cuda.Error):
    runtime.wait_all()
    for address in pieces:
      runtime.unregister(address)


def aligned(
  shape: tuple[int, ...], dtype: np.dtype[Any], alignment: int = PAGE
) -> np.ndarray:
  """An uninitialised array that begins at a multiple of `alignment` bytes.

  Of 64 bytes and more the CPU backend takes it as it is, without a copy. The
  memory behind it reaches to the next multiple: a read may be rounded up.
  """
  nbytes = math.prod(shape) * np.dtype(dtype).itemsize
  whole = -(-nbytes // alignment) * alignment
  raw = np.empty(whole + alignment, np.uint8)
  skip = -raw.ctypes.data % alignment
  return raw[skip : skip + nbytes].view(dtype).reshape(shape)
