"""Requests whose experts are resident run ahead of those that wait."""

import dataclasses

from bevy_jax import protocols
from bevy_jax import request as request_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runahead:
  """The ready requests of the layer that lags most go first.

  Loads follow the same order: the most lagging request first, then the one
  that misses fewest. In that order a request may take slots from those
  behind it and never the other way, so with a cache of at least top_k slots
  the most lagging request always gets through: no deadlock.

  Attributes:
    depth: launches in flight at once.
    max_lag: a request more than this many layers ahead of the last one
      waits for it; None for no bound. Small bounds keep groups together,
      and one layer is nearly all that overlap needs.
  """

  depth: int = 2
  max_lag: int | None = None

  def wants(self, view: protocols.View) -> list[protocols.Want]:
    """See `Scheduler`: one want a waiting request, most lagging first."""
    resident = view.resident

    def urgency(p: request_lib.Progress) -> tuple[int, int]:
      return p.position, (p.need & ~resident[p.layer]).bit_count()

    waiting = sorted(view.waiting, key=urgency)
    return [protocols.Want(p.layer, p.need) for p in waiting]

  def launch(self, view: protocols.View) -> protocols.Launch | None:
    """See `Scheduler`: all ready requests of the most lagging ready layer."""
    limit = None if self.max_lag is None else view.floor + self.max_lag
    resident = view.resident
    first: request_lib.Progress | None = None
    for p in view.waiting:
      if p.need & ~resident[p.layer]:
        continue
      if limit is not None and p.position > limit:
        continue
      if first is None or p.position < first.position:
        first = p
    if first is None:
      return None
    return _group(view, first, limit)


def _group(
  view: protocols.View, first: request_lib.Progress, limit: int | None
) -> protocols.Launch:
  """Everybody who is ready at the layer of `first` and within the limit."""
  layer, resident = first.layer, view.resident[first.layer]
  group = [
    p
    for p in view.waiting
    if p.layer == layer
    and not p.need & ~resident
    and (limit is None or p.position <= limit)
  ]
  experts = 0
  for p in group:
    experts |= p.need
  return protocols.Launch(layer, group, experts)
