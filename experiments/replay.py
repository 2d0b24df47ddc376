"""Replays recorded routing on a simulated machine; prints one table.

python -m bevy_jax.experiments.replay --trace=bundled --platform=rtx4090 \\
  --model_shape=qwen3-30b-a3b:int4 --compare=lockstep:lru,runahead:reuse
"""

from typing import Any

from absl import flags

from bevy_jax import config as config_lib
from bevy_jax import platforms, shapes
from bevy_jax import report as report_lib
from bevy_jax.experiments import (
  launcher,
  outcome,
  overrides,
  simulation,
  workdir,
)

TRACE = flags.DEFINE_string(
  'trace', 'bundled', "A routing trace, 'bundled', or synthetic zipf[:POWER]."
)
PLATFORM = flags.DEFINE_string(
  'platform', 'rtx4090', ', '.join(platforms.PLATFORMS) + ' or file:PATH.'
)
SHAPE = flags.DEFINE_string(
  'model_shape', '', ', '.join(shapes.SHAPES) + '; then :int8 or :int4.'
)
EXPERT_MB = flags.DEFINE_float('expert_mb', 0.0, 'MB of an expert, instead.')
LAYER_MB = flags.DEFINE_float('layer_mb', 40.0, 'MB of the rest of a layer.')
HEAD_MB = flags.DEFINE_float('head_mb', 0.0, 'MB of the head.')
REQUESTS = flags.DEFINE_integer('requests', 8, 'Rows that decode at once.')
CACHE = flags.DEFINE_string('cache', '0.5', 'Fraction, or number of slots.')
SCHEDULER = flags.DEFINE_string(
  'scheduler', 'runahead', ', '.join(config_lib.SCHEDULERS) + '.'
)
EVICTION = flags.DEFINE_string(
  'eviction', 'lfu_decayed', ', '.join(config_lib.names()) + '.'
)
HOPS = flags.DEFINE_string('hops', '1', "Layers a launch, or 'pass'.")
PREFETCH = flags.DEFINE_string('prefetch', 'auto', "'none' for none at all.")
COMPARE = flags.DEFINE_list(
  'compare', [], 'scheduler[:eviction[:prefetch]] variants to compare.'
)
FIRST = flags.DEFINE_integer('first', 0, 'First request of the trace.')
COUNT = flags.DEFINE_integer('count', 0, 'Requests admitted; 0: as many as R.')
SKIP = flags.DEFINE_integer('skip', 32, 'Tokens before the measured window.')
TOKENS = flags.DEFINE_integer('tokens', 0, 'Tokens a request in all; 0: all.')
LINK = flags.DEFINE_string('link', '', 'throttled:GB_PER_S[:LATENCY_US].')
PRIORITY = flags.DEFINE_bool('priority', False, 'Demand overtakes prefetches.')
BOUNDS = flags.DEFINE_bool('bounds', True, 'Whether bounds are computed too.')
TIMELINE = flags.DEFINE_string('timeline', '', 'For Perfetto: RUN.json.gz.')

_PLAIN = (TRACE, PLATFORM, SHAPE, EXPERT_MB, LAYER_MB, HEAD_MB, REQUESTS,
  SCHEDULER, EVICTION, PREFETCH, FIRST, COUNT, SKIP, TOKENS, LINK, PRIORITY,
  BOUNDS,
)  # fmt: skip


def build_config() -> simulation.Replay:
  """The experiment that the flags ask for; ValueError says what ails."""
  plain: dict[str, Any] = {flag.name: flag.value for flag in _PLAIN}
  return simulation.Replay(
    cache=overrides.parse(CACHE.value),
    hops=overrides.parse(HOPS.value),
    compare=tuple(COMPARE.value),
    **plain,
  )


def main(asked: simulation.Replay, place: workdir.Workdir) -> outcome.Outcome:
  """Replays every variant."""
  del place  # Nothing is written but what all launchers write.
  runs = simulation.main(asked, print, TIMELINE.value)
  reports = [run.report for run in runs]
  shown = report_lib.table(reports), reports[0]['note']
  return outcome.Outcome(report_lib.whole(reports), shown)


if __name__ == '__main__':
  launcher.run(main, build_config, device=False)
