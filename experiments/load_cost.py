"""Host time of loads and of guesses, on an executor that moves nothing."""

import statistics
import time
from typing import NamedTuple

import numpy as np

from bevy_jax import events, foresight, loads, protocols
from bevy_jax import guesses as guesses_lib
from bevy_jax import request as request_lib
from bevy_jax.offload import eviction, prefetch, slot_table


class _Timed:
  """An eviction with a watch.

  Attributes:
    spent: nanoseconds of each choice.
  """

  def __init__(self, rule: eviction.Eviction):
    self.rule, self.estimates, self.spent = rule, rule.estimates, list[int]()

  def victim(self, barred: eviction.Array, uses: eviction.Uses) -> int:
    """See `Eviction`."""
    begun = time.perf_counter_ns()
    found = self.rule.victim(barred, uses)
    self.spent.append(time.perf_counter_ns() - begun)
    return found


class Shape(NamedTuple):
  """What is decoded; see `Cost`."""

  layers: int
  experts: int
  top_k: int
  rows: int
  slots: int
  passes: int
  quota: tuple[int, ...] = ()


class Cost(NamedTuple):
  """Medians in microseconds of host time.

  Attributes:
    victim: choosing who gives up its slot.
    load: all of a load that is issued alone into a full cache and lands:
      protecting what is awaited, victim, table, log.
    first: the same for the first load after a reveal, which finds nothing
      remembered of what is awaited and of what will be used next.
    reveal: telling which experts each row uses at its new layer.
  """

  victim: float
  load: float
  first: float
  reveal: float


def rounded(cost: NamedTuple) -> dict[str, float]:
  """A cost for a table, in tenths of a microsecond."""
  return {name: round(us, 1) for name, us in cost._asdict().items()}


def best(rule: eviction.Eviction, shape: Shape, rounds: int) -> Cost:
  """The least of several rounds: others on the machine only ever add."""
  found = [measure(rule, shape) for _ in range(rounds)]
  return Cost(*(min(values) for values in zip(*found, strict=True)))


def measure(rule: eviction.Eviction, shape: Shape) -> Cost:
  """Plays lockstep with random routing, an executor that does nothing."""
  layers, experts, top_k, rows, slots, passes, quota = shape
  rng = np.random.default_rng(0)
  table = slot_table.SlotTable(layers, experts, slots, quota)
  watch, log = _Timed(rule), list[events.Event]()
  line = loads.Loads(table, foresight.Still(), watch, 4, rows, log.append)
  load, first, reveal = list[int](), list[int](), list[int]()
  heat = 1 / np.arange(1, experts + 1) ** 0.5
  for _ in range(passes):
    for layer in range(layers):
      scores = heat * rng.exponential(size=(rows, experts))
      chosen = np.argsort(-scores, 1)[:, :top_k].tolist()
      begun = time.perf_counter_ns()
      line.uses.reveal(layer, range(rows), chosen)
      reveal.append(time.perf_counter_ns() - begun)
      spent = _step(line, table, layer, chosen)
      load += spent
      first += spent[:1]
  found = watch.spent, load, first, reveal
  return Cost(*(statistics.median(ns or [0]) / 1e3 for ns in found))


def _step(
  line: loads.Loads,
  table: slot_table.SlotTable,
  layer: int,
  chosen: list[list[int]],
) -> list[int]:
  """Loads what a layer misses; nanoseconds of those that needed a victim."""
  wants = [protocols.Want(layer, sum(1 << e for e in c)) for c in chosen]
  union = sorted({e for c in chosen for e in c})
  for expert in union:
    line.uses.touch(layer * table.experts + expert)
  spent = []
  for expert in union:
    if table.resident[layer] >> expert & 1:
      continue
    full = not table.room(layer)
    # One at a time: what all loads of an issue share is paid by each.
    ask = [protocols.Want(layer, 1 << expert), *wants]
    begun = time.perf_counter_ns()
    line.issue(ask, 1, 'demand')
    line.landed(protocols.Landed(begun, layer * table.experts + expert))
    if full:
      spent.append(time.perf_counter_ns() - begun)
  return spent


class Sight(NamedTuple):
  """Medians in microseconds of host time that prefetching adds.

  Attributes:
    guess: what all rows will use next, by the prefetcher alone.
    reveal: all that is done when all rows come to a layer: judging what was
      guessed of it, learning, guessing, keeping.
    look: finding what to prefetch and beginning up to two loads.
  """

  guess: float
  reveal: float
  look: float


class _Watched:
  """A prefetcher with a watch; see `Prefetcher`.

  Attributes:
    spent: nanoseconds of each guess.
  """

  def __init__(self, rule: prefetch.Prefetcher):
    self.spent = list[int]()
    self._rule = rule
    self.depth, self.confidence = rule.depth, rule.confidence
    self.guarded, self.keeps = rule.guarded, rule.keeps
    self.gates, self.start = rule.gates, rule.start

  def guess(
    self, patterns: prefetch.Patterns, layer: int, streams: prefetch.Ids
  ) -> prefetch.Guess:
    """See `Prefetcher`."""
    begun = time.perf_counter_ns()
    found = self._rule.guess(patterns, layer, streams)
    self.spent.append(time.perf_counter_ns() - begun)
    return found


def sight(rule: prefetch.Prefetcher, shape: Shape, rounds: int) -> Sight:
  """The least of several rounds of lockstep with random routing."""
  found = [_sight(rule, shape) for _ in range(rounds)]
  return Sight(*(min(values) for values in zip(*found, strict=True)))


def _sight(rule: prefetch.Prefetcher, shape: Shape) -> Sight:
  layers, experts, top_k, rows, slots, passes = shape[:6]
  rng, watch = np.random.default_rng(0), _Watched(rule)
  table = slot_table.SlotTable(layers, experts, slots)
  log = list[events.Event]()
  line = loads.Loads(
    table, foresight.Still(), eviction.LfuDecayed(), slots, rows, log.append,
    watch, top_k,
  )  # fmt: skip
  heat = 1 / np.arange(1, experts + 1) ** 0.5
  size = (passes * layers + rule.gates, rows, experts)
  scores = -heat * rng.exponential(size=size)
  chosen = np.argsort(scores, -1)[..., :top_k].tolist()
  requests = [
    request_lib.Request(number=row, prompt=(0,), new_tokens=1)
    for row in range(rows)
  ]
  reveal, look = list[int](), list[int]()
  for step in range(passes * layers):
    layer = step % layers
    group = []
    for row, request in enumerate(requests):
      ids = tuple(chosen[step][row])
      need = sum(1 << e for e in ids)
      group.append(guesses_lib.Came(request, row, ids, need))
    coming = chosen[step + 1 : step + 1 + rule.gates]
    given = [[ids[row] for ids in coming] for row in range(rows)]
    begun = time.perf_counter_ns()
    line.guesses.reveal(0, layer, group, given)
    reveal.append(time.perf_counter_ns() - begun)
    wants = [protocols.Want(layer, p.need) for p in group]
    line.issue(wants, rows, 'demand')
    foresight.land(line, table)
    begun = time.perf_counter_ns()
    line.prefetch(wants)
    look.append(time.perf_counter_ns() - begun)
    foresight.land(line, table)
  half = len(reveal) // 2  # By then the cache has filled.
  found = watch.spent, reveal, look
  return Sight(*(statistics.median(ns[half:]) / 1e3 for ns in found))
