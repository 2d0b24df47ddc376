"""Microseconds of a layer and of a launch's call, everything resident.

python -m bevy_jax.experiments.launch_speed --shape=qwen3-30b-a3b --forms=bf16
"""

import itertools
from typing import Any

from absl import flags

from bevy_jax import config as config_lib
from bevy_jax.experiments import (
  bench_models,
  launch_times,
  launcher,
  outcome,
  run,
  workdir,
)

SHAPE = flags.DEFINE_string('shape', 'qwen3-30b-a3b', 'Whose layers.')
FORMS = flags.DEFINE_list('forms', ['bf16', 'int8', 'int4:32'], 'Of experts.')
ROWS = flags.DEFINE_list('rows', ['1', '8', '32'], 'Rows of a launch.')
HOPS = flags.DEFINE_list('hops', ['1', '4'], 'Layers of a launch.')
CONTEXT = flags.DEFINE_integer('context', 512, 'Positions of each row.')
KERNELS = flags.DEFINE_enum(
  'kernels', 'auto', config_lib.KERNELS, 'Which form.'
)


def build_config() -> dict[str, Any]:
  """Which points are measured."""
  config_lib.choose('shape', SHAPE.value, bench_models.MODELS)
  return {
    'shape': SHAPE.value,
    'forms': FORMS.value,
    'rows': [int(rows) for rows in ROWS.value],
    'hops': [int(hops) for hops in HOPS.value],
    'context': CONTEXT.value,
    'kernels': KERNELS.value,
  }


def main(asked: dict[str, Any], place: workdir.Workdir) -> outcome.Outcome:
  """A line for each point; the report says where and with what."""
  rows, lines = [], []
  for form, count, hops in itertools.product(
    asked['forms'], asked['rows'], asked['hops']
  ):
    point = launch_times.Point(
      asked['shape'], form, count, hops, asked['context'], asked['kernels']
    )
    cost = launch_times.measure(point, lambda words: None)
    rows.append(point._asdict() | cost._asdict())
    place.note(rows[-1])
    lines.append(_line(point, cost))
    print(lines[-1], flush=True)
  facts = {'versions': run.versions(), 'device': run.device(), 'rows': rows}
  return outcome.Outcome(facts, tuple(lines))


def _line(point: launch_times.Point, cost: launch_times.Cost) -> str:
  return (
    f'{point.form:<8} {point.rows:>3} rows {point.hops} hops: layer '
    f'{cost.layer_us:.1f} us (floor {cost.floor_us:.1f}, '
    f'{cost.distinct:.0f} experts), call {cost.host_us:.1f} us, head and '
    f'sampling {cost.head_us:.0f} us, kernels {cost.kernels}'
  )


if __name__ == '__main__':
  launcher.run(main, build_config)
