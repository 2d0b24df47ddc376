"""Measures this machine and writes platform.json, which the simulator reads.

python -m bevy_jax.experiments.calibrate --out=platform.json
python -m bevy_jax.experiments.calibrate --shape=num_layers=2,expert_dim=768
"""

from absl import flags

from bevy_jax import config as config_lib
from bevy_jax.experiments import calibration, launcher, outcome, workdir

OUT = flags.DEFINE_string('out', '', 'The platform; empty: platform.json.')
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


def build_config() -> calibration.Asked:
  """What is measured."""
  return calibration.Asked(
    model=MODEL.value,
    shape=tuple(SHAPE.value),
    engine=config_lib.EngineConfig(
      requests=REQUESTS.value,
      cache=CACHE.value,
      context=CONTEXT.value,
      link=LINK.value,
      hops=1,  # What is measured is one layer.
    ),
  )


def main(asked: calibration.Asked, place: workdir.Workdir) -> outcome.Outcome:
  """Measures and writes the platform."""
  out = place.path(OUT.value, 'platform.json') or 'platform.json'
  return calibration.main(asked, out)


if __name__ == '__main__':
  launcher.run(main, build_config)
