"""Host time of choosing a victim, of a whole load, of telling who used what.

python -m bevy_jax.experiments.eviction_cost --layers=48 --experts=128
"""

import numpy as np
from absl import app, flags

from bevy_jax import config
from bevy_jax.experiments import load_cost
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


def main(argv: list[str]) -> None:
  """Prints a row for each eviction and whether all keep the bars."""
  if len(argv) > 1:
    raise app.UsageError(f'not a flag: {argv[1:]}')
  keys = LAYERS.value * EXPERTS.value
  slots = int(CACHE.value * keys)
  quota = slot_table.split(slots, LAYERS.value)
  shape = load_cost.Shape(
    LAYERS.value,
    EXPERTS.value,
    TOP_K.value,
    ROWS.value,
    slots,
    PASSES.value,
    quota if CAPACITY.value == 'layer' else (),
  )
  print(f'{keys} experts, {shape.slots} slots, microseconds of host time')
  names = ['eviction', *load_cost.Cost._fields]
  print(names[0].rjust(12), *(name.rjust(8) for name in names[1:]))
  rules = dict(eviction.EVICTIONS)
  rules['static'] = eviction.Static(popularity=np.arange(float(keys)))
  met = True
  for name, rule in rules.items():
    cost = load_cost.best(rule, shape, ROUNDS.value)
    met &= cost.victim <= VICTIM_BAR and cost.load <= LOAD_BAR
    print(f'{name:>12} ' + ' '.join(f'{us:8.1f}' for us in cost))
  print(f'victim <= {VICTIM_BAR:g} and load <= {LOAD_BAR:g}: met is {met}')


if __name__ == '__main__':
  app.run(main)
