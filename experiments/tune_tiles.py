"""Finds the tiles of the expert kernels for a shape, on the GPU at hand.

python -m bevy_jax.experiments.tune_tiles --shape=qwen3-30b-a3b --forms=int8

What it prints belongs into `_MEASURED` of layers/kernel_tiles.py.
"""

from absl import app, flags

from bevy_jax import config as config_lib
from bevy_jax.experiments import bench_models, tile_sweep

SHAPE = flags.DEFINE_string('shape', 'qwen3-30b-a3b', 'Whose experts.')
FORMS = flags.DEFINE_list('forms', ['bf16', 'int8', 'int4:32'], 'Of experts.')
ROWS = flags.DEFINE_list('rows', ['2', '8', '32'], 'Rows of a launch.')


def main(argv: list[str]) -> None:
  """Prints an entry for each form."""
  if len(argv) > 1:
    raise app.UsageError(f'not a flag: {argv[1:]}')
  try:
    config_lib.choose('shape', SHAPE.value, bench_models.MODELS)
    for form in FORMS.value:
      lines = []
      for rows in map(int, ROWS.value):
        sweep = tile_sweep.Sweep(tile_sweep.Case(SHAPE.value, form, rows))
        first, second = sweep.best()
        lines.append(f'    {rows}: ({_tile(first)}, {_tile(second)}),')
        print(f'# {form} {rows} rows: {_words(first)}; {_words(second)}')
      print(f'  {(sweep.form, *sweep.shape[1:])}: {{', *lines, '  },', sep='\n')
  except ValueError as error:
    raise SystemExit(f'tune_tiles: {error}') from error


def _tile(found: tile_sweep.Found) -> str:
  return f'Tile{tuple(found.tile)}'


def _words(found: tile_sweep.Found) -> str:
  return f'{found.before_us:.1f} -> {found.us:.1f} us'


if __name__ == '__main__':
  app.run(main)
