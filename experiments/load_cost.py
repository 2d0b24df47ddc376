"""Host time of a load's bookkeeping, on an executor that moves nothing."""

import statistics
import time
from typing import NamedTuple

import numpy as np

from bevy_jax import events, loads, protocols
from bevy_jax.offload import eviction, slot_table


class _Nothing:
  """An executor that moves nothing, so that only bookkeeping is timed."""

  chunk = 1

  def now(self) -> int:
    return time.perf_counter_ns()

  def load(self, key: int, slot: int) -> None:
    pass

  def launch(self, number: int, batch: protocols.Batch) -> None:
    pass

  def poll(self) -> list[protocols.Landed | protocols.Failed | protocols.Ended]:
    return []

  def wait(self) -> None:
    pass

  def close(self) -> None:
    pass


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


def best(rule: eviction.Eviction, shape: Shape, rounds: int) -> Cost:
  """The least of several rounds: others on the machine only ever add."""
  found = [measure(rule, shape) for _ in range(rounds)]
  return Cost(*(min(values) for values in zip(*found, strict=True)))


def measure(rule: eviction.Eviction, shape: Shape) -> Cost:
  """Plays lockstep with random routing, an executor that does nothing."""
  layers, experts, top_k, rows, slots, passes = shape
  rng = np.random.default_rng(0)
  table = slot_table.SlotTable(layers, experts, slots)
  watch, log = _Timed(rule), list[events.Event]()
  line = loads.Loads(table, _Nothing(), watch, 4, rows, log.append)
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
    full = not table.free
    # One at a time: what all loads of an issue share is paid by each.
    ask = [protocols.Want(layer, 1 << expert), *wants]
    begun = time.perf_counter_ns()
    line.issue(ask, 1, 'demand')
    line.landed(protocols.Landed(begun, layer * table.experts + expert))
    if full:
      spent.append(time.perf_counter_ns() - begun)
  return spent
