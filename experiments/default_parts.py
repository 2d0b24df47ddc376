"""What each part of the default scheduler is worth: each off in turn."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bevy_jax import baselines, figures, protocols, runahead
from bevy_jax import config as config_lib
from bevy_jax import window as window_lib
from bevy_jax.experiments import grids, outcome, simulation, sweep

NAME = 'default_parts'


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
Row = sweep.Row
COLUMNS = (
  'platform', 'form', 'requests', 'cache', 'part', 'tokens_per_s', 'of_whole',
  'tpot_p99_ms', 'max_lag', 'loads', 'launches',
)  # fmt: skip
FORM = sweep.Form(COLUMNS, COLUMNS[:4], ('platform', 'form', 'part'))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
  """What is run.

  Attributes:
    trace: the routing.
    first: first request of the trace.
    quick: one small cell alone.
  """

  trace: str = 'bundled'
  first: int = 0
  quick: bool = False


def main(parts: Parts, how: sweep.How) -> outcome.Outcome:
  """Runs every part in every cell, writes the CSV; the table is shown."""
  tasks = [
    sweep.Task(
      (parts, cell),
      FORM.where(dict(zip(COLUMNS, cell, strict=False))),
      ' '.join(map(str, cell)),
      4 + cell[2],
    )
    for cell in (_QUICK if parts.quick else CELLS)
  ]
  rows = sweep.run(tasks, run_cell, FORM, how)
  return outcome.Outcome({'rows': rows}, (table(rows),))


def run_cell(
  parts: Parts, cell: tuple[str, str, int, float], known: Sequence[Row] = ()
) -> list[Row]:
  """Every part in one cell; nothing where the rows are known."""
  if known:
    return []
  skip, tokens = (4, 10) if parts.quick else (32, 64)
  where = parts.trace, cell, parts.first, skip, tokens
  rows = [_run(*where, name) for name in PARTS]
  for row in rows:
    row['of_whole'] = round(row['tokens_per_s'] / rows[0]['tokens_per_s'], 4)
  return [{name: row[name] for name in COLUMNS} for row in rows]


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
