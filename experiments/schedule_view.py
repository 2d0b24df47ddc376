"""Draws what schedulers do: requests against time, the link beneath.

python -m bevy_jax.experiments.schedule_view --compare=lockstep,runahead
python -m bevy_jax.experiments.schedule_view --events=a.jsonl --experts=32

Without --events recorded routing is simulated, which takes seconds. `decode
--events=FILE` writes such files.
"""

import pathlib

from absl import app, flags

from bevy_jax import events as events_lib
from bevy_jax import platforms
from bevy_jax.experiments import (
  configs,
  figures_style,
  overrides,
  schedule_picture,
  simulation,
)

OUT = flags.DEFINE_string('out', 'schedule.png', 'PNG, SVG or PDF to write.')
EVENTS = flags.DEFINE_list('events', [], 'Event files, instead of simulating.')
EXPERTS = flags.DEFINE_integer('experts', 0, 'Of a layer in those files.')
BEGIN = flags.DEFINE_float('begin_ms', 0.0, 'After the measured window opens.')
LENGTH = flags.DEFINE_float('length_ms', 0.0, 'Of time; 0: some tokens.')
COMPARE = flags.DEFINE_list(
  'compare', ['lockstep', 'runahead'], 'scheduler[:eviction[:prefetch]].'
)
TRACE = flags.DEFINE_string('trace', 'bundled', 'Recorded routing.')
PLATFORM = flags.DEFINE_string(
  'platform', 'rtx4090', ', '.join(platforms.PLATFORMS) + ' or file:PATH.'
)
SHAPE = flags.DEFINE_string('model_shape', 'gpt-oss-20b:int4', 'See replay.')
REQUESTS = flags.DEFINE_integer('requests', 8, 'Rows that decode at once.')
CACHE = flags.DEFINE_string('cache', '0.75', 'Fraction, or number of slots.')
TOKENS = flags.DEFINE_integer('tokens', 24, 'Tokens a request in all.')
SKIP = flags.DEFINE_integer('skip', 16, 'Of these, before the picture.')


def simulate() -> tuple[schedule_picture.Logs, int, str]:
  """Logs by name, experts of a layer, and what ran, in words."""
  config = simulation.Replay(
    trace=TRACE.value, platform=PLATFORM.value, model_shape=SHAPE.value,
    requests=REQUESTS.value, cache=overrides.parse(CACHE.value),
    tokens=TOKENS.value, skip=SKIP.value, eviction='reuse',
    compare=tuple(COMPARE.value), bounds=False,
  )  # fmt: skip
  whole = simulation.Simulation(config)
  logs = {configs.title(v): whole.run(*v).log for v in config.variants()}
  words = f'{SHAPE.value}, {TRACE.value} routing, {PLATFORM.value} simulated'
  return logs, whole.trace.num_experts, f'{words}, cache {CACHE.value}'


def read() -> tuple[schedule_picture.Logs, int, str]:
  """The same of event files."""
  if EXPERTS.value < 1:
    raise ValueError('say with --experts how many a layer of the model has.')
  logs = {pathlib.Path(p).name: events_lib.load(p)[1] for p in EVENTS.value}
  return logs, EXPERTS.value, ''


def main(argv: list[str]) -> None:
  """Writes the picture; what is wrong with the input is one paragraph."""
  if len(argv) > 1:
    raise app.UsageError(f'not a flag: {argv[1:]}')
  try:
    figures_style.require()
    logs, experts, words = read() if EVENTS.value else simulate()
    skip = 1 if EVENTS.value else SKIP.value
    made = schedule_picture.draw(
      logs, experts, skip=skip, begin_ms=BEGIN.value,
      length_ms=LENGTH.value or None, title=words,
    )  # fmt: skip
    made.savefig(OUT.value, dpi=figures_style.DPI)
  except (ValueError, OSError) as error:
    raise SystemExit(f'schedule_view: {error}') from error
  print(f'picture: {OUT.value}')


if __name__ == '__main__':
  app.run(main)
