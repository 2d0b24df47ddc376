"""Runahead against lockstep: interleaved pairs in one process.

python -m bevy_jax.experiments.bench --share=0.5 --pairs=7
python -m bevy_jax.experiments.bench --schedulers=lockstep,bevy,runahead

The bar: with lockstep's measured device share s in .4 to .6, the median
ratio is at least 0.65 / max(s, 1 - s); overlap alone cannot give more than
1 / max(s, 1 - s). All sides do the same work from a cold cache. With
--schedulers each is set beside the one before it: `bevy` is at least 1.2 of
`lockstep`, and `runahead` is no slower than `bevy`.
"""

import dataclasses
import json
from typing import Any

from absl import app, flags

from bevy_jax import config as config_lib
from bevy_jax.experiments import ablation, configs, pairs, run

CONFIG = flags.DEFINE_string('config', 'demo', 'Named config.')
PAIRS = flags.DEFINE_integer('pairs', 7, 'How many pairs.', lower_bound=1)
SHARE = flags.DEFINE_float('share', 0.5, 'Device share of lockstep to set.')
NEW_TOKENS = flags.DEFINE_integer('new_tokens', 96, 'Tokens a request.')
CACHE = flags.DEFINE_float('cache', 0.5, 'Fraction of all experts.')
REQUESTS = flags.DEFINE_integer('requests', 8, 'Rows that decode at once.')
SCHEDULERS = flags.DEFINE_list(
  'schedulers', [], 'Rounds of these instead of pairs.'
)
REPORT = flags.DEFINE_string('report', '', 'Where to write the figures.')


def build_config() -> configs.Decode:
  """The experiment that the flags ask for."""
  config_lib.choose('config', CONFIG.value, configs.CONFIGS)
  base = configs.CONFIGS[CONFIG.value]()
  return dataclasses.replace(
    base,
    balance=SHARE.value,
    new_tokens=NEW_TOKENS.value,
    engine=dataclasses.replace(
      base.engine, cache=CACHE.value, requests=REQUESTS.value
    ),
    compare=tuple(SCHEDULERS.value) or ('lockstep', 'runahead'),
  )


def measure(bench: run.Bench) -> dict[str, Any]:
  """All rounds, and what they say."""
  if not SCHEDULERS.value:
    return pairs.judge(pairs.measure(bench, PAIRS.value, print))
  found = pairs.ratios(pairs.rounds(bench, PAIRS.value, print))
  return {'link': bench.link, 'versions': run.versions(), 'ratios': found}


def main(argv: list[str]) -> None:
  """Measures and prints; the figures are medians over the pairs."""
  if len(argv) > 1:
    raise app.UsageError(f'not a flag: {argv[1:]}')
  try:
    bench = run.Bench(build_config(), lambda what: print(what, '...'))
    outcome = measure(bench)
  except ValueError as error:
    raise SystemExit(f'bench: {error}') from error
  except KeyboardInterrupt:
    raise SystemExit(130) from None
  for name, value in outcome.items():
    print(f'{name:>22}: {value}')
  if SCHEDULERS.value:
    print(ablation.table(outcome['ratios']))
  if REPORT.value:
    with open(REPORT.value, 'w', encoding='utf-8') as file:
      json.dump({'command': run.command()} | outcome, file, indent=1)


if __name__ == '__main__':
  app.run(main)
