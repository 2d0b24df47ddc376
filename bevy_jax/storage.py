"""What experts are stored as: a float type, or packed small integers."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from bevy_jax.layers import quant
from bevy_jax.offload import store as store_lib

FLOATS: dict[str, np.dtype[Any]] = {
  'bf16': np.dtype(jnp.bfloat16),
  'f16': np.dtype(np.float16),
  'f32': np.dtype(np.float32),
}
Storage = np.dtype[Any] | quant.Format


class Floats(Protocol):
  """Where experts and shared weights come from, as floats."""

  @property
  def count(self) -> int:
    """Number of experts."""

  @property
  def shape(self) -> tuple[int, int, int]:
    """Of every expert, `[3, F, D]`."""

  @property
  def dtype(self) -> np.dtype[Any]:
    """Of every expert."""

  def fill(self, key: int, out: np.ndarray) -> None:
    """Writes one expert into `out`."""

  def shared(self) -> Iterator[tuple[str, np.ndarray]]:
    """Path and array of every shared weight."""


def parse(text: str) -> Storage:
  """The storage of 'bf16', 'f16', 'f32', 'int8', 'int4:64:zero' and so on."""
  if text in FLOATS:
    return FLOATS[text]
  if not text.startswith('int'):
    raise ValueError(
      f'experts cannot be stored as {text!r}; choose one of {list(FLOATS)}, '
      'int8 or int4, the latter two with a group, such as int4:64.'
    )
  return quant.parse(text)


def name(storage: Storage) -> str:
  """What `parse` reads."""
  if isinstance(storage, quant.Format):
    return storage.name
  return next(k for k, dtype in FLOATS.items() if dtype == storage)


def encode(storage: Storage, weights: np.ndarray) -> np.ndarray:
  """One expert `[3, F, D]` as it is stored: floats, or uint8 `[bytes]`.

  Raises:
    ValueError: it cannot be: wrong sides, or weights out of range.
  """
  if isinstance(storage, quant.Format):
    three, f, d = weights.shape
    return quant.pack(quant.layout(storage, (three, f, d)), weights)
  with np.errstate(over='ignore'):
    out = weights.astype(storage)
  if not np.isfinite(out).all() and np.isfinite(weights).all():
    raise ValueError(
      f'its largest weight, {float(np.abs(weights).max()):.4g}, is out of the '
      f'range of {name(storage)}; store the experts as bf16 or f32.'
    )
  return out


def decode(
  storage: Storage, block: np.ndarray, shape: tuple[int, int, int]
) -> np.ndarray:
  """The float32 expert that a stored one stands for."""
  if isinstance(storage, quant.Format):
    how = quant.layout(storage, shape)
    return np.asarray(_unpack(how, jnp.asarray(block)))
  return block.astype(np.float32)


def experts(
  store: store_lib.Store,
  form: quant.Format | None,
  shape: tuple[int, int, int],
) -> list[np.ndarray]:
  """Every expert of a store in float32 `[3, F, D]`, by key."""
  storage = form or store.dtype
  return [decode(storage, store.read(k), shape) for k in range(len(store))]


_unpack = jax.jit(quant.unpack, static_argnums=0)


@dataclasses.dataclass(frozen=True)
class Recoded:
  """A source whose experts are stored in another way.

  Attributes:
    source: where the floats come from.
    storage: what they become.
  """

  source: Floats
  storage: Storage

  def __post_init__(self) -> None:
    if isinstance(self.storage, quant.Format):
      quant.layout(self.storage, self.source.shape)  # refuses wrong sides

  @property
  def count(self) -> int:
    """Number of experts."""
    return self.source.count

  @property
  def shape(self) -> tuple[int, ...]:
    """Of every block: `[3, F, D]`, or bytes."""
    if isinstance(self.storage, quant.Format):
      return (quant.layout(self.storage, self.source.shape).nbytes,)
    return self.source.shape

  @property
  def dtype(self) -> np.dtype[Any]:
    """Of every block."""
    if isinstance(self.storage, quant.Format):
      return np.dtype(np.uint8)
    return self.storage

  @property
  def meta(self) -> dict[str, Any] | None:
    """What a reader must know to read blocks of bytes; None for floats."""
    if isinstance(self.storage, quant.Format):
      return dataclasses.asdict(self.storage) | {'order': quant.ORDER}
    return None

  def fill(self, key: int, out: np.ndarray) -> None:
    """Writes one block into `out`; ValueError where it cannot be stored."""
    weights = np.empty(self.source.shape, self.source.dtype)
    self.source.fill(key, weights)
    try:
      out[...] = encode(self.storage, weights)
    except ValueError as error:
      raise ValueError(f'expert {key} cannot be converted: {error}') from error

  def shared(self) -> Iterator[tuple[str, np.ndarray]]:
    """Path and array of every shared weight, as in the source."""
    return self.source.shared()
