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
from bevy_jax.experiments import configs, executors, outcome, run, sweep
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

_REPLAYED = (
  'requests', 'cache', 'slots', 'capacity', 'eviction', 'prefetch', 'uses',
  'misses', 'miss_rate', 'to_belady', *_SEEN,
)  # fmt: skip
_RAN = (
  'requests', 'cache', 'slots', 'capacity', 'scheduler', 'eviction', 'prefetch',
  'link', *_MEASURED,
)  # fmt: skip
Row = sweep.Row
_FORM = sweep.Form(
  (), ('requests', 'cache', 'capacity'),
  ('capacity', 'scheduler', 'eviction', 'prefetch', 'link'),
)  # fmt: skip


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

  @classmethod
  def read(
    cls,
    evictions: Sequence[str],
    caches: Sequence[str],
    requests: Sequence[str],
    *others: Sequence[str],
  ) -> 'Grid':
    """A grid of values as a command line has them, in the fields' order."""
    sizes, rows = list(map(float, caches)), list(map(int, requests))
    return cls(evictions, sizes, rows, *others)

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
  _check_replayed(grid)
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
  _check_measured(base, grid)
  for rows, cache, capacity in itertools.product(
    grid.requests, grid.caches, grid.capacities
  ):
    engine = dataclasses.replace(
      base.engine, requests=rows, cache=cache, capacity=capacity
    )
    bench = run.Bench(dataclasses.replace(base, engine=engine), say)
    for name, prefetch in itertools.product(grid.evictions, grid.prefetchers):
      done = bench.run(engine.scheduler, name, prefetch)
      if done.interrupted:
        raise KeyboardInterrupt
      report = done.report
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


def _check_replayed(grid: Grid) -> None:
  for name in grid.evictions:
    if name not in ('belady', 'static'):
      policies.eviction(name)
  for name in grid.prefetchers:
    policies.parse_prefetch(name)


def _check_measured(base: configs.Decode, grid: Grid) -> None:
  for name in grid.evictions:
    policies.check_eviction(name, base.engine.trace)
  for name in grid.prefetchers:
    policies.check_prefetch(name, base.engine.trace)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablation:
  """What to combine, and what runs it.

  Attributes:
    grid: the values.
    base: how a model runs; not looked at where a trace is replayed.
    trace: the routing trace to replay, empty for runs of a model.
    tokens: which tokens of the trace are decoded.
    warmup: see `replayed`.
    ahead: see `replayed`.
  """

  grid: Grid
  base: configs.Decode
  trace: str = ''
  tokens: tuple[int, int] = (64, 160)
  warmup: int = 32
  ahead: int = 0

  def __post_init__(self) -> None:
    for name in self.grid.capacities:
      config_lib.choose('capacity', name, config_lib.CAPACITIES)
    if self.trace:
      _check_replayed(self.grid)
    else:
      _check_measured(self.base, self.grid)


def on_device(asked: object) -> bool:
  """Whether a sweep, of whatever kind, runs a model."""
  return isinstance(asked, Ablation) and not asked.trace


def span(text: str) -> tuple[int, int]:
  """'64:160' as numbers; ValueError where it is no such range."""
  try:
    first, end = map(int, text.split(':'))
  except ValueError as error:
    raise ValueError(f'{text!r} is no range; write FIRST:END.') from error
  return first, end


def main(asked: Ablation, how: sweep.How) -> outcome.Outcome:
  """Runs every combination, writes the CSV; the tables are shown.

  Raises:
    ValueError: a name is not known, or a model is to run on other machines.
  """
  local = isinstance(how.executor, executors.Local)
  if not asked.trace:
    if not local:
      raise ValueError(
        'a model runs on the device of this machine; give --trace=FILE to '
        'replay one elsewhere, or leave --executor=ray out.'
      )
    how = how._replace(executor=executors.Local(1))
  grid = asked.grid
  tasks = []
  for place in itertools.product(grid.requests, grid.caches, grid.capacities):
    rows, cache, capacity = place
    cell = grid._replace(requests=[rows], caches=[cache], capacities=[capacity])
    where = _FORM.where(dict(zip(_FORM.place, place, strict=True)))
    name = f'{rows} requests, cache {cache}, {capacity}'
    tasks.append(sweep.Task((asked, cell), where, name, 4 + rows))
  form = _FORM._replace(columns=_REPLAYED if asked.trace else _RAN)
  found = sweep.run(tasks, run_cell, form, how)
  tables = (found, summary(found)) if asked.trace else (found,)
  how.say(f'rows: {how.path}')
  shown = '\n\n'.join(map(table, tables))
  return outcome.Outcome({'rows': found}, (shown,))


def run_cell(
  asked: Ablation, grid: Grid, known: Sequence[Row] = ()
) -> list[Row]:
  """The rows of one cell; nothing where they are known."""
  if known:
    return []
  if not asked.trace:
    return list(measured(asked.base, grid, print))
  trace, span = trace_lib.load(asked.trace), range(*asked.tokens)
  return list(replayed(trace, grid, span, asked.warmup, asked.ahead))


def save(path: str, rows: Sequence[Row]) -> None:
  """Writes rows as CSV."""
  with open(path, 'w', encoding='utf-8', newline='') as file:
    writer = csv.DictWriter(file, list(rows[0]), lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
