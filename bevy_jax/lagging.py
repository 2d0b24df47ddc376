"""What schedulers share that let the most lagging request go first."""

from collections.abc import Sequence

from bevy_jax import protocols
from bevy_jax import request as request_lib


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
  """Who misses nothing and is within the bound, in order of rows."""
  resident = view.resident
  found = [p for p in view.waiting if not p.need & ~resident[p.layer]]
  if max_lag is None:
    return found
  return [p for p in found if p.position <= view.floor + max_lag]


def together(group: Sequence[request_lib.Progress]) -> protocols.Launch:
  """One launch of ready requests at one layer, whatever pass they are in."""
  return protocols.Launch(group[0].layer, group, union(group))


def union(group: Sequence[request_lib.Progress]) -> int:
  """Bitmap of what any of them needs."""
  needed = 0
  for p in group:
    needed |= p.need
  return needed
