"""Schedulers to compare with: lockstep, the published rule, plain others."""

import dataclasses

from bevy_jax import lagging, protocols
from bevy_jax import request as request_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lockstep:
  """All active requests at one layer, in order; stalls on every miss.

  After the router all misses of the batch are wanted at once, in ascending
  order, and the experts are applied when all are resident. A union larger
  than what the layer may hold goes in waves of ascending ids. Requests that
  joined while the others were in the middle of a pass catch up with them
  first.

  Attributes:
    depth: launches in flight at once.
    hops: layers that a launch may cross while nobody misses anything; none
      goes past the head, so the order of everything stays the same. None goes
      further than where a load is likely to be needed, as in `Runahead`.
  """

  depth: int = 1
  hops: int = 1

  def wants(self, view: protocols.View) -> list[protocols.Want]:
    """See `Scheduler`: the current wave of the batch's one layer."""
    batch = _batch(view)
    if not batch:
      return []
    layer, union = batch[0].layer, lagging.union(batch)
    return [protocols.Want(layer, wave(union, view.room(layer)))]

  def launch(self, view: protocols.View) -> protocols.Launch | None:
    """See `Scheduler`: the wave once it is resident."""
    batch = _batch(view)
    if view.in_flight or not batch:
      return None
    layer, union = batch[0].layer, lagging.union(batch)
    experts = wave(union, view.room(layer))
    if experts & ~view.resident[layer]:
      return None
    hops = int(max(1, min(self.hops, view.pace.clear)))
    hops = min(hops, len(view.resident) - layer)
    return protocols.Launch(
      layer, batch, experts, experts == union, hops, together=True
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bevy(lagging.SchedulerBase):
  """Requests regroup at every layer, as experts come and go.

  All ready requests of the layer that lags most are one launch; who waits
  for a load is left behind and joins whom it meets. Loads are in the same
  order, the most lagging request first, then the one that misses fewest: a
  request may take slots from those behind it in that order and never the
  other way, so the most lagging one always gets through. This is the rule as
  it was published; `Runahead` is what became of it.

  Attributes:
    max_lag: nobody who is more than this many layers ahead of the last one
      is launched; None for no bound. With 0 nobody is ever more than one
      layer ahead: a layer is split into who is ready and who is not, which
      nearly all overlap needs no more than.
  """

  max_lag: int | None = None

  def launch(self, view: protocols.View) -> protocols.Launch | None:
    """See `Scheduler`: all ready requests of the most lagging ready layer."""
    ready = lagging.ready(view, self.max_lag)
    if not ready:
      return None
    first = min(ready, key=lambda p: p.position)
    return lagging.together([p for p in ready if p.layer == first.layer])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solo(lagging.SchedulerBase):
  """Each request alone: the most lagging ready one is a launch of its own.

  Loads are ordered as in `Bevy`. What it lacks against it is what groups are
  worth: shared reads of experts and one fixed cost for several rows.
  """

  def launch(self, view: protocols.View) -> protocols.Launch | None:
    """See `Scheduler`: the most lagging ready request."""
    ready = lagging.ready(view, None)
    if not ready:
      return None
    return lagging.together([min(ready, key=lambda p: p.position)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest(lagging.SchedulerBase):
  """The layer at which most requests are ready goes first.

  Loads are ordered as in `Bevy`. Ties go to the layer of the most lagging
  request.

  Attributes:
    max_lag: see `Bevy`; without a bound a lonely request behind the others
      could wait for ever.
  """

  max_lag: int = 64

  def launch(self, view: protocols.View) -> protocols.Launch | None:
    """See `Scheduler`: the largest group of ready requests at one layer."""
    groups: dict[int, list[request_lib.Progress]] = {}
    for p in lagging.ready(view, self.max_lag):
      groups.setdefault(p.layer, []).append(p)
    if not groups:
      return None
    return lagging.together(
      max(
        groups.values(),
        key=lambda group: (len(group), -min(p.position for p in group)),
      )
    )


def wave(experts: int, slots: int) -> int:
  """The lowest `slots` bits of a bitmap."""
  if experts.bit_count() <= slots:
    return experts
  kept = 0
  for _ in range(slots):
    low = experts & -experts
    kept |= low
    experts ^= low
  return kept


def _batch(view: protocols.View) -> list[request_lib.Progress]:
  """Who goes next: all at the least position, once everybody waits."""
  if not view.waiting or len(view.waiting) < view.active:
    return []
  last = min(p.position for p in view.waiting)
  return [p for p in view.waiting if p.position == last]
