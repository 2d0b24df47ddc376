"""Every combination of some axes: replayed on a trace, or run on a model."""

import csv
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bevy_jax import config as config_lib
from bevy_jax import replay
from bevy_jax import trace as trace_lib
from bevy_jax.experiments import configs, run
from bevy_jax.offload import eviction as eviction_lib
from bevy_jax.offload import slot_table

AXES = ('eviction', 'cache', 'requests', 'capacity')
_MEASURED = (
  'tokens_per_s', 'hit_rate', 'loads', 'wasted_loads', 'stall', 'link_busy',
  'gpu_busy', 'bound_fraction',
)  # fmt: skip

Row = dict[str, str | int | float]


class Grid(NamedTuple):
  """Which values to combine.

  Attributes:
    evictions: names; 'belady' in replays alone.
    caches: fractions of all experts.
    requests: how many decode together.
    capacities: 'global' or 'layer', see `EngineConfig`.
  """

  evictions: Sequence[str]
  caches: Sequence[float]
  requests: Sequence[int]
  capacities: Sequence[str] = ('global',)

  def only(self, axes: Sequence[str]) -> 'Grid':
    """The grid with the first value alone of axes that are not named."""
    for axis in axes:
      config_lib.choose('axis', axis, AXES)
    found = Grid(
      self.evictions if 'eviction' in axes else self.evictions[:1],
      self.caches if 'cache' in axes else self.caches[:1],
      self.requests if 'requests' in axes else self.requests[:1],
      self.capacities if 'capacity' in axes else self.capacities[:1],
    )
    if not all(found):
      raise ValueError(f'each of the axes {AXES} needs a value; got {self}.')
    return found


def replayed(
  trace: trace_lib.Trace, grid: Grid, tokens: range, warmup: int
) -> Iterator[Row]:
  """Misses on a trace in lockstep order, requests 0..R-1, a row each.

  Args:
    trace: the routing.
    grid: what to combine.
    tokens: which tokens are decoded, from a cold cache.
    warmup: how many of them come before the measured ones.
  """
  for name in grid.evictions:
    config_lib.choose('eviction', name, [*config_lib.names(), 'belady'])
  skip = warmup * trace.layers
  for rows, cache, capacity in itertools.product(
    grid.requests, grid.caches, grid.capacities
  ):
    slots, quota = _slots(trace, cache, capacity)
    steps = replay.path(trace, range(rows), tokens)
    uses = sum(len(step.keys) for step in steps[skip:])
    misses = {
      name: sum(
        replay.misses(
          trace, range(rows), tokens, slots, _rule(name, trace, rows), quota
        )[skip:]
      )
      for name in dict.fromkeys([*grid.evictions, 'belady'])
    }
    for name in grid.evictions:
      yield {
        'requests': rows,
        'cache': cache,
        'slots': slots,
        'capacity': capacity,
        'eviction': name,
        'uses': uses,
        'misses': misses[name],
        'miss_rate': round(misses[name] / max(1, uses), 4),
        'to_belady': round(misses[name] / max(1, misses['belady']), 3),
      }


def _slots(
  trace: trace_lib.Trace, cache: float, capacity: str
) -> tuple[int, tuple[int, ...]]:
  """Slots and quota; ValueError where a token's experts would not fit."""
  config_lib.choose('capacity', capacity, config_lib.CAPACITIES)
  pairs, parts = trace.layers * trace.num_experts, 1
  if capacity == 'layer':
    parts = trace.layers
  slots, top_k = int(cache * pairs), trace.experts.shape[3]
  if slots < parts * top_k:
    raise ValueError(
      f'cache {cache} is {slots} slots of {pairs}, but with capacity '
      f'{capacity!r} at least {parts * top_k} are needed: a token uses '
      f'{top_k} experts of a layer at once.'
    )
  return slots, slot_table.split(slots, parts) if parts > 1 else ()


def _rule(
  name: str, trace: trace_lib.Trace, rows: int
) -> eviction_lib.Eviction | None:
  if name == 'belady':
    return None
  if name == 'static':
    # Popularity of requests that do not decode here: a trace's own routing
    # would tell the future.
    other = dataclasses.replace(
      trace, experts=trace.experts[rows:], lengths=trace.lengths[rows:]
    )
    if not len(other.lengths):
      raise ValueError(
        f"eviction 'static' needs requests beside the {rows} that decode, "
        'and the trace has no more.'
      )
    return eviction_lib.Static(popularity=other.popularity())
  return config_lib.EVICTIONS[name]


def measured(
  base: configs.Decode, grid: Grid, say: Callable[[str], None]
) -> Iterator[Row]:
  """Runs a model once for every combination; figures of its reports."""
  for name in grid.evictions:
    config_lib.check_eviction(name, base.engine.trace)
  for rows, cache, capacity in itertools.product(
    grid.requests, grid.caches, grid.capacities
  ):
    engine = dataclasses.replace(
      base.engine, requests=rows, cache=cache, capacity=capacity
    )
    bench = run.Bench(dataclasses.replace(base, engine=engine), say)
    for name in grid.evictions:
      report = bench.run(engine.scheduler, name).report
      row: Row = {
        'requests': rows,
        'cache': cache,
        'slots': bench.llm.slots,
        'capacity': capacity,
        'scheduler': engine.scheduler,
        'eviction': name,
        'link': bench.link,
      }
      yield row | {k: round(float(report[k]), 4) for k in _MEASURED}


def summary(rows: Sequence[Row]) -> list[Row]:
  """Each eviction's mean over the cells of a replay, against Belady's."""
  found = []
  for name in dict.fromkeys(row['eviction'] for row in rows):
    ratios = [float(r['to_belady']) for r in rows if r['eviction'] == name]
    mean = round(float(np.mean(ratios)), 4)
    found.append({'eviction': name, 'cells': len(ratios), 'to_belady': mean})
  return found


def table(rows: Sequence[Mapping[str, object]]) -> str:
  """Rows as text, columns aligned, names first."""
  if not rows:
    return ''
  cells = [list(rows[0]), *([str(v) for v in row.values()] for row in rows)]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  return '\n'.join(
    '  '.join(c.rjust(w) for c, w in zip(line, widths, strict=True))
    for line in cells
  )


def save(path: str, rows: Sequence[Row]) -> None:
  """Writes rows as CSV."""
  with open(path, 'w', encoding='utf-8', newline='') as file:
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
