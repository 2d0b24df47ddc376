"""Whether a ready group should wait for requests that could join it.

Launching at once reveals what is needed next, which keeps the link busy;
launching together saves what a launch costs by itself and the experts that
are read twice. Which of them counts depends on what is short.
"""

import operator
from typing import NamedTuple

from bevy_jax import protocols

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
  free = pace.device_free
  joiners = _joiners(view, launch, free)
  if not joiners:
    return False
  size = float(launch.experts.bit_count())
  cost, slack = pace.cost(size), 0.0
  if pace.loads:
    slack = max(0.0, _backlog(view) - cost - pace.device / pace.loads)
  saved = -_REVEALED * min(pace.load * pace.loads, cost)
  apart = pace.fixed
  if launch.layer == len(view.resident) - 1:
    apart += pace.head
  for eta, experts, known in sorted(joiners):
    # As much as chance says, where it is not known.
    shared = known if known >= 0 else experts * size / view.experts
    saved += apart + pace.expert * shared
    size += experts - shared
    if short * saved > max(0.0, eta - free - slack):
      return True
  return False


def _backlog(view: protocols.View) -> float:
  """Link time of all that is on the link, or awaited and not there."""
  # Few layers have any: what is loading is not resident.
  away = {layer: bitmap for layer, bitmap in enumerate(view.loading) if bitmap}
  resident = view.resident
  for p in view.waiting:
    if missing := p.need & ~resident[p.layer]:
      away[p.layer] = away.get(p.layer, 0) | missing
  count = sum([bitmap.bit_count() for bitmap in away.values()])
  return count * view.pace.load


def _joiners(
  view: protocols.View, launch: protocols.Launch, free: float
) -> list[_Joiner]:
  """Who is at the group's layer or not far behind, if all goes well.

  `free` is when the device will have done what it has.
  """
  at, layers, group = launch.layer, len(view.resident), launch.group
  flying: dict[int, int] = {}
  for p in view.flying:
    if (at - p.layer - 1) % layers <= _NEAR:
      flying[p.layer] = flying.get(p.layer, 0) | p.need
  waiting = [
    p
    for p in view.waiting
    if (at - p.layer) % layers <= _NEAR and p not in group
  ]
  if not flying and not waiting:
    return []
  step = view.pace.cost(launch.experts.bit_count() / len(group))
  found = [
    _Joiner(free + (at - layer - 1) % layers * step, need.bit_count(), -1)
    for layer, need in flying.items()
  ]
  lands = _landings(view) if waiting else {}
  for p in waiting:
    behind = (at - p.layer) % layers
    eta = lands.get(p.row, view.pace.now) + behind * step
    shared = -1 if behind else (p.need & launch.experts).bit_count()
    found.append(_Joiner(eta, p.need.bit_count(), shared))
  return found


def _landings(view: protocols.View) -> dict[int, float]:
  """When all is there that a row misses; without the rows that miss nothing.

  Loads come in the order of lag, behind what the link has.
  """
  pace, resident = view.pace, view.resident
  lands, asked = pace.link_free, list(view.loading)
  found: dict[int, float] = {}
  for p in sorted(view.waiting, key=_BY_POSITION):
    if missing := p.need & ~resident[p.layer]:
      away = missing & ~asked[p.layer]
      asked[p.layer] |= away
      lands += away.bit_count() * pace.load
      found[p.row] = lands
  return found
