"""Converts a Hugging Face directory: python -m bevy_jax.experiments.convert.

python -m bevy_jax.experiments.convert --source=DIR --target=DIR
"""

from collections.abc import Sequence

import rich.progress
from absl import app, flags

from bevy_jax import conversion

_SOURCE = flags.DEFINE_string(
  'source', None, "Hugging Face directory, or 'demo'.", required=True
)
_TARGET = flags.DEFINE_string(
  'target', None, 'Directory to write; resumed if half-written.', required=True
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
      )
    except ValueError as error:
      raise SystemExit(f'error: {error}') from error
  if found is None:
    print(f'{_TARGET.value} is complete already; nothing to do.')
  else:
    print(f'{_TARGET.value} is complete ({found} experts found there).')


if __name__ == '__main__':
  app.run(main)
