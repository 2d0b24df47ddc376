"""Converts a Hugging Face directory: python -m bevy_jax.experiments.convert.

python -m bevy_jax.experiments.convert --source=DIR --target=DIR --experts=int4
"""

from collections.abc import Sequence

import rich.progress
from absl import app, flags

from bevy_jax import conversion, storage

_SOURCE = flags.DEFINE_string(
  'source', None, "Hugging Face directory, or 'demo'.", required=True
)
_TARGET = flags.DEFINE_string(
  'target', None, 'Directory to write; resumed if half-written.', required=True
)

_EXPERTS = flags.DEFINE_string(
  'experts', '', 'bf16, f16, f32, int8 or int4; as in the source if empty.'
)
_GROUP = flags.DEFINE_integer(
  'group', 32, 'Weights that share a scale, with int8 and int4: 32, 64 or 128.'
)
_ZERO_POINT = flags.DEFINE_bool(
  'zero_point', False, 'With int4: a zero point a group, so asymmetric.'
)


def main(argv: Sequence[str]) -> None:
  """Converts, showing progress; errors end it with one line and status 1."""
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {argv[1:]}.')
  columns = (
    rich.progress.TextColumn('{task.description}'),
    rich.progress.BarColumn(),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TimeRemainingColumn(),
  )
  with rich.progress.Progress(*columns) as bar:
    task = bar.add_task('experts', total=None)
    try:
      found = conversion.convert(
        _SOURCE.value,
        _TARGET.value,
        lambda done, total: bar.update(task, completed=done, total=total),
        _storage(),
      )
    except ValueError as error:
      raise SystemExit(f'error: {error}') from error
  if found is None:
    print(f'{_TARGET.value} is complete already; nothing to do.')
  else:
    print(f'{_TARGET.value} is complete ({found} experts found there).')


def _storage() -> storage.Storage | None:
  name = _EXPERTS.value
  if name.startswith('int'):
    name += f':{_GROUP.value}' + ':zero' * _ZERO_POINT.value
  elif _GROUP.present or _ZERO_POINT.value:
    raise ValueError(
      f'--group and --zero_point are for int8 and int4, not for '
      f'--experts={name!r}.'
    )
  return storage.parse(name) if name else None


if __name__ == '__main__':
  app.run(main)
