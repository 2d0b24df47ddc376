"""Compares evictions, prefetchers, cache sizes and requests in one table.

python -m bevy_jax.experiments.ablate --trace=FILE --axes=eviction,cache
python -m bevy_jax.experiments.ablate --config=scheduler_grid --first=0

A trace is replayed in lockstep order through the slot table alone, a model runs
from a cold cache; a grid goes on where it was stopped; see also default_parts.
"""

import dataclasses

from absl import flags

from bevy_jax.experiments import (
  ablation,
  configs,
  grids,
  launcher,
  outcome,
  overrides,
  sweep_flags,
  workdir,
)
from bevy_jax.experiments import default_parts as parts
from bevy_jax.experiments import scheduler_grid as grid_lib

flags.adopt_module_key_flags(sweep_flags)
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
FIRST = flags.DEFINE_integer('first', 0, 'Grid: first request of the trace.')
SCOPE = flags.DEFINE_enum('scope', 'lines', grids.SCOPES, 'Grid: what runs.')
REDO = flags.DEFINE_list('redo', [], 'Grid: schedulers to run again.')
QUICK = flags.DEFINE_bool('quick', False, 'Grid: two small cells alone.')
Asked = grids.Grid | parts.Parts | ablation.Ablation


def build_config() -> Asked:
  """The sweep that the flags ask for; for a model `--set` wins."""
  name = 'quick_grid' if QUICK.value else CONFIG.value
  if CONFIG.value == parts.NAME:
    trace = TRACE.value or 'bundled'
    return parts.Parts(trace=trace, first=FIRST.value, quick=QUICK.value)
  if CONFIG.value in grids.GRIDS:
    return grids.make(name, TRACE.value, FIRST.value, SCOPE.value)
  base = configs.CONFIGS[CONFIG.value]()
  base = dataclasses.replace(base, model=MODEL.value, compare=())
  values = EVICTIONS, CACHES, REQUESTS, PREFETCHERS, CAPACITIES
  return ablation.Ablation(
    grid=ablation.Grid.read(*(flag.value for flag in values)).only(AXES.value),
    base=overrides.apply(base, SET.value), trace=TRACE.value,
    tokens=ablation.span(TOKENS.value), warmup=WARMUP.value, ahead=AHEAD.value,
  )  # fmt: skip


def main(asked: Asked, place: workdir.Workdir) -> outcome.Outcome:
  """Runs the sweep and writes the CSV."""
  name = 'ablation' if isinstance(asked, ablation.Ablation) else CONFIG.value
  how = sweep_flags.how(place, name)._replace(redo=REDO.value)
  if isinstance(asked, grids.Grid):
    return grid_lib.main(asked, how)
  if isinstance(asked, parts.Parts):
    return parts.main(asked, how)
  return ablation.main(asked, how)


if __name__ == '__main__':
  launcher.run(main, build_config, resumable=True, device=ablation.on_device)
