"""Compiles the engine's modules to C; runs use them until a text changes.

python -m bevy_jax.experiments.compile_engine
"""

import time
from typing import Any

from bevy_jax import compiled
from bevy_jax.experiments import compilation, launcher, outcome, workdir


def build_config() -> dict[str, Any]:
  """What is compiled; nothing is asked for."""
  return {'modules': compiled.MODULES}


def main(asked: dict[str, Any], place: workdir.Workdir) -> outcome.Outcome:
  """Compiles them; says where they lie and how long it took."""
  del place  # They have their own.
  begun = time.monotonic()
  folder = compilation.build()
  seconds = time.monotonic() - begun
  found: dict[str, Any] = {
    'folder': str(folder),
    'modules': len(asked['modules']),
    'seconds': round(seconds, 1),
  }
  said = (
    f'{len(asked["modules"])} modules compiled in {seconds:.0f} s; runs of '
    f'this Python use them from now on.\n{folder}\n'
    'BEVY_COMPILED=0 turns them off.'
  )
  return outcome.Outcome(found, (said,))


if __name__ == '__main__':
  launcher.run(main, build_config, device=False)
