"""Measures this machine and writes platform.json, which the simulator reads.

python -m bevy_jax.experiments.calibrate --out=platform.json
python -m bevy_jax.experiments.calibrate --shape=num_layers=2,expert_dim=768
"""

from absl import app, flags

from bevy_jax import config as config_lib
from bevy_jax.experiments import calibration

OUT = flags.DEFINE_string('out', 'platform.json', 'Where the platform goes.')
MODEL = flags.DEFINE_string('model', 'demo', "'demo' or a model's directory.")
SHAPE = flags.DEFINE_list(
  'shape', [], 'field=value,... of a random model in place of a real one.'
)
REQUESTS = flags.DEFINE_integer('requests', 8, 'Rows of the largest launch.')
CACHE = flags.DEFINE_float('cache', 0.5, 'Fraction of all experts.')
CONTEXT = flags.DEFINE_integer(
  'context', 0, 'Positions of a row, all of which attention goes through.'
)
LINK = flags.DEFINE_string('link', 'auto', 'auto, cuda or device_put.')


def main(argv: list[str]) -> None:
  """Runs it; what is wrong with the input is one paragraph."""
  if len(argv) > 1:
    raise app.UsageError(f'not a flag: {argv[1:]}')
  try:
    config = config_lib.EngineConfig(
      requests=REQUESTS.value,
      cache=CACHE.value,
      context=CONTEXT.value,
      link=LINK.value,
      hops=1,  # What is measured is one layer.
    )
    calibration.main(MODEL.value, SHAPE.value, config, OUT.value)
  except ValueError as error:
    raise SystemExit(f'calibrate: {error}') from error


if __name__ == '__main__':
  app.run(main)
