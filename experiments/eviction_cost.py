"""Host time of choosing a victim, of a whole load, of telling who used what.

python -m bevy_jax.experiments.eviction_cost --layers=48 --experts=128
"""

from typing import Any

import numpy as np
from absl import flags

from bevy_jax import config
from bevy_jax.experiments import (
  ablation,
  launcher,
  load_cost,
  outcome,
  workdir,
)
from bevy_jax.offload import eviction, slot_table

VICTIM_BAR, LOAD_BAR = 20.0, 25.0  # Microseconds.
LAYERS = flags.DEFINE_integer('layers', 48, 'Layers that have experts.')
EXPERTS = flags.DEFINE_integer('experts', 128, 'Experts of a layer.')
TOP_K = flags.DEFINE_integer('top_k', 8, 'Experts that a token uses.')
ROWS = flags.DEFINE_integer('requests', 8, 'Requests that decode.')
CACHE = flags.DEFINE_float('cache', 0.5, 'Fraction of all experts.')
CAPACITY = flags.DEFINE_enum(
  'capacity', 'global', config.CAPACITIES, 'One pool, or a part a layer.'
)
PASSES = flags.DEFINE_integer('passes', 8, 'Tokens of each request.')
ROUNDS = flags.DEFINE_integer('rounds', 3, 'The least of so many is shown.')


def build_config() -> load_cost.Shape:
  """What is decoded."""
  slots = int(CACHE.value * LAYERS.value * EXPERTS.value)
  quota = slot_table.split(slots, LAYERS.value)
  return load_cost.Shape(
    LAYERS.value,
    EXPERTS.value,
    TOP_K.value,
    ROWS.value,
    slots,
    PASSES.value,
    quota if CAPACITY.value == 'layer' else (),
  )


def main(shape: load_cost.Shape, place: workdir.Workdir) -> outcome.Outcome:
  """A row for each eviction, and whether all keep the bars."""
  keys = shape.layers * shape.experts
  rules = dict(eviction.EVICTIONS)
  rules['static'] = eviction.Static(popularity=np.arange(float(keys)))
  rows: list[dict[str, Any]] = []
  for name, rule in rules.items():
    cost = load_cost.best(rule, shape, ROUNDS.value)
    rows.append({'eviction': name} | load_cost.rounded(cost))
    place.note(rows[-1])
  met = all(r['victim'] <= VICTIM_BAR and r['load'] <= LOAD_BAR for r in rows)
  return outcome.Outcome(
    {'rows': rows, 'met': met},
    (
      f'{keys} experts, {shape.slots} slots, microseconds of host time',
      ablation.table(rows),
      f'victim <= {VICTIM_BAR:g} and load <= {LOAD_BAR:g}: met is {met}',
    ),
    outcome.judged(met),
  )


if __name__ == '__main__':
  launcher.run(main, build_config, device=False)
