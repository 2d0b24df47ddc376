"""Whether a ready group should wait for requests that could join it.

Launching at once reveals what is needed next, which keeps the link busy;
launching together saves what a launch costs by itself and the experts that
are read twice. Which of them counts depends on what is short.
"""

import operator
from typing import NamedTuple

from bevy_jax import protocols
from bevy_jax import request as request_lib

_BY_POSITION = operator.attrgetter('position')
_NEAR = 4  # Layers behind a group from which others may still join it.
_BOUND = 0.8, 1.2  # Of `Pace.balance`: below the link alone is short.
_REVEALED = 0.5  # Of the link's work that waiting puts off.


class _Joiner(NamedTuple):
  """Requests that could be there.

  Attributes:
    eta: when, in ns.
    experts: how many they need.
    shared: how many of these the group reads anyway; -1 where it is not
      known what they will need.
  """

  eta: float
  experts: int
  shared: int


def pays(view: protocols.View, launch: protocols.Launch) -> bool:
  """Whether waiting for somebody costs less than launching them apart.

  Never where nothing is in flight: then nothing would end the wait.
  """
  pace = view.pace
  if not pace.device or not (view.in_flight or any(view.loading)):
    return False
  low, high = _BOUND
  short = min(1.0, max(0.0, (pace.balance - low) / (high - low)))
  if not short:
    return False
  flying, waiting = _near(view, launch)
  if not flying and not waiting:
    return False
  free, (lands, away) = pace.device_free, _landings(view)
  size = float(launch.experts.bit_count())
  cost, slack = pace.cost(size), 0.0
  if pace.loads:
    slack = max(0.0, away * pace.load - cost - pace.device / pace.loads)
  saved = -_REVEALED * min(pace.load * pace.loads, cost)
  apart = pace.fixed
  if launch.layer == len(view.resident) - 1:
    apart += pace.head
  step = pace.cost(size / len(launch.group))
  joiners = [
    _Joiner(free + behind * step, need.bit_count(), -1)
    for behind, need in flying.items()
  ]
  for behind, p in waiting:
    known = -1 if behind else (p.need & launch.experts).bit_count()
    eta = lands.get(p.row, pace.now) + behind * step
    joiners.append(_Joiner(eta, p.need.bit_count(), known))
  joiners.sort()
  for eta, experts, known in joiners:
    # As much as chance says, where it is not known.
    shared = known if known >= 0 else experts * size / view.experts
    saved += apart + pace.expert * shared
    size += experts - shared
    if short * saved > max(0.0, eta - free - slack):
      return True
  return False


def _near(
  view: protocols.View, launch: protocols.Launch
) -> tuple[dict[int, int], list[tuple[int, request_lib.Progress]]]:
  """Who is at the group's layer or not far behind, by layers behind it.

  Of those in flight bitmaps of what they use now, where they come to together;
  of those who wait each.
  """
  at, layers, group = launch.layer, len(view.resident), launch.group
  flying: dict[int, int] = {}
  for p in view.flying:
    behind = (at - p.layer - 1) % layers
    if behind <= _NEAR:
      flying[behind] = flying.get(behind, 0) | p.need
  waiting = []
  for p in view.waiting:
    behind = (at - p.layer) % layers
    if behind <= _NEAR and p not in group:
      waiting.append((behind, p))
  return flying, waiting


def _landings(view: protocols.View) -> tuple[dict[int, float], int]:
  """When all is there that rows miss, by row; how many loads that takes.

  Loads come in the order of lag, behind what the link has. Rows that miss
  nothing are left out.
  """
  pace, resident, loading = view.pace, view.resident, view.loading
  late = [p for p in view.waiting if p.need & ~resident[p.layer]]
  late.sort(key=_BY_POSITION)
  lands, count = pace.link_free, sum(map(int.bit_count, filter(None, loading)))
  asked: dict[int, int] = {}
  found: dict[int, float] = {}
  for p in late:
    layer = p.layer
    coming = asked.get(layer, loading[layer])
    away = p.need & ~resident[layer] & ~coming
    asked[layer] = coming | away
    count += away.bit_count()
    lands += away.bit_count() * pace.load
    found[p.row] = lands
  return found, count
