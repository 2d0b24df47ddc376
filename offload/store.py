"""What holds the experts below the device: blocks by key, whatever tier."""

from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from bevy_jax.offload import pinned


class Fetched(NamedTuple):
  """A block that was asked for and had to be read first.

  Attributes:
    key: the expert.
    fault: why it could not be read; empty where it is in host memory now.
    read: nanoseconds at which its read from disk began and ended.
  """

  key: int
  fault: str = ''
  read: tuple[int, ...] = ()


class Store(Protocol):
  """Experts in host memory, or on their way there; one thread calls it."""

  @property
  def shape(self) -> tuple[int, ...]:
    """Of every block."""

  @property
  def dtype(self) -> np.dtype[Any]:
    """Of every block."""

  @property
  def block_bytes(self) -> int:
    """Bytes of one block."""

  @property
  def capacity(self) -> int:
    """Blocks that host memory has room for."""

  @property
  def remark(self) -> str:
    """What a report must say about it; empty for nothing."""

  def __len__(self) -> int:
    """Number of experts."""

  def fetch(self, key: int) -> bool:
    """Asks for a block; every fetch is ended by one `release`.

    Returns:
      True where it is in host memory now and stays until the release; False
      where `fetched` will tell. Then it stays as well, unless it failed: a
      fetch that failed needs no release.
    """

  def fetched(self) -> list[Fetched]:
    """What came or failed since the last call, once a fetch; never waits."""

  def release(self, key: int) -> None:
    """Ends one fetch: nobody copies from the block for it any more.

    Safe before it has come: then `fetched` will not tell.
    """

  def block(self, key: int) -> pinned.Block:
    """The block of a fetched expert; only to be copied from."""

  def array(self, key: int) -> jax.Array:
    """The same as a JAX array; its memory must be JAX's."""

  def read(self, key: int) -> np.ndarray:
    """A copy of a block, wherever it lies; waits, for checks.

    Raises:
      ValueError: it was changed on disk since it was written.
      OSError: it cannot be read.
    """

  def clear(self) -> None:
    """Starts again as if new: nothing fetched, a cache cold."""

  def close(self) -> None:
    """Ends threads and files; safe to repeat. No fetch after that."""
