"""Pinned host memory in equal blocks that may be rewritten in place."""

import ctypes
import math
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

_KIND = 'pinned_host'
PAGE = 4096  # bytes; blocks begin at multiples of it wherever that is ours


class Block(NamedTuple):
  """One block of pinned memory.

  Rewriting it is seen by whoever copies from it next: nobody may be copying,
  and `array` must be read by copies alone, never by `np.asarray`, which may
  keep what it saw first.

  Attributes:
    view: what lies in it, writable, with the block's shape and type.
    array: the same memory as a JAX array; None where JAX does not own it.
  """

  view: np.ndarray
  array: jax.Array | None

  @property
  def address(self) -> int:
    """Of the first byte."""
    return int(self.view.ctypes.data)


class Memory(Protocol):
  """Where blocks come from."""

  def block(self) -> Block:
    """A fresh block, contents arbitrary.

    Raises:
      MemoryError, jax.errors.JaxRuntimeError: no more can be pinned.
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
      return Block(buffer, array)
    raw = (ctypes.c_uint8 * buffer.nbytes).from_address(pointer)
    view = np.frombuffer(memoryview(raw), np.uint8).view(self._dtype)
    return Block(view.reshape(self._shape), array)


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
