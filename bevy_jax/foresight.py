"""What prefetchers see coming on a routing trace, through the slot table."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from bevy_jax import (
  baselines,
  bounds,
  events,
  figures,
  loads,
  protocols,
  replay,
)
from bevy_jax import guesses as guesses_lib
from bevy_jax import request as request_lib
from bevy_jax import trace as trace_lib
from bevy_jax.offload import prefetch, slot_table


class Seen(NamedTuple):
  """One replay.

  Attributes:
    misses: loads of each step for what its routers revealed.
    figures: see `figures.cache` and `figures.prefetch`, of the measured steps.
  """

  misses: list[int]
  figures: dict[str, Any]


class Still:
  """An executor whose loads land when the replay says so."""

  chunk = hops = 1

  def now(self) -> int:
    """See `Executor`."""
    return 0

  def load(self, key: int, slot: int) -> None:
    """See `Executor`."""

  def launch(self, number: int, batch: protocols.Batch) -> None:
    """See `Executor`."""

  def poll(self) -> list[protocols.Happened]:
    """See `Executor`."""
    return []

  def wait(self) -> None:
    """See `Executor`."""

  def close(self) -> None:
    """See `Executor`."""


def see(
  trace: trace_lib.Trace,
  requests: Sequence[int],
  tokens: range,
  slots: int,
  eviction: protocols.Eviction,
  prefetcher: protocols.Prefetcher,
  *,
  ahead: int = 0,
  warmup: int = 0,
  quota: Sequence[int] = (),
) -> Seen:
  """Replays requests in lockstep order from a cold cache.

  A step is one layer of one token of all requests. Between two steps up to
  `ahead` experts are loaded for what is guessed, all in time; with 0 the
  prefetcher only looks, and the cache is what it is without it. An oracle is
  told the future.

  Args:
    trace: the routing.
    requests: who decodes.
    tokens: which tokens.
    slots: size of the cache, one for all layers.
    eviction: chooses the victims.
    prefetcher: ValueError where it needs a model's routers.
    ahead: prefetches between two steps.
    warmup: tokens before the measured ones.
    quota: see `SlotTable`.
  """
  check(prefetcher)
  path = replay.path(trace, requests, tokens)
  table = slot_table.SlotTable(trace.layers, trace.num_experts, slots, quota)
  log: list[events.Event] = []
  line = loads.Loads(
    table,
    Still(),
    eviction,
    slots,
    len(requests),
    log.append,
    prefetcher,
    trace.experts.shape[3],
  )
  misses, first = [], 0
  for number, step in enumerate(path):
    first = len(log) if number == warmup * trace.layers else first
    if ahead:
      line.prefetch([], ahead, free=True)
      land(line, table)
    _reveal(line, step, _future(path, number, prefetcher.gates))
    misses.append(
      _fill(line, table, step, quota[step.layer] if quota else slots)
    )
    if step.layer == trace.layers - 1:
      line.uses.advance((number + 1) / trace.layers)
  experts = trace.num_experts
  counts = figures.cache(log[first:])
  counts |= figures.prefetch(log, experts, first - 1, len(log), 1)
  return Seen(misses, counts)


def check(prefetcher: protocols.Prefetcher) -> None:
  """ValueError where a trace cannot tell what a prefetcher needs."""
  if isinstance(prefetcher, prefetch.NextGate):
    raise ValueError(
      "prefetch 'next_gate' applies a model's routers to its hidden state, "
      "which a trace does not have; run a model with it, or replay 'oracle' "
      'with its accuracy (oracle:p=0.85).'
    )


def _future(
  path: Sequence[bounds.Step], number: int, depth: int
) -> list[list[tuple[int, ...]]]:
  """For each row the ids of the next `depth` steps, as far as they go."""
  coming = path[number + 1 : number + 1 + depth]
  rows = range(path[number].rows)
  return [[step.routed[row][2] for step in coming] for row in rows]


def _reveal(
  line: loads.Loads, step: bounds.Step, given: list[list[tuple[int, ...]]]
) -> None:
  group = []
  for row, _, chosen in step.routed:
    request = request_lib.Request(number=row, prompt=(0,), new_tokens=1)
    need = sum(1 << e for e in chosen)
    group.append(guesses_lib.Came(request, row, chosen, need))
  line.guesses.reveal(0, step.layer, group, given)
  line.guesses.catch_up()
  rows, chosen_by = [p.row for p in group], [p.choices for p in group]
  line.uses.reveal(step.layer, rows, chosen_by)
  for uses in step.uses:
    for key in sorted(uses):
      line.uses.touch(key, uses[key])


def _fill(
  line: loads.Loads,
  table: slot_table.SlotTable,
  step: bounds.Step,
  slots: int,
) -> int:
  """Loads and reads what a step uses, in waves; how many loads it takes."""
  left, count = 0, 0
  for key in step.keys:
    left |= 1 << key % table.experts
  while left:
    wave = baselines.wave(left, slots)
    count += (wave & ~table.resident[step.layer]).bit_count()
    line.issue([protocols.Want(step.layer, wave)], 1, 'demand')
    land(line, table)
    table.read(step.layer, wave)
    left &= ~wave
  return count


def land(line: loads.Loads, table: slot_table.SlotTable) -> None:
  """All loads in flight land."""
  for layer, loading in enumerate(table.loading):
    for expert in slot_table.bits(loading):
      line.landed(protocols.Landed(0, layer * table.experts + expert))
