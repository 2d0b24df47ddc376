"""Finds the tiles of the expert kernels for a shape, on the GPU at hand.

python -m bevy_jax.experiments.tune_tiles --shape=qwen3-30b-a3b --forms=int8

What it prints belongs into `_MEASURED` of layers/kernel_tiles.py.
"""

from typing import Any

from absl import flags

from bevy_jax import config as config_lib
from bevy_jax.experiments import (
  bench_models,
  launcher,
  outcome,
  tile_sweep,
  workdir,
)

SHAPE = flags.DEFINE_string('shape', 'qwen3-30b-a3b', 'Whose experts.')
FORMS = flags.DEFINE_list('forms', ['bf16', 'int8', 'int4:32'], 'Of experts.')
ROWS = flags.DEFINE_list('rows', ['2', '8', '32'], 'Rows of a launch.')


def build_config() -> dict[str, Any]:
  """Which kernels are tuned."""
  config_lib.choose('shape', SHAPE.value, bench_models.MODELS)
  rows = [int(rows) for rows in ROWS.value]
  return {'shape': SHAPE.value, 'forms': FORMS.value, 'rows': rows}


def main(asked: dict[str, Any], place: workdir.Workdir) -> outcome.Outcome:
  """An entry for each form."""
  shown, found = [], []
  for form in asked['forms']:
    lines: list[str] = []
    inner: list[int] = []
    # The most rows say in which steps a sum is made: in the same for all.
    for rows in sorted(asked['rows'], reverse=True):
      sweep = tile_sweep.Sweep(tile_sweep.Case(asked['shape'], form, rows))
      first, second = sweep.best(inner)
      inner = [first.tile.inner, second.tile.inner]
      lines.insert(0, f'    {rows}: ({_tile(first)}, {_tile(second)}),')
      print(f'# {form} {rows} rows: {_words(first)}; {_words(second)}')
      tiles = [tuple(first.tile), tuple(second.tile)]
      found.append({'form': form, 'rows': rows, 'tiles': tiles})
      place.note(found[-1])
    head = f'  {(sweep.form, *sweep.shape[1:])}: {{'
    shown.append('\n'.join([head, *lines, '  },']))
  return outcome.Outcome({'rows': found}, tuple(shown))


def _tile(found: tile_sweep.Found) -> str:
  return f'Tile{tuple(found.tile)}'


def _words(found: tile_sweep.Found) -> str:
  return f'{found.before_us:.1f} -> {found.us:.1f} us'


if __name__ == '__main__':
  launcher.run(main, build_config)
