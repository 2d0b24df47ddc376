"""What fewer bits an expert cost: python -m bevy_jax.experiments.quality.

python -m bevy_jax.experiments.quality --corpus=DIR --experts=bf16,int8,int4
"""

import pathlib
import time

import jax
import rich.table
from absl import flags

from bevy_jax import storage
from bevy_jax.experiments import launcher, outcome, precision, workdir

_MODEL = flags.DEFINE_string('model', 'demo', "'demo' or one trained like it.")
_CORPUS = flags.DEFINE_string(
  'corpus', None, 'Folder with {books,python}.valid.txt.xz.', required=True
)
_EXPERTS = flags.DEFINE_list(
  'experts',
  ['bf16', 'int8', 'int4'],
  'Storages to compare with the first: bf16, f16, f32, int8[:GROUP], '
  'int4[:GROUP[:zero]].',
)
_LIMIT = flags.DEFINE_integer(
  'limit', 0, 'About so many tokens of each text; 0 for all.', lower_bound=0
)
_ROWS = flags.DEFINE_integer('rows', 8, 'Windows at once.', lower_bound=1)


def build_config() -> precision.Asked:
  """What is compared."""
  for name in _EXPERTS.value:
    storage.parse(name)  # ValueError where it is none.
  return precision.Asked(
    _MODEL.value,
    pathlib.Path(_CORPUS.value),
    tuple(_EXPERTS.value),
    _LIMIT.value,
    _ROWS.value,
  )


def main(asked: precision.Asked, place: workdir.Workdir) -> outcome.Outcome:
  """One row a storage and text."""
  # A CPU is many times slower in bfloat16.
  dtype = 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'
  began, found = time.perf_counter(), []
  for cost in precision.measured(asked, dtype):
    found.append(cost)
    place.note(cost._asdict())
    print(f'{cost.experts} {cost.text}: {time.perf_counter() - began:.0f} s')
  table = rich.table.Table(title=f'{asked.model}, products in {dtype}')
  for name in ('experts', 'bits/weight', 'text', 'tokens', 'bits/byte', 'more'):
    table.add_column(name, justify='left' if name == 'text' else 'right')
  for c, more in zip(found, precision.excess(found), strict=True):
    figures = (f'{c.tokens:,}', f'{c.bits_per_byte:.4f}', f'{more:+.4f}')
    table.add_row(c.experts, f'{c.bits_per_weight:.2f}', c.text, *figures)
  rows = [c._asdict() | {'dtype': dtype} for c in found]
  return outcome.Outcome({'rows': rows}, (table,))


if __name__ == '__main__':
  launcher.run(main, build_config)
