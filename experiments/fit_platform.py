"""Fits the constants of a platform to measured times of one model's layers.

python -m bevy_jax.experiments.fit_platform --folder=DIR

DIR holds moe.csv (tokens, activated_experts, time_us) and dense.csv (layer,
tokens, time_us) of Qwen3-30B-A3B; see `platforms.RTX_PRO_6000`.
"""

import pathlib

from absl import app, flags

from bevy_jax.experiments import platform_fit

FOLDER = flags.DEFINE_string('folder', '', 'Where the measurements lie.')


def main(argv: list[str]) -> None:
  """Prints the constants."""
  if len(argv) > 1:
    raise app.UsageError(f'not a flag: {argv[1:]}')
  try:
    found = platform_fit.fit(pathlib.Path(FOLDER.value))
  except (OSError, KeyError, ValueError) as error:
    raise SystemExit(f'fit_platform: {FOLDER.value}: {error}') from error
  for name, value in found._asdict().items():
    print(f'{name} {value:.4g}')


if __name__ == '__main__':
  app.run(main)
