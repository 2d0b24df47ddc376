"""Compares evictions, prefetchers, cache sizes and requests in one table.

python -m bevy_jax.experiments.ablate --trace=FILE --axes=eviction,cache
python -m bevy_jax.experiments.ablate --model=demo --axes=eviction,prefetch

With a trace, its routing is replayed in lockstep order through the slot
table alone; with a model, every row is a measured run from a cold cache.
"""

import dataclasses

from absl import app, flags

from bevy_jax import trace as trace_lib
from bevy_jax.experiments import ablation, configs, overrides

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
CONFIG = flags.DEFINE_string('config', 'demo', 'Named config of the runs.')
SET = flags.DEFINE_multi_string('set', [], 'FIELD=VALUE of the config.')
CSV = flags.DEFINE_string('csv', 'ablation.csv', 'Where to write the rows.')


def build_grid() -> ablation.Grid:
  """The values that the flags ask for."""
  grid = ablation.Grid(
    EVICTIONS.value,
    [float(cache) for cache in CACHES.value],
    [int(rows) for rows in REQUESTS.value],
    PREFETCHERS.value,
    CAPACITIES.value,
  )
  return grid.only(AXES.value)


def build_config() -> configs.Decode:
  """How to run a model; `--set` wins."""
  base = dataclasses.replace(
    configs.CONFIGS[CONFIG.value](), model=MODEL.value, compare=()
  )
  return overrides.apply(base, SET.value)


def main(argv: list[str]) -> None:
  """Prints the table, writes the CSV."""
  if len(argv) > 1:
    raise app.UsageError(f'not a flag: {argv[1:]}')
  try:
    if TRACE.value:
      first, end = (int(token) for token in TOKENS.value.split(':'))
      rows = list(
        ablation.replayed(
          trace_lib.load(TRACE.value),
          build_grid(),
          range(first, end),
          WARMUP.value,
          AHEAD.value,
        )
      )
    else:
      rows = list(ablation.measured(build_config(), build_grid(), print))
    ablation.save(CSV.value, rows)
  except (ValueError, OSError) as error:
    raise SystemExit(f'ablate: {error}') from error
  print(ablation.table(rows))
  if TRACE.value:
    print(ablation.table(ablation.summary(rows)))
  print(f'rows: {CSV.value}')


if __name__ == '__main__':
  app.run(main)
