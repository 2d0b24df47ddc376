"""Host time of what prefetching adds to a reveal, and of a prefetch.

python -m bevy_jax.experiments.prefetch_cost --layers=48 --experts=128
"""

from absl import app, flags

from bevy_jax.experiments import load_cost
from bevy_jax.offload import prefetch

BAR = 100.0  # Microseconds of a decision.
LAYERS = flags.DEFINE_integer('layers', 48, 'Layers that have experts.')
EXPERTS = flags.DEFINE_integer('experts', 128, 'Experts of a layer.')
TOP_K = flags.DEFINE_integer('top_k', 8, 'Experts that a token uses.')
ROWS = flags.DEFINE_integer('requests', 8, 'Requests that decode.')
CACHE = flags.DEFINE_float('cache', 0.5, 'Fraction of all experts.')
ROUNDS = flags.DEFINE_integer('rounds', 3, 'The least of so many is shown.')
PASSES = flags.DEFINE_integer('passes', 8, 'Tokens of each request.')


def main(argv: list[str]) -> None:
  """Prints a row for each prefetcher and whether all keep the bar."""
  if len(argv) > 1:
    raise app.UsageError(f'not a flag: {argv[1:]}')
  keys = LAYERS.value * EXPERTS.value
  shape = load_cost.Shape(
    LAYERS.value,
    EXPERTS.value,
    TOP_K.value,
    ROWS.value,
    int(CACHE.value * keys),
    PASSES.value,
  )
  print(f'{keys} experts, {shape.slots} slots, microseconds of host time')
  names = ['prefetcher', *load_cost.Sight._fields]
  print(names[0].rjust(12), *(name.rjust(8) for name in names[1:]))
  met = True
  for name, rule in prefetch.PREFETCHERS.items():
    if rule.depth:
      cost = load_cost.sight(rule, shape, ROUNDS.value)
      met &= cost.guess <= BAR
      print(f'{name:>12} ' + ' '.join(f'{us:8.1f}' for us in cost))
  print(f'guess <= {BAR:g}: met is {met}')


if __name__ == '__main__':
  app.run(main)
