"""Converts a Hugging Face directory: python -m bevy_jax.experiments.convert.

python -m bevy_jax.experiments.convert --source=DIR --target=DIR --experts=int4
"""

import rich.progress
from absl import flags

from bevy_jax import conversion, storage
from bevy_jax.experiments import launcher, outcome, workdir

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


def build_config() -> dict[str, str]:
  """What is converted into what."""
  return {
    'source': _SOURCE.value,
    'target': _TARGET.value,
    'experts': _storage(),
  }


def main(asked: dict[str, str], place: workdir.Workdir) -> outcome.Outcome:
  """Converts, showing progress."""
  del place
  columns = (
    rich.progress.TextColumn('{task.description}'),
    rich.progress.BarColumn(),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TimeRemainingColumn(),
  )
  name, target = asked['experts'], asked['target']
  with rich.progress.Progress(*columns) as bar:
    task = bar.add_task('experts', total=None)
    found = conversion.convert(
      asked['source'],
      target,
      lambda done, total: bar.update(task, completed=done, total=total),
      storage.parse(name) if name else None,
    )
  if found is None:
    said = f'{target} is complete already; nothing to do.'
  else:
    said = f'{target} is complete ({found} experts found there).'
  return outcome.Outcome({'target': target, 'experts_found': found}, (said,))


def _storage() -> str:
  """The storage by its full name, '' for that of the source."""
  name: str = _EXPERTS.value
  if name.startswith('int'):
    name += f':{_GROUP.value}' + ':zero' * _ZERO_POINT.value
  elif _GROUP.present or _ZERO_POINT.value:
    raise ValueError(
      f'--group and --zero_point are for int8 and int4, not for '
      f'--experts={name!r}.'
    )
  if name:
    storage.parse(name)  # ValueError where it is none.
  return name


if __name__ == '__main__':
  launcher.run(main, build_config)
