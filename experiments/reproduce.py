"""The article's figures from one command: five experiments, one HTML report.

python -m bevy_jax.experiments.reproduce --out=DIR
python -m bevy_jax.experiments.reproduce --out=DIR --only=throughput --jobs=8

On a simulated machine with recorded routing, and measured with the demo model.
What was stopped goes on: cells that lie in DIR are not run again.
"""

from absl import flags

from bevy_jax.experiments import (
  launcher,
  outcome,
  reproduction,
  simulated_cells,
  workdir,
)

OUT = flags.DEFINE_string(
  'out', '', 'A folder for everything; reproduced if empty.'
)
ONLY = flags.DEFINE_list(
  'only', [], f'Of {", ".join(reproduction.EXPERIMENTS)}; all if empty.'
)
QUICK = flags.DEFINE_bool('quick', False, 'Tiny cells, to see that it works.')
DEMO = flags.DEFINE_bool('demo', True, 'Whether the demo model is measured.')
TRACE = flags.DEFINE_string('trace', 'bundled', 'Recorded routing.')
SHAPE = flags.DEFINE_string(
  'model_shape', simulated_cells.DEFAULT.model_shape, 'What experts weigh.'
)
FIRST = flags.DEFINE_integer('first', 0, 'First request of the trace.')
JOBS = flags.DEFINE_integer('jobs', 2, 'Processes.', lower_bound=1)
SEED = flags.DEFINE_integer('seed', 0, 'Of what is drawn.')


def build_choice() -> reproduction.Choice:
  """What the flags ask for."""
  return reproduction.Choice(
    only=ONLY.value, quick=QUICK.value, trace=TRACE.value,
    model_shape=SHAPE.value, first=FIRST.value, demo=DEMO.value,
    seed=SEED.value,
  )  # fmt: skip


def main(
  choice: reproduction.Choice, place: workdir.Workdir
) -> outcome.Outcome:
  """Writes the report, which goes on with what lies in its folder."""
  folder = place.path(OUT.value, 'reproduced') or 'reproduced'
  try:
    path = reproduction.main(folder, choice, JOBS.value, _say)
  except KeyboardInterrupt:
    print('stopped; the same command goes on where it was', flush=True)
    raise
  return outcome.Outcome({'report': str(path)}, (f'report: {path}',))


def _say(text: str) -> None:
  print(text, flush=True)


if __name__ == '__main__':
  launcher.run(main, build_choice, resumable=True, device=False)
