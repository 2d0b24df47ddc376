"""What schedulers share that let the most lagging request go first."""

import dataclasses
from collections.abc import Sequence

from bevy_jax import protocols
from bevy_jax import request as request_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerBase:
  """A scheduler without `launch`, which one of your own adds alone.

  Loads go by lag: who is last is served first. So it always gets through,
  and with a `launch` that takes somebody wherever somebody is ready there is
  no deadlock.

  Attributes:
    depth: launches in flight at once.
  """

  depth: int = 2

  def wants(self, view: protocols.View) -> list[protocols.Want]:
    """See `Scheduler`: one want a waiting request, most lagging first."""
    return wants(view)


def wants(view: protocols.View) -> list[protocols.Want]:
  """One want a waiting request: most lagging, then fewest missing first."""
  resident = view.resident

  def urgency(p: request_lib.Progress) -> tuple[int, int]:
    return p.position, (p.need & ~resident[p.layer]).bit_count()

  waiting = sorted(view.waiting, key=urgency)
  return [protocols.Want(p.layer, p.need) for p in waiting]


def ready(
  view: protocols.View, max_lag: int | None
) -> list[request_lib.Progress]:
  """Who misses nothing and is within the bound, in order of rows.

  Args:
    view: what the scheduler sees.
    max_lag: layers that one may be ahead of the last one; None for no bound.
  """
  resident = view.resident
  if max_lag is None:
    return [p for p in view.waiting if not p.need & ~resident[p.layer]]
  last = view.floor + max_lag
  return [
    p
    for p in view.waiting
    if p.position <= last and not p.need & ~resident[p.layer]
  ]


def together(group: Sequence[request_lib.Progress]) -> protocols.Launch:
  """One launch of ready requests at one layer, whatever pass they are in."""
  return protocols.Launch(group[0].layer, group, union(group))


def reach(
  view: protocols.View,
  launch: protocols.Launch,
  hops: int,
  max_lag: int | None,
) -> protocols.Launch:
  """The launch, to go on as far as nobody else is met, `hops` at most.

  It stops at a layer where others wait, or that somebody in flight comes to
  next: together they share what a launch costs. And nobody goes on from a
  layer that is more than `max_lag` ahead of the last one of the others.
  """
  if hops < 2:
    return launch
  layer, layers, group = launch.layer, len(view.resident), launch.group
  others = [p for p in view.waiting if p not in group]
  met = [p.layer for p in others] + [p.layer + 1 for p in view.flying]
  hops = min([hops, *[(at - layer) % layers or layers for at in met]])
  if hops > 1 and max_lag is not None and (others or view.flying):
    floor = min([p.position for p in others + view.flying])
    first = max([p.position for p in group])
    hops = max(1, min(hops, floor + max_lag - first + 1))
  # `_replace` takes three times as long.
  return protocols.Launch(layer, group, *launch[2:4], hops, launch.together)


def union(group: Sequence[request_lib.Progress]) -> int:
  """Bitmap of what any of them needs."""
  needed = 0
  for p in group:
    needed |= p.need
  return needed
