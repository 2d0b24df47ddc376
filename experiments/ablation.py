"""Every combination of some axes: replayed on a trace, or run on a model."""

import csv
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bevy_jax import config as config_lib
from bevy_jax import foresight, policies, protocols, replay, spelled
from bevy_jax import trace as trace_lib
from bevy_jax.experiments import configs, run
from bevy_jax.offload import eviction as eviction_lib
from bevy_jax.offload import slot_table

AXES = ('eviction', 'prefetch', 'cache', 'requests', 'capacity')
_MEASURED = (
  'tokens_per_s', 'hit_rate', 'loads', 'demand_loads', 'reloads',
  'prefetch_loads', 'wasted_loads', 'late_prefetches', 'wasted_prefetches',
  'guess_accuracy', 'missing_recall', 'missing_precision', 'stall',
  'link_busy', 'gpu_busy', 'bound_fraction',
)  # fmt: skip
_SEEN = (
  'prefetch_loads', 'wasted_prefetches', 'guess_accuracy', 'missing_recall',
  'missing_precision',
)  # fmt: skip

Row = dict[str, str | int | float]


class Grid(NamedTuple):
  """Which values to combine.

  Attributes:
    evictions: names; 'belady' in replays alone.
    caches: fractions of all experts.
    requests: how many decode together.
    prefetchers: names with their options; 'oracle' in replays alone, where
      'next_gate' is not.
    capacities: 'global' or 'layer', see `EngineConfig`.
  """

  evictions: Sequence[str]
  caches: Sequence[float]
  requests: Sequence[int]
  prefetchers: Sequence[str] = ('none',)
  capacities: Sequence[str] = ('global',)

  def only(self, axes: Sequence[str]) -> 'Grid':
    """The grid with the first value alone of axes that are not named."""
    for axis in axes:
      config_lib.choose('axis', axis, AXES)
    evictions = spelled.whole(self.evictions)
    prefetchers = spelled.whole(self.prefetchers)
    found = Grid(
      evictions if 'eviction' in axes else evictions[:1],
      self.caches if 'cache' in axes else self.caches[:1],
      self.requests if 'requests' in axes else self.requests[:1],
      prefetchers if 'prefetch' in axes else prefetchers[:1],
      self.capacities if 'capacity' in axes else self.capacities[:1],
    )
    if not all(found):
      raise ValueError(f'each of the axes {AXES} needs a value; got {self}.')
    return found


def replayed(
  trace: trace_lib.Trace,
  grid: Grid,
  tokens: range,
  warmup: int,
  ahead: int = 0,
) -> Iterator[Row]:
  """Misses on a trace in lockstep order, requests 0..R-1, a row each.

  Args:
    trace: the routing.
    grid: what to combine.
    tokens: which tokens are decoded, from a cold cache.
    warmup: how many of them come before the measured ones.
    ahead: see `foresight.see`; 'belady' leaves nothing to prefetch and has
      one row alone.
  """
  for name in grid.evictions:
    if name not in ('belady', 'static'):
      policies.eviction(name)
  for name in grid.prefetchers:
    policies.parse_prefetch(name)
  skip = warmup * trace.layers
  for rows, cache, capacity in itertools.product(
    grid.requests, grid.caches, grid.capacities
  ):
    slots, quota = _slots(trace, cache, capacity)
    steps = replay.path(trace, range(rows), tokens)
    uses = sum(len(step.keys) for step in steps[skip:])
    best = sum(
      replay.misses(trace, range(rows), tokens, slots, None, quota)[skip:]
    )
    for name, prefetch in itertools.product(grid.evictions, grid.prefetchers):
      rule = _rule(name, trace, rows)
      if rule is None and prefetch != grid.prefetchers[0]:
        continue
      row: Row = {
        'requests': rows,
        'cache': cache,
        'slots': slots,
        'capacity': capacity,
        'eviction': name,
        'prefetch': prefetch if rule else 'none',
        'uses': uses,
      }
      found, misses = {}, best
      if rule is not None:
        seen = foresight.see(
          trace, range(rows), tokens, slots, rule,
          _prefetcher(prefetch, trace, rows), ahead=ahead, warmup=warmup,
          quota=quota,
        )  # fmt: skip
        found, misses = seen.figures, sum(seen.misses[skip:])
      row['misses'] = misses
      row['miss_rate'] = round(misses / max(1, uses), 4)
      row['to_belady'] = round(misses / max(1, best), 3)
      yield row | {k: round(found.get(k, 0), 4) for k in _SEEN}


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
    others = trace.without(0, rows, "eviction 'static'")
    return eviction_lib.Static(popularity=others.popularity())
  return policies.eviction(name)


def _prefetcher(
  name: str, trace: trace_lib.Trace, rows: int
) -> protocols.Prefetcher:
  found, warm = policies.parse_prefetch(name)
  if warm:
    counts = trace.without(0, rows, f'prefetch {name!r}').counts()
    found = policies.warmed(found, counts)
  return found


def measured(
  base: configs.Decode, grid: Grid, say: Callable[[str], None]
) -> Iterator[Row]:
  """Runs a model once for every combination; figures of its reports."""
  for name in grid.evictions:
    policies.check_eviction(name, base.engine.trace)
  for name in grid.prefetchers:
    policies.check_prefetch(name, base.engine.trace)
  for rows, cache, capacity in itertools.product(
    grid.requests, grid.caches, grid.capacities
  ):
    engine = dataclasses.replace(
      base.engine, requests=rows, cache=cache, capacity=capacity
    )
    bench = run.Bench(dataclasses.replace(base, engine=engine), say)
    for name, prefetch in itertools.product(grid.evictions, grid.prefetchers):
      report = bench.run(engine.scheduler, name, prefetch).report
      row: Row = {
        'requests': rows,
        'cache': cache,
        'slots': bench.llm.slots,
        'capacity': capacity,
        'scheduler': spelled.spell(engine.scheduler),
        'eviction': name,
        'prefetch': prefetch,
        'link': bench.link,
      }
      yield row | {k: round(float(report[k]), 4) for k in _MEASURED}


def summary(rows: Sequence[Row]) -> list[Row]:
  """Each policy's mean over the cells of a replay, against Belady's."""
  cells: dict[tuple[str, str], list[float]] = {}
  for row in rows:
    policy = str(row['eviction']), str(row['prefetch'])
    cells.setdefault(policy, []).append(float(row['to_belady']))
  return [
    {
      'eviction': eviction,
      'prefetch': prefetch,
      'cells': len(ratios),
      'to_belady': round(float(np.mean(ratios)), 4),
    }
    for (eviction, prefetch), ratios in cells.items()
  ]


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


def main_replayed(
  grid: Grid,
  trace: str,
  tokens: str,
  warmup: int,
  ahead: int,
  path: str,
  say: Callable[[str], None],
) -> None:
  """Replays a trace, writes the rows, says the table and its summary.

  Args:
    grid: what to combine.
    trace: the file.
    tokens: 'FIRST:END' of each request.
    warmup: see `replayed`.
    ahead: see `replayed`.
    path: of the CSV; '' for ablation.csv.
    say: prints.
  """
  first, end = (int(token) for token in tokens.split(':'))
  span = range(first, end)
  rows = list(replayed(trace_lib.load(trace), grid, span, warmup, ahead))
  _show(rows, path, [rows, summary(rows)], say)


def main_measured(
  base: configs.Decode, grid: Grid, path: str, say: Callable[[str], None]
) -> None:
  """Runs a model, writes the rows, says the table; see `main_replayed`."""
  rows = list(measured(base, grid, say))
  _show(rows, path, [rows], say)


def _show(
  rows: Sequence[Row],
  path: str,
  tables: Sequence[Sequence[Row]],
  say: Callable[[str], None],
) -> None:
  path = path or 'ablation.csv'
  save(path, rows)
  for shown in tables:
    say(table(shown))
  say(f'rows: {path}')


def save(path: str, rows: Sequence[Row]) -> None:
  """Writes rows as CSV."""
  with open(path, 'w', encoding='utf-8', newline='') as file:
    writer = csv.DictWriter(file, list(rows[0]), lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
