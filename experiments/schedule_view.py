"""Draws what schedulers do: requests against time, the link beneath.

python -m bevy_jax.experiments.schedule_view --compare=lockstep,runahead
python -m bevy_jax.experiments.schedule_view --events=a.jsonl --experts=32

Without --events recorded routing is simulated, which takes seconds. `decode
--events=FILE` writes such files.
"""

from absl import flags

from bevy_jax import platforms
from bevy_jax.experiments import (
  figures_style,
  launcher,
  outcome,
  overrides,
  schedule_job,
  simulation,
  workdir,
)

OUT = flags.DEFINE_string('out', '', 'PNG, SVG or PDF; if empty schedule.png.')
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


def build_config() -> schedule_job.View:
  """The picture that the flags ask for."""
  figures_style.require()
  replay = simulation.Replay(
    trace=TRACE.value, platform=PLATFORM.value, model_shape=SHAPE.value,
    requests=REQUESTS.value, cache=overrides.parse(CACHE.value),
    tokens=TOKENS.value, skip=SKIP.value, eviction='reuse',
    compare=tuple(COMPARE.value), bounds=False,
  )  # fmt: skip
  if EVENTS.value and EXPERTS.value < 1:
    raise ValueError('say with --experts how many a layer of the model has.')
  return schedule_job.View(
    replay, tuple(EVENTS.value), EXPERTS.value,
    1 if EVENTS.value else SKIP.value, BEGIN.value, LENGTH.value or None,
  )  # fmt: skip


def main(view: schedule_job.View, place: workdir.Workdir) -> outcome.Outcome:
  """Writes the picture."""
  path = place.path(OUT.value, 'schedule.png') or 'schedule.png'
  schedule_job.draw(view).savefig(path, dpi=figures_style.DPI)
  return outcome.Outcome({'picture': path}, (f'picture: {path}',))


if __name__ == '__main__':
  launcher.run(main, build_config, device=False)
