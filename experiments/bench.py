"""Runahead against the others, in interleaved turns in one process.

python -m bevy_jax.experiments.bench --share=0.5 --pairs=7
python -m bevy_jax.experiments.bench --schedulers=lockstep,bevy,runahead
python -m bevy_jax.experiments.bench --cells=core --report=core.json

Without --cells: the demo model on a throttled link. The bar: with lockstep's
measured device share s in .4 to .6, the median ratio is at least
0.65 / max(s, 1 - s); overlap alone cannot give more than 1 / max(s, 1 - s).
With --schedulers each is set beside the one before it: `bevy` is at least 1.2
of `lockstep`, and `runahead` is no slower than `bevy`.

With --cells: models of published shapes with random weights, see `cells`: a
suite (core, wide, facts310, resident, tiny) or SHAPE/FORM/R/CACHE/ROUTING,...
A report that is there is gone on with; its picture lies beside it.
"""

import dataclasses

from absl import flags

from bevy_jax import config as config_lib
from bevy_jax.experiments import (
  cell_job,
  cell_run,
  cells,
  configs,
  launcher,
  outcome,
  overrides,
  pair_job,
  workdir,
)

CONFIG = flags.DEFINE_string('config', 'demo', 'Named config.')
PAIRS = flags.DEFINE_integer('pairs', 0, '0: 7, or what the cells say.')
SHARE = flags.DEFINE_float('share', 0.5, 'Device share of lockstep to set.')
NEW_TOKENS = flags.DEFINE_integer('new_tokens', 0, '0: 96, or 64 with cells.')
CACHE = flags.DEFINE_float('cache', 0.5, 'Fraction of all experts.')
REQUESTS = flags.DEFINE_integer('requests', 8, 'Rows that decode at once.')
SCHEDULERS = flags.DEFINE_list('schedulers', [], 'Rounds of these, no pairs.')
CELLS = flags.DEFINE_string('cells', '', 'A suite, or cells by name.')
ROUTING = flags.DEFINE_enum('routing', '', ['', *cells.ROUTINGS], 'For cells.')
TRACE = flags.DEFINE_string('trace', '', 'What is replayed; empty: bundled.')
LINK = flags.DEFINE_string('link', 'auto', 'As in EngineConfig, for cells.')
LIMIT_S = flags.DEFINE_float('limit_s', 0, 'Begin nothing later than this.')
SET = flags.DEFINE_multi_string('set', [], 'Field=value of `cell_run.Options`.')


def build_config() -> configs.Decode | cell_job.Asked:
  """The cells, or the demo experiment, that the flags ask for."""
  if CELLS.value:
    options = cell_run.Options(
      new_tokens=NEW_TOKENS.value or 64, trace=TRACE.value, link=LINK.value
    )
    return cell_job.Asked(
      cells.suite(CELLS.value, PAIRS.value, ROUTING.value),
      overrides.apply(options, SET.value),
    )
  config_lib.choose('config', CONFIG.value, configs.CONFIGS)
  base = configs.CONFIGS[CONFIG.value]()
  return dataclasses.replace(
    base,
    balance=SHARE.value,
    new_tokens=NEW_TOKENS.value or 96,
    engine=dataclasses.replace(
      base.engine, cache=CACHE.value, requests=REQUESTS.value
    ),
    compare=tuple(SCHEDULERS.value) or ('lockstep', 'runahead'),
  ).checked()


def main(
  asked: configs.Decode | cell_job.Asked, place: workdir.Workdir
) -> outcome.Outcome:
  """Measures; the figures are medians over the pairs."""
  if isinstance(asked, cell_job.Asked):
    report = place.path(launcher.REPORT.value, 'report.json')
    return cell_job.run(asked, report, LIMIT_S.value)
  rounds = bool(SCHEDULERS.value)
  return pair_job.job(asked, PAIRS.value or 7, place.note, rounds=rounds)


def _goes_on(asked: configs.Decode | cell_job.Asked) -> bool:
  return isinstance(asked, cell_job.Asked)


if __name__ == '__main__':
  launcher.run(main, build_config, resumable=_goes_on)
