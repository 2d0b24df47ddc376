"""Microseconds of a layer and of a launch's call, everything resident.

python -m bevy_jax.experiments.launch_speed --shape=qwen3-30b-a3b --forms=bf16
"""

import itertools
import json
import pathlib

from absl import app, flags

from bevy_jax import config as config_lib
from bevy_jax.experiments import bench_models, launch_times, run

SHAPE = flags.DEFINE_string('shape', 'qwen3-30b-a3b', 'Whose layers.')
FORMS = flags.DEFINE_list('forms', ['bf16', 'int8', 'int4:32'], 'Of experts.')
ROWS = flags.DEFINE_list('rows', ['1', '8', '32'], 'Rows of a launch.')
HOPS = flags.DEFINE_list('hops', ['1', '4'], 'Layers of a launch.')
CONTEXT = flags.DEFINE_integer('context', 512, 'Positions of each row.')
KERNELS = flags.DEFINE_enum(
  'kernels', 'auto', config_lib.KERNELS, 'Which form.'
)
REPORT = flags.DEFINE_string('report', '', 'Where to write the figures.')


def main(argv: list[str]) -> None:
  """Prints a line for each point; the JSON says where and with what."""
  if len(argv) > 1:
    raise app.UsageError(f'not a flag: {argv[1:]}')
  try:
    config_lib.choose('shape', SHAPE.value, bench_models.MODELS)
    rows = []
    for form, count, hops in itertools.product(
      FORMS.value, map(int, ROWS.value), map(int, HOPS.value)
    ):
      point = launch_times.Point(
        SHAPE.value, form, count, hops, CONTEXT.value, KERNELS.value
      )
      cost = launch_times.measure(point, lambda words: None)
      rows.append(point._asdict() | cost._asdict())
      print(_line(point, cost), flush=True)
  except ValueError as error:
    raise SystemExit(f'launch_speed: {error}') from error
  if REPORT.value:
    facts = {'versions': run.versions(), 'device': run.device(), 'rows': rows}
    pathlib.Path(REPORT.value).write_text(json.dumps(facts, indent=2))


def _line(point: launch_times.Point, cost: launch_times.Cost) -> str:
  return (
    f'{point.form:<8} {point.rows:>3} rows {point.hops} hops: layer '
    f'{cost.layer_us:.1f} us (floor {cost.floor_us:.1f}, '
    f'{cost.distinct:.0f} experts), call {cost.host_us:.1f} us, head and '
    f'sampling {cost.head_us:.0f} us, kernels {cost.kernels}'
  )


if __name__ == '__main__':
  app.run(main)
