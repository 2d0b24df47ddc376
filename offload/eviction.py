"""Which expert gives up its slot: one interface, pure rules.

A key is layer * experts + expert id. What may be given up comes as `barred`:
one float a key, 0 where it may be and infinity where it may not. Adding that
to a score and taking the least is much faster than a walk over the keys, and
thousands of keys cost microseconds.
"""

import dataclasses
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bevy_jax.offload import uses as uses_lib

Array = npt.NDArray[np.float64]
Uses = uses_lib.Uses

_DRAWS = 8
_MASK = (1 << 64) - 1


class Eviction(Protocol):
  """Chooses among keys that may be given up."""

  @property
  def estimates(self) -> bool:
    """Whether it reads `uses.estimate`, which costs time to keep."""

  def victim(self, barred: Array, uses: Uses) -> int:
    """A key that is not barred; any where all are. Changes nothing.

    Args:
      barred: float64[keys], 0 where a key may go and infinity where not.
      uses: the history, see `Uses`.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvictionBase:
  """What a rule has beside `victim`; one of your own needs that alone.

  Attributes:
    estimates: see `Eviction`.
  """

  estimates: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lru(EvictionBase):
  """The one that was used longest ago."""

  def victim(self, barred: Array, uses: Uses) -> int:
    """See `Eviction`."""
    return uses_lib.scan(uses.last, barred)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfu(EvictionBase):
  """The least used since the start; ties: loaded longest ago."""

  def victim(self, barred: Array, uses: Uses) -> int:
    """See `Eviction`."""
    return uses_lib.scan(uses.count, barred)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LfuDecayed(EvictionBase):
  """The least used, counts halving every 16 tokens; ties: lowest key."""

  def victim(self, barred: Array, uses: Uses) -> int:
    """See `Eviction`."""
    return uses_lib.scan(uses.weight, barred)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fifo(EvictionBase):
  """The one that was loaded longest ago."""

  def victim(self, barred: Array, uses: Uses) -> int:
    """See `Eviction`."""
    return uses_lib.scan(uses.loaded, barred)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Random(EvictionBase):
  """Any one, by a hash of the seed and of all that happened before."""

  seed: int = 0

  def victim(self, barred: Array, uses: Uses) -> int:
    """See `Eviction`."""
    # Draws until one may go, which is fair; a full look only after bad luck.
    for draw in range(_DRAWS):
      key = mix(self.seed, uses.tick, draw) % len(barred)
      if not barred[key]:
        return key
    keys = (barred == 0).nonzero()[0]
    draw = mix(self.seed, uses.tick, _DRAWS)
    return int(keys[draw % keys.size]) if keys.size else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeastStale(EvictionBase):
  """Layers that this sweep has passed come first, then whatever is oldest.

  SpecMD's idea: what lies behind is needed a whole sweep later, what lies
  ahead is needed soon. The sweep stands at the layer of the last use.
  """

  def victim(self, barred: Array, uses: Uses) -> int:
    """See `Eviction`."""
    passed = max(0, uses.layer) * uses.experts
    if passed:
      key = uses_lib.scan(uses.last[:passed], barred[:passed])
      if not barred[key]:
        return key
    return passed + uses_lib.scan(uses.last[passed:], barred[passed:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Static(EvictionBase):
  """The least popular in a trace: the popular ones are as good as pinned.

  Attributes:
    popularity: one value a key.
  """

  popularity: Array

  def victim(self, barred: Array, uses: Uses) -> int:
    """See `Eviction`."""
    return uses_lib.scan(self.popularity, barred)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reuse(EvictionBase):
  """The one whose next use is expected last, by `estimate.Estimate`."""

  estimates: bool = True

  def victim(self, barred: Array, uses: Uses) -> int:
    """See `Eviction`."""
    assert uses.estimate is not None, 'this history keeps no estimate'
    # Both are positive: the negative of the least is the greatest.
    return int((barred - uses.estimate.next_use()).argmin())


def mix(seed: int, tick: int, draw: int) -> int:
  """A hash of 64 bits, the same on every machine (splitmix64)."""
  x = seed * 0x9E3779B97F4A7C15 + tick * 0xD1B54A32D192ED03
  x = (x + draw * 0xABC98388FB8FAC03) & _MASK
  x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
  x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
  return x ^ x >> 31


EVICTIONS: dict[str, Eviction] = {
  'lru': Lru(),
  'lfu': Lfu(),
  'lfu_decayed': LfuDecayed(),
  'fifo': Fifo(),
  'random': Random(),
  'least_stale': LeastStale(),
  'reuse': Reuse(),
}
