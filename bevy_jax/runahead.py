"""Requests whose experts are resident run ahead of those that wait."""

import dataclasses
import operator

from bevy_jax import holding, lagging, protocols

_BY_POSITION = operator.attrgetter('position')
# Of `Pace.balance`: below the link alone is short, above the device alone.
_SHORT = 0.4, 2.0
_ABREAST = 3.0  # From here on the link is little used.
_LEAST = 2  # Layers a launch tries where it is dear, however likely loads are.
_DEAR = 0.5  # Part of a launch's time that it costs by itself.


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
    hops: layers that a launch may cross, see `lagging.reach`. What it reveals
      is told when all of it has ended, and rows that stop on the way would
      have been met by others before. So it goes further than one layer where
      the device alone is short, no further than a load is likely, or where
      most of a launch's time is its own. Where loads are rarer than launches
      of full length and the link is little used, all stay together.
  """

  max_lag: int | None = 24
  near: int | None = 1
  hold: bool = True
  hops: int = 1

  def launch(self, view: protocols.View) -> protocols.Launch | None:
    """See `Scheduler`: ready requests of the most lagging ready layer."""
    pace, hops = view.pace, self._hops(view)
    if pace.clear >= self.hops > 1 and pace.balance >= _ABREAST:
      launch = self._abreast(view, hops)
      if launch is not None or view.in_flight or any(view.loading):
        return launch
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
        return lagging.reach(view, launch, hops, lag)
    return None

  def _hops(self, view: protocols.View) -> int:
    """Layers that a launch is sent at most; see the class."""
    pace = view.pace
    least = _LEAST if pace.fixed >= _DEAR * pace.device else 1
    clear = pace.clear if pace.balance >= _SHORT[1] else 1.0
    return int(min(self.hops, max(least, clear)))

  def _abreast(
    self, view: protocols.View, hops: int
  ) -> protocols.Launch | None:
    """All who lag most, once all of them are ready.

    Where a launch of full length seldom meets a miss, who is left behind costs
    more than its load: it goes that length alone.
    """
    floor = view.floor
    group = [p for p in view.waiting if p.position == floor]
    if view.in_flight or not group:
      return None
    layer, experts = group[0].layer, lagging.union(group)
    if experts & ~view.resident[layer]:
      return None
    # To the head, and no further: whole passes are cut into fewest launches.
    hops = min(hops, len(view.resident) - layer)
    everybody = len(group) == view.active
    launch = protocols.Launch(layer, group, experts, True, hops, everybody)
    # Nobody else is met; the device waits for this.
    return launch if everybody else lagging.reach(view, launch, hops, None)

  def _lag(self, view: protocols.View) -> int | None:
    if self.near is None:
      return self.max_lag
    link, device = _SHORT
    even = link <= view.pace.balance <= device
    return self.max_lag if even else self.near
