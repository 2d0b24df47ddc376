"""What each part of the default scheduler is worth: each off in turn."""

import csv
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bevy_jax import baselines, figures, protocols, runahead
from bevy_jax import config as config_lib
from bevy_jax import window as window_lib
from bevy_jax.experiments import grids, simulation

NAME = 'default_parts'
Say = Callable[[str], None]


class Part(NamedTuple):
  """The default with something else in one place.

  Attributes:
    scheduler: who schedules.
    eviction: who evicts.
    prefetch: who prefetches.
    late: whether loads are bound late, see `Pace.depth`.
    heads: whether the head is measured apart, see `Pace.head`.
  """

  scheduler: protocols.Scheduler = config_lib.SCHEDULERS['runahead']
  eviction: str = grids.OURS.eviction
  prefetch: str = grids.OURS.prefetch
  late: bool = True
  heads: bool = True


PARTS: dict[str, Part] = {
  'whole': Part(),
  'no prefetch': Part(prefetch='none'),
  'prefetch unguarded': Part(prefetch=f'{grids.OURS.prefetch}:guarded=false'),
  'loads bound early': Part(late=False),
  'head as any layer': Part(heads=False),
  'no holding': Part(runahead.Runahead(hold=False)),
  'lag 1 always': Part(runahead.Runahead(max_lag=1)),
  'lag 6 at most': Part(runahead.Runahead(max_lag=6)),
  'lag 24 always': Part(runahead.Runahead(near=None)),
  'lag unbounded': Part(runahead.Runahead(max_lag=None, near=None)),
  'one launch in flight': Part(runahead.Runahead(depth=1)),
  'decayed LFU': Part(eviction='lfu_decayed'),
  'LRU': Part(eviction='lru'),
  'lockstep': Part(baselines.Lockstep(), prefetch='none'),
}
# Of every class of s; platform, form, requests, cache.
CELLS = (
  ('h200', 'int4', 4, 0.25),
  ('rtx4090', 'int4', 8, 0.5),
  ('rtx5090', 'int4', 8, 0.75),
  ('h200', 'bf16', 8, 0.75),
  ('rtx4090', 'int4', 8, 0.75),
  ('h200', 'int4', 16, 0.9),
)
_QUICK = (('h200', 'int4', 2, 0.5),)
Row = dict[str, Any]
COLUMNS = (
  'platform', 'form', 'requests', 'cache', 'part', 'tokens_per_s', 'of_whole',
  'tpot_p99_ms', 'max_lag', 'loads', 'launches',
)  # fmt: skip


def main(
  trace: str, first: int, path: str, quick: bool = False, say: Say = print
) -> list[Row]:
  """Runs every part in every cell, writes the CSV, says the table.

  Args:
    trace: the routing; empty for the bundled one.
    first: first request of the trace.
    path: of the CSV; empty for none.
    quick: one small cell alone.
    say: prints a line.
  """
  if path and not pathlib.Path(path).resolve().parent.is_dir():
    raise ValueError(f'{path}: make its folder first.')
  skip, tokens = (4, 10) if quick else (32, 64)
  rows: list[Row] = []
  for cell in _QUICK if quick else CELLS:
    where = trace or 'bundled', cell, first, skip, tokens
    own = [_run(*where, name) for name in PARTS]
    for row in own:
      row['of_whole'] = round(row['tokens_per_s'] / own[0]['tokens_per_s'], 4)
    rows += own
    say(' '.join(map(str, cell)) + f': {len(own)} runs')
  if path:
    with pathlib.Path(path).open('w', encoding='utf-8', newline='') as file:
      writer = csv.DictWriter(file, COLUMNS, lineterminator='\n')
      writer.writeheader()
      writer.writerows(rows)
  say(table(rows))
  return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Each part's tokens/s and p99 over those of the whole, all cells."""
  title = 'part, tokens/s and p99 over the whole:'
  lines = [f'{title:<44} least mean  most  p99']
  whole = [row for row in rows if row['part'] == 'whole']
  for name in dict.fromkeys(row['part'] for row in rows):
    own = [row for row in rows if row['part'] == name]
    ratios = [row['of_whole'] for row in own]
    late = [
      row['tpot_p99_ms'] / w['tpot_p99_ms']
      for row, w in zip(own, whole, strict=True)
    ]
    lines.append(
      f'{name:<44} {min(ratios):.3f} {_mean(ratios):.3f} {max(ratios):.3f} '
      f'{_mean(late):.3f}'
    )
  return '\n'.join(lines)


def _run(
  trace: str,
  cell: tuple[str, str, int, float],
  first: int,
  skip: int,
  tokens: int,
  name: str,
) -> Row:
  platform, form, requests, cache = cell
  sim = simulation.Simulation(
    simulation.Replay(
      trace=trace, platform=platform, model_shape=f'{grids.SHAPE}:{form}',
      requests=requests, cache=cache, first=first, skip=skip, tokens=tokens,
      bounds=False,
    )
  )  # fmt: skip
  part = PARTS[name]
  engine = sim.engine(part.scheduler, part.eviction, part.prefetch)
  engine.view.pace.late = part.late
  engine.view.pace.heads = part.heads
  while engine.busy:
    engine.step()
  window = window_lib.find(engine.log, requests, skip)
  inside = window.inside(engine.log)
  speed = figures.speed(engine.log, window)
  return {
    'platform': platform, 'form': form, 'requests': requests, 'cache': cache,
    'part': name,
    'tokens_per_s': round(window.tokens(engine.log) / window.seconds, 4),
    'tpot_p99_ms': round(speed['tpot_ms']['p99'], 4),
    'max_lag': figures.max_lag(engine.log, window),
    'loads': figures.cache(inside)['loads'],
    'launches': figures.launches(engine.log, window)['launches'],
  }  # fmt: skip


def _mean(values: Sequence[float]) -> float:
  return math.exp(sum(map(math.log, values)) / len(values))
