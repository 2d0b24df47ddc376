"""Compares evictions, prefetchers, cache sizes and requests in one table.

python -m bevy_jax.experiments.ablate --trace=FILE --axes=eviction,cache
python -m bevy_jax.experiments.ablate --config=scheduler_grid --first=0

A trace is replayed in lockstep order through the slot table alone, a model runs
from a cold cache; a grid goes on where it was stopped; see also default_parts.
"""

import dataclasses

from absl import app, flags

from bevy_jax.experiments import ablation, configs, grids, overrides
from bevy_jax.experiments import default_parts as parts
from bevy_jax.experiments import scheduler_grid as grid_lib

AXES = flags.DEFINE_list(
  'axes', ['eviction', 'cache'], 'To combine; others keep their first value.'
)
EVICTIONS = flags.DEFINE_list(
  'evictions', ['reuse', 'lfu_decayed', 'lfu', 'lru', 'fifo', 'random',
  'least_stale'], 'Values; belady and static too with a trace.'
)  # fmt: skip
PREFETCHERS = flags.DEFINE_list(
  'prefetchers', ['none', 'transition', 'history', 'popularity'],
  'Values; next_gate too with a model, oracle:p=0.9 with a trace.'
)  # fmt: skip
AHEAD = flags.DEFINE_integer('ahead', 0, 'Prefetches a layer of a trace.')
CACHES = flags.DEFINE_list('caches', ['0.25', '0.5', '0.75'], 'Fractions.')
REQUESTS = flags.DEFINE_list('requests', ['8', '4', '16'], 'How many decode.')
CAPACITIES = flags.DEFINE_list('capacities', ['global', 'layer'], 'Pools.')
TRACE = flags.DEFINE_string('trace', '', 'A routing trace to replay.')
TOKENS = flags.DEFINE_string('tokens', '64:160', 'FIRST:END of the trace.')
WARMUP = flags.DEFINE_integer('warmup', 32, 'Of these tokens, not measured.')
MODEL = flags.DEFINE_string('model', 'demo', 'A model to run with no trace.')
CONFIG = flags.DEFINE_enum(
  'config', 'demo', [*configs.CONFIGS, *grids.GRIDS, parts.NAME], 'Which.'
)
SET = flags.DEFINE_multi_string('set', [], 'FIELD=VALUE of the config.')
CSV = flags.DEFINE_string('csv', '', 'Where to write the rows.')
FIRST = flags.DEFINE_integer('first', 0, 'Grid: first request of the trace.')
SCOPE = flags.DEFINE_enum('scope', 'lines', grids.SCOPES, 'Grid: what runs.')
REDO = flags.DEFINE_list('redo', [], 'Grid: schedulers to run again.')
JOBS = flags.DEFINE_integer('jobs', 2, 'Grid: processes.', lower_bound=1)
QUICK = flags.DEFINE_bool('quick', False, 'Grid: two small cells alone.')


def build_grid() -> ablation.Grid:
  """The values that the flags ask for."""
  return ablation.Grid(
    EVICTIONS.value,
    [float(cache) for cache in CACHES.value],
    [int(rows) for rows in REQUESTS.value],
    PREFETCHERS.value,
    CAPACITIES.value,
  ).only(AXES.value)


def build_config() -> configs.Decode:
  """How to run a model; `--set` wins."""
  base = configs.CONFIGS[CONFIG.value]()
  base = dataclasses.replace(base, model=MODEL.value, compare=())
  return overrides.apply(base, SET.value)


def main(argv: list[str]) -> None:
  """Prints the table, writes the CSV."""
  if len(argv) > 1:
    raise app.UsageError(f'not a flag: {argv[1:]}')
  try:
    if CONFIG.value == parts.NAME:
      parts.main(TRACE.value, FIRST.value, CSV.value, QUICK.value)
    elif CONFIG.value in grids.GRIDS:
      name = 'quick_grid' if QUICK.value else CONFIG.value
      grid = grids.make(name, TRACE.value, FIRST.value, SCOPE.value)
      path = CSV.value or f'{name}.csv'
      grid_lib.main(grid, path, JOBS.value, REDO.value, print)
    elif TRACE.value:
      span = TRACE.value, TOKENS.value, WARMUP.value
      ablation.main_replayed(build_grid(), *span, AHEAD.value, CSV.value, print)
    else:
      ablation.main_measured(build_config(), build_grid(), CSV.value, print)
  except (ValueError, OSError) as error:
    raise SystemExit(f'ablate: {error}') from error


if __name__ == '__main__':
  app.run(main)
