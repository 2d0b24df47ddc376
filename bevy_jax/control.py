"""Control integers for launches, in pinned buffers that are rewritten.

A numpy argument costs a launch 40-100 us on a GPU, a pinned buffer that the
program itself copies to the device none. A buffer may be rewritten only once
the launch that reads it has ended; the ring is as long as the launches in
flight need.
"""

import ctypes
import math
import struct
from collections.abc import Sequence

import jax
import numpy as np

from bevy_jax import prompt_steps, protocols, steps
from bevy_jax.layers import config as model_config


class ControlRing:
  """Buffers of int32, handed out in turn."""

  def __init__(
    self, parts: Sequence[tuple[int, ...]], length: int, device: jax.Device
  ):
    """Makes them.

    Args:
      parts: shapes of what lies in each buffer, one behind the other.
      length: how many buffers.
      device: that launches run on.
    """
    sizes = [math.prod(part) for part in parts]
    size = sum(sizes)
    sharding = jax.sharding.SingleDeviceSharding(
      device, memory_kind='pinned_host'
    )
    self._buffers: list[tuple[list[np.ndarray], jax.Array]] = []
    for _ in range(length):
      array = jax.device_put(np.zeros(size, np.int32), sharding)
      array.block_until_ready()
      pointer = array.unsafe_buffer_pointer()
      raw = (ctypes.c_int32 * size).from_address(pointer)
      flat, views, at = np.ctypeslib.as_array(raw), [], 0
      for part, count in zip(parts, sizes, strict=True):
        views.append(flat[at : at + count].reshape(part))
        at += count
      self._buffers.append((views, array))
    self._next = 0

  def take(self) -> tuple[list[np.ndarray], jax.Array]:
    """The next buffer: a view of each part to write, and the array to pass.

    The caller must know that the launch which read it last has ended.
    """
    i = self._next
    self._next = (i + 1) % len(self._buffers)
    return self._buffers[i]


class Controls:
  """Rings of buffers for every kind and size of launch, made when needed."""

  def __init__(
    self,
    model: model_config.ModelConfig,
    chunk: int,
    length: int,
    device: jax.Device,
  ):
    self._model, self._chunk = model, chunk
    self._length, self._device = length, device
    self._rings: dict[tuple[str, int, int], ControlRing] = {}

  def take(
    self, kind: str, size: int, hops: int = 0
  ) -> tuple[list[np.ndarray], jax.Array]:
    """See `ControlRing`.

    Args:
      kind: 'enter', 'decode', 'prefill' or, for its first launch, 'prompt'.
      size: rows, tokens for 'prefill', prompts for 'prompt'.
      hops: for 'decode', see `steps.control_parts`.
    """
    ring = self._rings.get((kind, size, hops))
    if ring is None:
      model, tokens = self._model, (size, self._chunk)
      parts: dict[str, list[tuple[int, ...]]] = {
        'enter': [(size, 1 + steps.REGISTERS)],
        'decode': steps.control_parts(model, size, hops),
        'prefill': prompt_steps.control_parts(model, size),
        'prompt': [(size,), tokens, tokens],
      }
      ring = ControlRing(parts[kind], self._length, self._device)
      self._rings[kind, size, hops] = ring
    return ring.take()


def registers(entry: protocols.Entry) -> list[int]:
  """A row's registers in the order of `steps`; floats as their bits."""
  s = entry.sampling
  real = struct.unpack(
    '<3i', struct.pack('<3f', s.temperature, s.top_p, s.min_p)
  )
  return [
    entry.token,
    entry.position,
    real[0],
    s.top_k,
    real[1],
    real[2],
    s.seed,
  ]
