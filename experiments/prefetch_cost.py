"""Host time of what prefetching adds to a reveal, and of a prefetch.

python -m bevy_jax.experiments.prefetch_cost --layers=48 --experts=128
"""

from typing import Any

from absl import flags

from bevy_jax.experiments import (
  ablation,
  launcher,
  load_cost,
  outcome,
  workdir,
)
from bevy_jax.offload import prefetch

BAR = 100.0  # Microseconds of a decision.
LAYERS = flags.DEFINE_integer('layers', 48, 'Layers that have experts.')
EXPERTS = flags.DEFINE_integer('experts', 128, 'Experts of a layer.')
TOP_K = flags.DEFINE_integer('top_k', 8, 'Experts that a token uses.')
ROWS = flags.DEFINE_integer('requests', 8, 'Requests that decode.')
CACHE = flags.DEFINE_float('cache', 0.5, 'Fraction of all experts.')
ROUNDS = flags.DEFINE_integer('rounds', 3, 'The least of so many is shown.')
PASSES = flags.DEFINE_integer('passes', 8, 'Tokens of each request.')


def build_config() -> load_cost.Shape:
  """What is decoded."""
  slots = int(CACHE.value * LAYERS.value * EXPERTS.value)
  return load_cost.Shape(
    LAYERS.value,
    EXPERTS.value,
    TOP_K.value,
    ROWS.value,
    slots,
    PASSES.value,
  )


def main(shape: load_cost.Shape, place: workdir.Workdir) -> outcome.Outcome:
  """A row for each prefetcher, and whether all keep the bar."""
  rows: list[dict[str, Any]] = []
  for name, rule in prefetch.PREFETCHERS.items():
    if rule.depth:
      cost = load_cost.sight(rule, shape, ROUNDS.value)
      rows.append({'prefetcher': name} | load_cost.rounded(cost))
      place.note(rows[-1])
  met = all(row['guess'] <= BAR for row in rows)
  keys = shape.layers * shape.experts
  return outcome.Outcome(
    {'rows': rows, 'met': met},
    (
      f'{keys} experts, {shape.slots} slots, microseconds of host time',
      ablation.table(rows),
      f'guess <= {BAR:g}: met is {met}',
    ),
    outcome.judged(met),
  )


if __name__ == '__main__':
  launcher.run(main, build_config, device=False)
