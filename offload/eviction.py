"""Which expert gives up its slot: one interface, pure rules.

A key is layer * experts + expert id.
"""

import dataclasses
from collections.abc import Iterable
from typing import Protocol

_HALF_LIFE = 16.0  # Tokens of a request's progress in which a count halves.


class Uses:
  """What has been used, when and how often; the engine alone changes it.

  Attributes:
    last: a key's last use as a running number, 0 where never used.
    weight: a key's uses, each worth twice as much as one 16 tokens before,
      so that comparing weights compares counts that halve every 16 tokens.
  """

  def __init__(self, keys: int):
    self.last = [0] * keys
    self.weight = [0.0] * keys
    self._tick = 0
    self._origin = 0.0
    self._worth = 1.0

  def advance(self, clock: float) -> None:
    """Sets the clock: mean tokens that the requests have done."""
    self._worth = 2.0 ** ((clock - self._origin) / _HALF_LIFE)
    if self._worth > 1e200:
      # Only ratios count: start again at 1 long before an overflow.
      self.weight = [w / self._worth for w in self.weight]
      self._origin, self._worth = clock, 1.0

  def touch(self, key: int, times: int = 1) -> None:
    """Counts `times` uses of a key."""
    self._tick += 1
    self.last[key] = self._tick
    self.weight[key] += self._worth * times


class Eviction(Protocol):
  """Chooses among keys that may be given up."""

  def victim(self, candidates: Iterable[int], uses: Uses) -> int:
    """One of the candidates, ascending keys, at least one; changes nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lru:
  """The one that was used longest ago."""

  def victim(self, candidates: Iterable[int], uses: Uses) -> int:
    """See `Eviction`."""
    return min(candidates, key=uses.last.__getitem__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LfuDecayed:
  """The least used, counts halving every 16 tokens; ties: lowest key."""

  def victim(self, candidates: Iterable[int], uses: Uses) -> int:
    """See `Eviction`."""
    return min(candidates, key=uses.weight.__getitem__)


EVICTIONS: dict[str, Eviction] = {'lru': Lru(), 'lfu_decayed': LfuDecayed()}
