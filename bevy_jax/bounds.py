"""What the same routing would have cost at best, and under lockstep.

All is told on steps: the run's routing in lockstep order, whatever order it
ran in. Steps start from a cold cache at the first decode step; a run's
prompts may have warmed its cache, which the warm-up tokens even out.

What each bound assumes, and when a schedule may be faster:

- Belady's misses times the load time: the future is known, and requests go in
  lockstep order. Requests that go in another order may need fewer loads (2-3 %
  were seen), since some of them use an expert while it is there.
- Full-batch device time: every step is one launch of all requests. Nothing
  that launches less at once is faster, except by waves or the launch of
  several layers, which have costs of their own.
- Headroom: lockstep with an eviction that can be run and a prefetcher that
  cannot, see `headroom`. A better eviction beats it, and so does an order
  that needs fewer loads with the same one; overlap alone does not.
"""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bevy_jax import baselines, busy, events
from bevy_jax.offload import eviction as eviction_lib
from bevy_jax.offload import slot_table
from bevy_jax.offload import uses as uses_lib


class Step(NamedTuple):
  """One layer of one pass of the whole batch.

  Attributes:
    layer: the MoE layer.
    uses: how many requests use each key; requests that have just entered
      come apart, after those that were there before them.
    rows: requests in the step.
    routed: (row, whether it is new, expert ids) of each of them, in order of
      rows; empty where nobody asks who used what.
    share: part of them whose choices were revealed in the measured window.
  """

  layer: int
  uses: tuple[dict[int, int], ...]
  rows: int
  share: float = 1.0
  routed: tuple[tuple[int, bool, tuple[int, ...]], ...] = ()

  @property
  def keys(self) -> list[int]:
    """The distinct keys, ascending."""
    return sorted(set().union(*self.uses))


class Cost(NamedTuple):
  """Seconds of a launch: base + expert * distinct experts + row * rows.

  Where launches may cross several layers, of one layer of them.
  """

  base: float
  expert: float
  row: float

  def seconds(self, distinct: int, rows: int) -> float:
    """Of one launch."""
    return self.base + self.expert * distinct + self.row * rows


def steps(
  log: Sequence[events.Event], experts: int, first: int, last: int
) -> list[Step]:
  """The decode routing of a log in lockstep order.

  Args:
    log: all events.
    experts: experts of a layer.
    first: index in the log after which the measured window counts uses.
    last: index before which it does.
  """
  found: dict[tuple[int, int], list[tuple[int, events.Routed]]] = {}
  present: set[int] = set()
  rows: dict[int, int] = {}
  pack = 0
  for i, event in enumerate(log):
    if isinstance(event, events.Admitted):
      # Positions start again at 0 when a new pack finds all rows empty.
      pack += not present
      present.add(event.request)
      rows[event.request] = event.row
    elif isinstance(event, events.Finished):
      present.discard(event.request)
    elif isinstance(event, events.Routed):
      found.setdefault((pack, event.position), []).append((i, event))
  return [
    _step([e for _, e in held], rows, experts)._replace(
      share=sum(first < i < last for i, _ in held) / len(held)
    )
    for _, held in sorted(found.items())
  ]


def _step(
  held: list[events.Routed], rows: dict[int, int], experts: int
) -> Step:
  layer = held[0].layer
  before: dict[int, int] = {}
  entered: dict[int, int] = {}
  routed = []
  for event in held:
    new = layer == 0 and event.token == 0
    uses = entered if new else before
    for expert in event.experts:
      key = layer * experts + expert
      uses[key] = uses.get(key, 0) + 1
    routed.append((rows.get(event.request, -1), new, event.experts))
  groups = tuple(uses for uses in (before, entered) if uses)
  return Step(layer, groups, len(held), routed=tuple(routed))


def inside(path: Sequence[Step], amounts: Sequence[float]) -> float:
  """What the measured window has of one amount a step."""
  return sum(s.share * a for s, a in zip(path, amounts, strict=True))


def belady_misses(
  path: Sequence[Step], slots: int, quota: Sequence[int] = ()
) -> list[int]:
  """Misses of each step if the future were known, from a cold cache.

  The victim is the expert whose next use is farthest, never one of the
  step's own. Where a step needs more than the cache holds, everything that
  is not resident misses, and those with the nearest next use stay. With a
  quota each layer is a cache of its own.
  """
  if not quota:
    return _belady_misses(path, slots)
  misses = [0] * len(path)
  for layer, count in enumerate(quota):
    own = [i for i, step in enumerate(path) if step.layer == layer]
    found = _belady_misses([path[i] for i in own], count)
    for i, each in zip(own, found, strict=True):
      misses[i] = each
  return misses


def _belady_misses(path: Sequence[Step], slots: int) -> list[int]:
  following = _following(path)
  resident: dict[int, int] = {}
  heap: list[tuple[int, int]] = []
  misses = []
  for step, upcoming in zip(path, following, strict=True):
    new = [key for key in step.keys if key not in resident]
    misses.append(len(new))
    if len(upcoming) > slots:
      resident, heap = {}, []
      nearest = sorted(upcoming, key=lambda k: (upcoming[k], k))
      upcoming = {key: upcoming[key] for key in nearest[:slots]}
      new = []
    while len(resident) + len(new) > slots:
      after, key = heapq.heappop(heap)
      # An entry is stale where the key was used, or given up, since then. The
      # step's own keys are used now, nearer than all others: never popped.
      if resident.get(key) == -after:
        del resident[key]
    for key, after in upcoming.items():
      resident[key] = after
      heapq.heappush(heap, (-after, key))
  return misses


def _following(path: Sequence[Step]) -> list[dict[int, int]]:
  """For each step the next step that uses each of its keys, or the end."""
  seen: dict[int, int] = {}
  found = []
  for i in range(len(path) - 1, -1, -1):
    keys = path[i].keys
    found.append({key: seen.get(key, len(path)) for key in keys})
    seen.update(dict.fromkeys(keys, i))
  return found[::-1]


def lockstep_misses(
  path: Sequence[Step],
  *,
  layers: int,
  experts: int,
  slots: int,
  rows: int,
  eviction: eviction_lib.Eviction,
  quota: Sequence[int] = (),
) -> list[int]:
  """Loads of each step when the engine runs `Lockstep`, from a cold cache.

  Args:
    path: the steps.
    layers: MoE layers.
    experts: experts of a layer.
    slots: size of the cache.
    rows: R, rows of the engine, which its clock of uses divides by.
    eviction: chooses the victims.
    quota: slots that each layer may fill; empty for one pool.
  """
  table = slot_table.SlotTable(layers, experts, slots, quota)
  uses = uses_lib.Uses(layers, experts, rows, eviction.estimates)
  tokens = 0
  misses = []
  for step in path:
    _reveal(uses, step, rows)
    for group in step.uses:
      for key in sorted(group):
        uses.touch(key, group[key])
    left, loads = 0, 0
    for key in step.keys:
      left |= 1 << key % experts
    while left:
      room = quota[step.layer] if quota else slots
      wave = baselines.wave(left, room)
      loads += _fill(table, step.layer, wave, eviction, uses)
      left &= ~wave
    misses.append(loads)
    for _ in range(step.rows if step.layer == layers - 1 else 0):
      tokens += 1
      uses.advance(tokens / rows)
  return misses


def headroom(loads: Sequence[float], device: Sequence[float]) -> float:
  """What lockstep would take if a perfect prefetcher went with it.

  The link works ahead without limit, never idle and never wrong: step i
  begins when step i - 1 has ended and all loads up to its own have landed.
  It makes the loads that lockstep makes on demand with the same eviction;
  the room that a load far ahead needs is not counted, nor is the host's work,
  and nothing is on its way when the first step begins. So no prefetcher in
  lockstep with that eviction is faster, unless its loads push out something
  better than the eviction would have.

  Args:
    loads: what each step's loads take on the link.
    device: what its launch takes; the same unit as the result.
  """
  link = end = 0.0
  for load, launch in zip(loads, device, strict=True):
    link += load
    end = max(end, link) + launch
  return end


def _reveal(uses: uses_lib.Uses, step: Step, rows: int) -> None:
  """Tells who uses what; at a pass's first layer also who has gone."""
  if not step.routed:
    return
  if step.layer == 0:
    stay = {row for row, new, _ in step.routed if not new}
    for row in range(rows):
      if row not in stay:
        uses.leave(row)
  uses.reveal(
    step.layer,
    [row for row, _, _ in step.routed],
    [chosen for _, _, chosen in step.routed],
  )


def _fill(
  table: slot_table.SlotTable,
  layer: int,
  wave: int,
  eviction: eviction_lib.Eviction,
  uses: uses_lib.Uses,
) -> int:
  """Makes a wave resident; returns how many loads that takes."""
  missing = list(slot_table.bits(wave & ~table.resident[layer]))
  barred = table.barring([(layer, wave)])
  for expert in missing:
    if not table.room(layer):
      victim = eviction.victim(table.within(layer, barred), uses)
      table.evict(victim)
    key = layer * table.experts + expert
    table.begin_load(key)
    uses.load(key)
    table.finish_load(key)
  return len(missing)


def fit(ran: Iterable[busy.Ran]) -> Cost:
  """Least squares, no cost below 0, over the decode launches that finish.

  Of explanations that fit equally well the one with fewest terms is taken:
  where all launches have the same rows, rows cost nothing of their own. Of a
  launch that may cross several layers it takes the mean layer.
  """
  samples = [
    (
      1.0,
      (len(r.event.experts) + r.more) / r.event.hops,
      len(r.event.requests),
      (r.end - r.begin) * 1e-9 / r.event.hops,
    )
    for r in ran
    if r.event.kind == 'decode' and r.event.finish
  ]
  best = Cost(0.0, 0.0, 0.0)
  if not samples:
    return best
  table = np.array(samples)
  terms, wanted = table[:, :3], table[:, 3]
  scale = float(wanted @ wanted)
  least = scale
  # With three unknowns, trying every set of terms is the active-set method.
  for size in (1, 2, 3):
    for chosen in itertools.combinations(range(3), size):
      columns = terms[:, chosen]
      solution = np.linalg.lstsq(columns, wanted, rcond=None)[0]
      error = columns @ solution - wanted
      loss = float(error @ error)
      if min(solution) >= 0 and loss < least - 1e-12 * scale:
        costs = [0.0, 0.0, 0.0]
        for term, value in zip(chosen, solution, strict=True):
          costs[term] = float(value)
        best, least = Cost(*costs), loss
  return best
