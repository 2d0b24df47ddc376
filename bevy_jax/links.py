"""What carries experts to this device: a link's name, resolved."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from bevy_jax import config as config_lib
from bevy_jax.offload import cuda, direct, transfer
from bevy_jax.offload import store as store_lib


class Link(NamedTuple):
  """A link as it is on one device, for one model.

  Attributes:
    transfer: 'cuda' or 'device_put'.
    gb_per_s: what it is throttled to; 0 where it is not.
    latency_us: of each load, where it is throttled.
    why: what speaks against 'cuda'; empty where nothing does.
  """

  transfer: str
  gb_per_s: float
  latency_us: float
  why: str

  @property
  def words(self) -> str:
    """As in a report: 'cuda', 'throttled:2.5', 'device_put (why)'."""
    if self.gb_per_s:
      late = f':{self.latency_us:g}' if self.latency_us else ''
      return f'throttled:{self.gb_per_s:.4g}{late}'
    return self.transfer + (f' ({self.why})' if self.why else '')


def resolve(
  link: str, device: jax.Device, stored: np.dtype[Any], pool: np.dtype[Any]
) -> Link:
  """Chooses the transfer that `EngineConfig.link` leaves open.

  Direct copies need a CUDA device, cuda-bindings, and experts that lie in
  their slots as they are stored: bfloat16 experts in a float32 cache (strict
  runs) are converted by the slot write, so they take `device_put`.

  Args:
    link: see `EngineConfig`.
    device: where the slots are.
    stored: type of the experts in host memory.
    pool: type of the slots.

  Raises:
    ValueError: 'cuda' was asked for by name and cannot be.
  """
  kind, gb_per_s, latency_us = config_lib.parse_link(link)
  if kind == 'device_put':
    return Link('device_put', gb_per_s, latency_us, '')
  why = cuda.obstacle(device)
  if not why and np.dtype(stored) != np.dtype(pool):
    why = f'{stored} experts are converted to the {pool} of the cache'
  if why and kind == 'cuda':
    raise ValueError(
      f"link 'cuda' copies experts by CUDA as they are stored, but {why}. "
      "Use link 'auto', which takes device_put where it must."
    )
  return Link('device_put' if why else 'cuda', gb_per_s, latency_us, why)


def make(
  link: Link,
  store: store_lib.Store,
  pool: jax.Array,
  device: jax.Device,
  clock: Callable[[], int],
) -> transfer.Transfer:
  """The transfer of a link from a store to a pool, by a clock in ns."""
  plain: transfer.Transfer
  if link.transfer == 'cuda':
    plain = direct.Direct(store.block, pool, cuda.Runtime(device))
  else:
    plain = transfer.DevicePut(store.block, device)
  if not link.gb_per_s:
    return plain
  return transfer.Throttled(
    plain, clock, store.block_bytes, link.gb_per_s, link.latency_us
  )
