"""Runs a grid of simulated cells, and says its tables; it goes on."""

import functools
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bevy_jax import bounds, costs, events, synthetic
from bevy_jax import config as config_lib
from bevy_jax import shapes as shapes_lib
from bevy_jax import trace as trace_lib
from bevy_jax import window as window_lib
from bevy_jax.experiments import (
  grid_plots,
  grid_tables,
  grids,
  outcome,
  simulation,
  sweep,
)

Row = sweep.Row
_KEY = (
  'trace', 'first', 'skip', 'tokens', 'platform', 'form', 'requests', 'cache',
  'scheduler', 'eviction', 'prefetch',
)  # fmt: skip
_FIGURES = (
  'synthetic', 's', 'tokens_per_s', 'headroom_tokens_per_s', 'loads',
  'prefetch_loads', 'wasted_prefetches', 'loads_per_token', 'launches',
  'mean_group', 'max_lag', 'tpot_p99_ms', 'gpu_busy', 'link_busy',
  'useful_efficiency', 'host_share', 'cpu_seconds',
)  # fmt: skip
COLUMNS = _KEY + _FIGURES
_TEXTS = ('trace', 'platform', 'form', 'scheduler', 'eviction', 'prefetch')
FORM = sweep.Form(COLUMNS, _KEY[: _KEY.index('scheduler')], _TEXTS)
_SYNTHETIC = 96  # Requests of a synthetic trace, those that do not decode too.


def main(grid: grids.Grid, how: sweep.How) -> outcome.Outcome:
  """Runs a grid, draws its maps beside the CSV; its tables are shown."""
  rows = run(grid, how)
  how.say(f'rows: {how.path}')
  maps = grid_plots.save(rows, pathlib.Path(how.path).resolve().parent)
  if not maps:
    how.say('no heat maps: matplotlib is not installed (the extra `plot`)')
  for found in maps:
    how.say(f'map: {found.name}')
  lines: list[str] = []
  grid_tables.report(rows, lines.append)
  return outcome.Outcome({'rows': rows}, tuple(lines))


def run(grid: grids.Grid, how: sweep.How) -> list[Row]:
  """Every row of a grid; it goes on with what the CSV has already.

  `how.say` hears of cells that the trace is too short for, too.

  Args:
    grid: what to run.
    how: who runs it; its path is the CSV.
  """
  for name in how.redo:
    config_lib.choose('scheduler', name, config_lib.SCHEDULERS)
  known = FORM.load(pathlib.Path(how.path))
  known = [row for row in known if row['scheduler'] not in how.redo]
  tasks = [
    sweep.Task(
      (grid, cell), FORM.where(_key(grid, cell, grids.LOCKSTEP)),
      f'{pathlib.Path(cell.trace).name} {cell.platform} {cell.form} '
      f'{cell.requests} x {cell.cache}',
      4 + cell.requests,
    )
    for cell in grid.cells
    if _fits(grid, cell, how.say)
  ]  # fmt: skip
  return sweep.run(tasks, run_cell, FORM, how, known)


def run_cell(
  grid: grids.Grid, cell: grids.Cell, known: Sequence[Row] = ()
) -> list[Row]:
  """The rows of one cell that are not known yet.

  Args:
    grid: how to run.
    cell: what to run.
    known: rows of the cell from an earlier run.
  """
  trace = _trace(cell.trace, grid.first + cell.requests, grid.tokens)
  sim = simulation.Simulation(
    simulation.Replay(
      trace=cell.trace,
      platform=cell.platform,
      model_shape=f'{grids.SHAPE}:{cell.form}',
      requests=cell.requests,
      cache=cell.cache,
      first=grid.first,
      skip=grid.skip,
      tokens=grid.tokens,
      bounds=False,
    ),
    trace,
  )
  done = {_variant(row): row for row in known}
  found = []
  head = {'synthetic': int(bool(trace.meta.get('synthetic')))}
  for variant in _all(grid, cell, len(trace.lengths), done):
    if variant in done:
      continue
    begun = time.process_time()
    ran = sim.run(*variant)
    row = _key(grid, cell, variant) | head | _figures(ran.report)
    alone = variant.prefetch == 'none' and variant.scheduler == 'lockstep'
    if alone:
      row['headroom_tokens_per_s'] = _headroom(ran, sim.costs, cell, grid.skip)
    done[variant] = row
    _compare(row, variant, done, sim.costs.load)
    row['cpu_seconds'] = round(time.process_time() - begun, 2)
    found.append({name: row[name] for name in COLUMNS})
  return found


def _all(
  grid: grids.Grid,
  cell: grids.Cell,
  requests: int,
  done: Mapping[grids.Variant, Row],
) -> Iterator[grids.Variant]:
  """Lockstep, and once it is done what its share of the device asks for."""
  yield grids.LOCKSTEP
  s = float(done[grids.LOCKSTEP]['gpu_busy'])
  others = requests > cell.requests
  yield from grids.variants(cell, s, grid.scope, others=others)


@functools.lru_cache(maxsize=2)
def _trace(name: str, least: int, tokens: int) -> trace_lib.Trace:
  """The routing; ValueError where it has too few requests."""
  if name != 'zipf':
    found = trace_lib.load(name)
    if len(found.lengths) < least:
      raise ValueError(
        f'{name} has {len(found.lengths)} requests, {least} are needed.'
      )
    return found
  shape, _ = shapes_lib.parse(grids.SHAPE)
  return synthetic.zipf(
    layers=shape.layers,
    experts=shape.experts,
    top_k=shape.top_k,
    requests=max(_SYNTHETIC, least),
    tokens=tokens,
  )


def _key(grid: grids.Grid, cell: grids.Cell, variant: grids.Variant) -> Row:
  """What a row is of; files go by their names, wherever they lie."""
  name = pathlib.Path(cell.trace).name
  whole = cell._replace(trace=name)._asdict() | variant._asdict()
  whole |= {'first': grid.first, 'skip': grid.skip, 'tokens': grid.tokens}
  return {column: whole[column] for column in _KEY}


def _variant(row: Mapping[str, Any]) -> grids.Variant:
  return grids.Variant(row['scheduler'], row['eviction'], row['prefetch'])


def _figures(report: Mapping[str, Any]) -> Row:
  """The part of a report that is kept, of the measured window."""
  tokens = max(1, report['window']['tokens'])
  found: Row = {
    'tokens_per_s': round(report['tokens_per_s'], 4),
    'loads_per_token': round(report['loads'] / tokens, 4),
    'tpot_p99_ms': round(report['tpot_ms']['p99'] or 0.0, 4),
    'host_share': round(report['h'], 5),
  }
  for name in ('loads', 'prefetch_loads', 'wasted_prefetches', 'launches'):
    found[name] = int(report[name])
  found['max_lag'] = int(report['max_lag'])
  for name in ('mean_group', 'gpu_busy', 'link_busy'):
    found[name] = round(report[name], 5)
  return found


def _compare(
  row: Row,
  variant: grids.Variant,
  done: Mapping[grids.Variant, Row],
  load: int,
) -> None:
  """Adds what can only be told beside lockstep's own run of the cell.

  `useful_efficiency` is the report's figure with lockstep's run in place of
  its bounds: the larger of useful loads (no more of them than lockstep makes
  with the same eviction) and lockstep's device time, over the time it took;
  0 where lockstep has not run with that eviction.
  """
  base = done[grids.LOCKSTEP]
  row['s'] = base['gpu_busy']
  same = done.get(grids.LOCKSTEP._replace(eviction=variant.eviction))
  row.setdefault(
    'headroom_tokens_per_s', same['headroom_tokens_per_s'] if same else 0.0
  )
  row['useful_efficiency'] = 0.0
  if same is None or not row['tokens_per_s']:
    return
  wasted = float(row['wasted_prefetches']) / max(1, int(row['loads']))
  own = float(row['loads_per_token']) * (1 - wasted)
  link = min(own, float(same['loads_per_token'])) * load * 1e-9
  device = float(base['gpu_busy']) / float(base['tokens_per_s'])
  useful = max(link, device) * float(row['tokens_per_s'])
  row['useful_efficiency'] = round(useful, 5)


def _headroom(
  ran: simulation.Run, cost: costs.Costs, cell: grids.Cell, skip: int
) -> float:
  """Tokens/s of `bounds.headroom` on the steps of lockstep's own window."""
  window = window_lib.find(ran.log, cell.requests, skip)
  loads: list[float] = [0.0]
  device = []
  for event in ran.log[window.first : window.last + 1]:
    if isinstance(event, events.LoadIssued):
      loads[-1] += cost.load
    elif isinstance(event, events.LaunchEnded):
      loads.append(0.0)
      device.append(event.time - event.began)
  took = bounds.headroom(loads[: len(device)], device)
  return round(window.tokens(ran.log) / (took * 1e-9), 4)


def _fits(grid: grids.Grid, cell: grids.Cell, say: sweep.Say) -> bool:
  try:
    _trace(cell.trace, grid.first + cell.requests, grid.tokens)
  except ValueError as error:
    if not pathlib.Path(cell.trace).exists() and cell.trace != 'bundled':
      raise
    say(f'left out: {cell} ({error})')
    return False
  return True
