"""Fits the constants of a platform to measured times of one model's layers.

python -m bevy_jax.experiments.fit_platform --folder=DIR

DIR holds moe.csv (tokens, activated_experts, time_us) and dense.csv (layer,
tokens, time_us) of Qwen3-30B-A3B; see `platforms.RTX_PRO_6000`.
"""

import pathlib

from absl import flags

from bevy_jax.experiments import launcher, outcome, platform_fit, workdir

FOLDER = flags.DEFINE_string('folder', '', 'Where the measurements lie.')


def build_config() -> dict[str, str]:
  """Where the measurements lie."""
  return {'folder': FOLDER.value}


def main(asked: dict[str, str], place: workdir.Workdir) -> outcome.Outcome:
  """Fits the constants."""
  del place
  try:
    found = platform_fit.fit(pathlib.Path(asked['folder']))
  except KeyError as error:
    raise ValueError(
      f'{asked["folder"]}: there is no column {error}'
    ) from error
  lines = (f'{name} {value:.4g}' for name, value in found._asdict().items())
  return outcome.Outcome(found._asdict(), tuple(lines))


if __name__ == '__main__':
  launcher.run(main, build_config, device=False)
