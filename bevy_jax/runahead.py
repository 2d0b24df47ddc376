"""Requests whose experts are resident run ahead of those that wait."""

import dataclasses
import operator

from bevy_jax import holding, lagging, protocols

_BY_POSITION = operator.attrgetter('position')
# Of `Pace.balance`: below the link alone is short, above the device alone.
_SHORT = 0.4, 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runahead(lagging.SchedulerBase):
  """The ready requests of the layer that lags most go first.

  Loads follow the same order: the most lagging request first, then the one
  that misses fewest. In that order a request may take slots from those
  behind it and never the other way, so with a cache of at least top_k slots
  the most lagging request always gets through: no deadlock.

  A request may be some layers ahead of the last one and no more. Where link or
  device is clearly the one that is short, staying together is worth most:
  loads and launches are shared. Where both are needed alike, more room keeps
  both of them busy. And while the device is short, a ready group waits for
  those who could join it soon (`holding`).

  Attributes:
    max_lag: layers that a request may be ahead of the last one; None for no
      bound.
    near: the same while link or device alone is short; None for `max_lag`.
    hold: whether ready groups may wait for others.
    hops: layers that a launch may cross, see `lagging.reach`.
  """

  max_lag: int | None = 24
  near: int | None = 1
  hold: bool = True
  hops: int = 1

  def launch(self, view: protocols.View) -> protocols.Launch | None:
    """See `Scheduler`: ready requests of the most lagging ready layer."""
    lag = self._lag(view)
    ready = lagging.ready(view, lag)
    tried: set[int] = set()
    for first in sorted(ready, key=_BY_POSITION):
      if first.layer in tried:
        continue
      tried.add(first.layer)
      group = [p for p in ready if p.layer == first.layer]
      launch = lagging.together(group)
      if not self.hold or not holding.pays(view, launch):
        return lagging.reach(view, launch, self.hops, lag)
    return None

  def _lag(self, view: protocols.View) -> int | None:
    if self.near is None:
      return self.max_lag
    link, device = _SHORT
    even = link <= view.pace.balance <= device
    return self.max_lag if even else self.near
