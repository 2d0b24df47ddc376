"""Control integers for launches, in pinned buffers that are rewritten.

A numpy argument costs a launch 40-100 us on a GPU, a pinned buffer that the
program itself copies to the device none. A buffer may be rewritten only once
the launch that reads it has ended; the ring is as long as the launches in
flight need.
"""

import ctypes

import jax
import numpy as np


class ControlRing:
  """Buffers of `size` int32 each, handed out in turn."""

  def __init__(self, size: int, length: int, device: jax.Device):
    sharding = jax.sharding.SingleDeviceSharding(
      device, memory_kind='pinned_host'
    )
    self._arrays: list[jax.Array] = []
    self._views: list[np.ndarray] = []
    for _ in range(length):
      array = jax.device_put(np.zeros(size, np.int32), sharding)
      array.block_until_ready()
      pointer = array.unsafe_buffer_pointer()
      raw = (ctypes.c_int32 * size).from_address(pointer)
      self._arrays.append(array)
      self._views.append(np.ctypeslib.as_array(raw))
    self._next = 0

  def take(self) -> tuple[np.ndarray, jax.Array]:
    """The next buffer: a view to write, and the array to pass.

    The caller must know that the launch which read it last has ended.
    """
    i = self._next
    self._next = (i + 1) % len(self._arrays)
    return self._views[i], self._arrays[i]
