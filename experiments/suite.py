"""A suite of the benchmark's cells: turn by turn, row by row, going on."""

import datetime
import itertools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bevy_jax import config as config_lib
from bevy_jax.experiments import (
  bench_models,
  cell_run,
  cells,
  configs,
  pairs,
  run,
)

Row = dict[str, Any]
Variant = tuple[str, str, str]
_BOUNDED = 3  # Turns whose bounds are computed: they cost more than the run.
# Of a report, by median over the turns.
_KEPT = (
  'tokens_per_s', 'decode_seconds', 'memory_floor_tokens_per_s',
  'link_floor_tokens_per_s', 'memory_floor_s', 'link_floor_s', 'of_the_floor',
  'overlap_efficiency', 'useful_efficiency', 'bound_fraction', 'hit_rate',
  'loads', 'load_bytes', 'prefetch_loads', 'link_busy', 'gpu_busy', 'stall',
  'launches', 'mean_group', 'mean_hops', 'max_lag', 'distinct_a_pass',
)  # fmt: skip


class Suite:
  """Runs cells one after the other and keeps a row of each in a file.

  Attributes:
    rows: those of the file, and those measured since.
  """

  def __init__(
    self,
    suite: cells.Suite,
    options: cell_run.Options,
    path: pathlib.Path | str = '',
    limit_s: float = 0.0,
    say: Callable[[str], None] = print,
    progress: Callable[[int, int], None] = lambda done, whole: None,
  ):
    self._suite, self._options, self._say = suite, options, say
    self._path = pathlib.Path(path) if path else None
    self._progress = progress
    self._end = time.monotonic() + limit_s if limit_s else float('inf')
    self.rows = load(self._path)

  def run(self) -> bool:
    """Measures the cells that no row has; False where time ran out."""
    todo = [c for c in self._suite.cells if not self._done(c)]
    groups = itertools.groupby(todo, key=lambda c: c[:2])
    for (shape, form), same in groups:
      if self._late():
        return False
      some = list(same)
      made = self._make(shape, form)
      for _, few in itertools.groupby(some, key=lambda c: (c[2], c[4])):
        if self._late() or not self._machine(made, list(few)):
          return False
      made.model.experts.close()
      del made
    return True

  def _make(self, shape: str, form: str) -> bench_models.Made:
    options = self._options
    made = bench_models.make(
      shape, form, options.link,
      dtype=self._dtype(), seed=options.seed, threads=options.threads,
      progress=self._progress,
    )  # fmt: skip
    gigabytes = made.gb_per_s * made.seconds
    self._say(
      f'{shape} {form}: {gigabytes:.1f} GB of experts filled and pinned in '
      f'{made.seconds:.1f} s, {made.gb_per_s:.2f} GB/s'
    )
    return made

  def _dtype(self) -> str:
    config = config_lib.EngineConfig(strict=self._options.strict)
    return config_lib.param_dtype(config) or 'bfloat16'

  def _machine(
    self, made: bench_models.Made, some: Sequence[cells.Cell]
  ) -> bool:
    machine = cell_run.Machine(made, some, self._options, self._say)
    try:
      expected = machine.reference()
      for cell in some:
        if self._late():
          return False
        self._cell(machine, made, cell, expected)
    finally:
      machine.close()
    return not self._late()

  def _cell(
    self,
    machine: cell_run.Machine,
    made: bench_models.Made,
    cell: cells.Cell,
    expected: list[list[int]] | None,
  ) -> None:
    """All turns of a cell; its row says whether the time sufficed."""
    prefetch = self._suite.prefetch and cell.cache < 1
    variants = cells.variants(
      prefetch,
      machine.counts is not None,
      self._options.eviction,
      gate=cell.routing == 'model',
    )
    found: dict[Variant, list[cell_run.Ran]] = {v: [] for v in variants}
    turns = self._suite.turns(cell)
    for turn in range(turns):
      if turn and self._late():
        break
      enough = self._options.lru_turns and turn >= self._options.lru_turns
      for variant in variants:
        if enough and variant[1] == 'lru':
          continue
        ran = machine.run(variant, cell.cache, bounds=turn < _BOUNDED)
        found[variant].append(ran)
      variants = _without_worse(found, variants)
      speeds = [found[v][-1].report['tokens_per_s'] for v in variants]
      self._say(
        f'{cell.name} {turn + 1}/{turns}: '
        + ', '.join(
          f'{configs.title(v)} {s:.1f}'
          for v, s in zip(variants, speeds, strict=True)
        )
      )
    row = self._row(machine, made, cell, {v: found[v] for v in variants})
    row['same_tokens'] = {
      configs.title(v): agreement([r.tokens for r in found[v]], expected)
      for v in variants
    }
    self._refuse_other_tokens(row)
    self._keep(row)

  def _row(
    self,
    machine: cell_run.Machine,
    made: bench_models.Made,
    cell: cells.Cell,
    found: Mapping[Variant, Sequence[cell_run.Ran]],
  ) -> Row:
    first = next(iter(found.values()))
    report = first[0].report
    notes = [made.note] if made.note else []
    notes.append(
      f'the first {self._options.context} keys and values of each row are '
      'random numbers'
    )
    turns = len(first)
    return {
      'cell': cell.name,
      'routing': cells.LABELS[cell.routing],
      'note': '; '.join(notes),
      'complete': turns == self._suite.turns(cell),
      'pairs': turns,
      'command': run.command(),
      'date': datetime.datetime.now(datetime.UTC).isoformat('T', 'seconds'),
      'versions': report['versions'],
      'device': report['device'],
      'link': report['link'],
      'settings': settings(self._options),
      'slots': report['slots'],
      'pool_slots': machine.executor.slots,
      'cache_bytes': report['cache_bytes'],
      'fill_seconds': made.seconds,
      'fill_gb_per_s': made.gb_per_s,
      'memory_gb_per_s': machine.rates.memory_gb_per_s,
      'link_gb_per_s': machine.rates.link_gb_per_s,
      'variants': {configs.title(v): figures(found[v]) for v in found},
      'ratios': ratios(found),
    }

  def _refuse_other_tokens(self, row: Row) -> None:
    if self._options.strict and any(
      share is not None and share < 1 for share in row['same_tokens'].values()
    ):
      raise ValueError(
        f'{row["cell"]}: tokens differ from the resident run although the '
        f'numerics are strict: {row["same_tokens"]} of them are equal; the '
        'scheduling changed the answer, which is a fault of this program.'
      )

  def _keep(self, row: Row) -> None:
    self.rows = [r for r in self.rows if not _same(r, row)] + [row]
    if self._path:
      save(self._path, self.rows)

  def _done(self, cell: cells.Cell) -> bool:
    wanted = {'cell': cell.name, 'settings': settings(self._options)}
    return any(
      _same(row, wanted) and row['pairs'] >= self._suite.turns(cell)
      for row in self.rows
    )

  def _late(self) -> bool:
    return time.monotonic() > self._end


def settings(options: cell_run.Options) -> dict[str, Any]:
  """What a row must have been measured with to count as measured."""
  return {f: getattr(options, f) for f in options.__dataclass_fields__}


def _same(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
  return all(row[k] == other[k] for k in ('cell', 'settings'))


def _without_worse(
  found: Mapping[Variant, Sequence[cell_run.Ran]], variants: list[Variant]
) -> list[Variant]:
  """Of the guarded prefetchers only the best of the first turn goes on."""
  guessing = [v for v in variants if v[2] != 'none' and v[1] != 'lru']
  if len(guessing) < 2:
    return variants
  best = max(guessing, key=lambda v: found[v][0].report['tokens_per_s'])
  return [v for v in variants if v not in guessing or v == best]


def figures(runs: Sequence[cell_run.Ran]) -> dict[str, Any]:
  """Medians over a variant's turns, and the speed of each."""
  reports = [r.report for r in runs]
  out: dict[str, Any] = {}
  for name in _KEPT:
    values = [r[name] for r in reports if name in r]
    out[name] = statistics.median(values) if values else None
  out['each'] = [r['tokens_per_s'] for r in reports]
  host = {
    name: statistics.median(r['host_us'][name] for r in reports)
    for name in reports[0]['host_us']
  }
  out['host_us'] = host | {'all': sum(host.values())}
  out['load_gb_per_s'] = statistics.median(
    r['load_bytes'] / r['decode_seconds'] * 1e-9 for r in reports
  )
  out['compiled'] = sum(r.compiled for r in runs)
  return out


def ratios(
  found: Mapping[Variant, Sequence[cell_run.Ran]],
) -> dict[str, dict[str, Any]]:
  """Runahead over the others, turn by turn: median and lower 95 % bound.

  Of 'lru' there may be fewer turns than of the others.
  """
  each = {
    v: [r.report['tokens_per_s'] for r in runs] for v, runs in found.items()
  }
  ours = next(each[v] for v in each if v[0] == 'runahead')
  lockstep = next(each[v] for v in each if v[0] == 'lockstep')
  guessing = [each[v] for v in each if v[2] != 'none' and v[1] != 'lru']
  unguarded = [each[v] for v in each if v[2] != 'none' and v[1] == 'lru']
  others = {'lockstep': lockstep}
  if guessing:
    others['better'] = max([lockstep, guessing[0]], key=statistics.median)
    others['prefetcher'] = guessing[0]
  if unguarded:
    others['lru_unguarded'] = unguarded[0]
  out = {}
  for name, other in others.items():
    found_ratios = [a / b for a, b in zip(ours, other, strict=False)]
    out[name] = {
      'median': statistics.median(found_ratios),
      'lower_95': pairs.lower(found_ratios),
      'each': found_ratios,
    }
  return out


def agreement(
  runs: Sequence[Sequence[Sequence[int]]], expected: list[list[int]] | None
) -> float | None:
  """Share of the first tokens that equal the resident run's; None without."""
  if expected is None:
    return None
  same = [
    a == b
    for tokens in runs
    for own, wanted in zip(tokens, expected, strict=True)
    for a, b in zip(own, wanted, strict=False)
  ]
  return sum(same) / len(same)


def load(path: pathlib.Path | None) -> list[Row]:
  """The rows of a file; none where there is no file yet.

  Raises:
    ValueError: it is no such file, or its folder is missing.
  """
  if path is None:
    return []
  if not path.parent.is_dir():
    raise ValueError(f'{path.parent} is no folder; make it first.')
  if not path.exists():
    return []
  try:
    rows: list[Row] = json.loads(path.read_text('utf-8'))['rows']
    for row in rows:
      _same(row, row)
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f'{path} holds no rows of this benchmark ({error!r}); give another file.'
    ) from error
  return rows


def save(path: pathlib.Path, rows: Sequence[Row]) -> None:
  """Writes all rows at once: a run that is killed leaves the last ones."""
  new = path.with_name(path.name + '.new')
  text = json.dumps({'rows': list(rows)}, indent=1, allow_nan=False)
  new.write_text(text + '\n', encoding='utf-8')
  os.replace(new, path)
