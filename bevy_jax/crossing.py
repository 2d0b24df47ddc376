"""A launch of one or more layers as the validator sees it."""

import dataclasses
from collections.abc import Iterable

from bevy_jax import costs as costs_lib
from bevy_jax import events


@dataclasses.dataclass
class Flight:
  """A launch, and what it may do behind its first layer.

  Attributes:
    begun: how it began.
    may: keys that were resident then at the layers that it may cross.
    read: those of them that it has read.
    spent: ns of device time that it has had.
  """

  begun: events.LaunchBegun
  may: frozenset[int] = frozenset()
  read: set[int] = dataclasses.field(default_factory=set)
  spent: int = 0

  def least(self, costs: costs_lib.Costs, layers: int, experts: int) -> int:
    """Device time that it needs, all its layers together."""
    e, layer = self.begun, self.begun.layer
    rows, last = len(e.requests), e.finish and layer + 1 == layers
    total = costs.decode(rows, len(e.experts), on=e.finish, last=last)
    for _ in range(1, e.hops):
      layer = (layer + 1) % layers
      read = sum(key // experts == layer for key in self.read)
      total += costs.hop(rows, read, last=layer + 1 == layers)
    return total


def may_read(
  e: events.LaunchBegun, landed: Iterable[int], layers: int, experts: int
) -> frozenset[int]:
  """Keys that a launch finds behind its first layer, of those resident."""
  if e.hops == 1:
    return frozenset()
  later = {(e.layer + hop) % layers for hop in range(1, e.hops)}
  return frozenset(key for key in landed if key // experts in later)
