"""What fewer bits an expert cost: python -m bevy_jax.experiments.quality.

python -m bevy_jax.experiments.quality --corpus=DIR --experts=bf16,int8,int4
"""

import json
import pathlib
import time
from collections.abc import Sequence

import jax
import rich.console
import rich.table
from absl import app, flags

from bevy_jax import loading, storage
from bevy_jax.experiments import corpus, forward, precision

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
_REPORT = flags.DEFINE_string('report', '', 'JSON file to write.')


def main(argv: Sequence[str]) -> None:
  """Prints one row a storage and text; errors end it with one line."""
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {argv[1:]}.')
  try:
    _run(rich.console.Console())
  except ValueError as error:
    raise SystemExit(f'error: {error}') from error


def _run(console: rich.console.Console) -> None:
  storages = [storage.parse(name) for name in _EXPERTS.value]
  model = loading.load(_MODEL.value, param_dtype='float32')
  precision.check(model)
  folder = pathlib.Path(_CORPUS.value)
  texts = {
    domain: precision.windows(
      model,
      corpus.read_documents(folder / f'{domain}.valid.txt.xz'),
      _LIMIT.value,
    )
    for domain in corpus.DOMAINS
  }
  # A CPU is many times slower in bfloat16.
  dtype = 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'
  attention = forward.best_attention(model.config, model.config.context)
  began, found = time.perf_counter(), []
  for cost in precision.costs(
    model, texts, storages, attention, dtype, _ROWS.value
  ):
    found.append(cost)
    seconds = time.perf_counter() - began
    console.print(f'{cost.experts} {cost.text}: {seconds:.0f} s', style='dim')
  table = rich.table.Table(title=f'{_MODEL.value}, products in {dtype}')
  for name in ('experts', 'bits/weight', 'text', 'tokens', 'bits/byte', 'more'):
    table.add_column(name, justify='left' if name == 'text' else 'right')
  for c, more in zip(found, precision.excess(found), strict=True):
    figures = (f'{c.tokens:,}', f'{c.bits_per_byte:.4f}', f'{more:+.4f}')
    table.add_row(c.experts, f'{c.bits_per_weight:.2f}', c.text, *figures)
  console.print(table)
  if _REPORT.value:
    rows = [c._asdict() | {'dtype': dtype} for c in found]
    pathlib.Path(_REPORT.value).write_text(json.dumps(rows, indent=1), 'utf-8')


if __name__ == '__main__':
  app.run(main)
