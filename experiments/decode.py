"""Decodes prompts with experts offloaded; prints texts and one table.

python -m bevy_jax.experiments.decode --config=demo
python -m bevy_jax.experiments.decode --model=DIR --cache=0.25 --compare=...
"""

from absl import flags

from bevy_jax import config as config_lib
from bevy_jax.experiments import (
  configs,
  job,
  launcher,
  outcome,
  overrides,
  workdir,
)

CONFIG = flags.DEFINE_string('config', 'plain', 'Named config to start from.')
MODEL = flags.DEFINE_string('model', None, "'demo' or a model's directory.")
SCHEDULER = flags.DEFINE_string('scheduler', None, 'lockstep or runahead.')
EVICTION = flags.DEFINE_string('eviction', None, f'{config_lib.names()}.')
PREFETCH = flags.DEFINE_string('prefetch', None, 'E.g. next_gate:depth=2.')
CACHE = flags.DEFINE_string('cache', None, 'Fraction (0.5) or slots (64).')
HOST_GIB = flags.DEFINE_float('host_gib', None, 'GiB for experts; 0: all.')
HOPS = flags.DEFINE_string('hops', None, "Layers a launch, or 'pass'.")
REQUESTS = flags.DEFINE_integer('requests', None, 'Rows that decode at once.')
PROMPTS = flags.DEFINE_string('prompts', None, 'JSON lines with "prompt".')
COUNT = flags.DEFINE_integer('count', None, 'How many of the prompts; 0: all.')
NEW_TOKENS = flags.DEFINE_integer('new_tokens', None, 'Tokens a request.')
TEMPERATURE = flags.DEFINE_float('temperature', None, '0 is greedy.')
TOP_P = flags.DEFINE_float('top_p', None, 'Probability mass to keep.')
SEED = flags.DEFINE_integer('seed', None, 'Request n draws with seed + n.')
LINK = flags.DEFINE_string(
  'link', None, 'auto, cuda, device_put, throttled:GB_PER_S, balanced:SHARE.'
)
COMPARE = flags.DEFINE_list(
  'compare', None, 'scheduler[:eviction[:prefetch]] ... to compare.'
)
SET = flags.DEFINE_multi_string('set', [], 'field=value, of run or engine.')
RECORD = flags.DEFINE_string('record', '', 'Trace (.npz) of the first run.')
EVENTS = flags.DEFINE_string('events', '', 'Where to write the event log.')
TIMELINE = flags.DEFINE_string('timeline', '', 'For Perfetto: RUN.json.gz.')


def build_config() -> configs.Decode:
  """The experiment that the flags ask for; ValueError says what ails."""
  config_lib.choose('config', CONFIG.value, configs.CONFIGS)
  base = configs.CONFIGS[CONFIG.value]()
  link, balance = LINK.value, None if LINK.value is None else 0.0
  if link is not None and link.startswith('balanced'):
    balance, link = configs.share(link), None
  compare = COMPARE.value
  if compare is None and SCHEDULER.value is not None:
    compare = []  # One scheduler was asked for, not the config's comparison.
  engine = {
    'scheduler': SCHEDULER.value,
    'eviction': EVICTION.value,
    'prefetch': PREFETCH.value,
    'cache': overrides.parse(CACHE.value),
    'hops': overrides.parse(HOPS.value),
    'host_gib': HOST_GIB.value,
    'requests': REQUESTS.value,
    'link': link,
  }
  changes = {
    'model': MODEL.value,
    'engine': overrides.replace(base.engine, engine),
    'prompts': PROMPTS.value,
    'count': COUNT.value,
    'new_tokens': NEW_TOKENS.value,
    'temperature': TEMPERATURE.value,
    'top_p': TOP_P.value,
    'seed': SEED.value,
    'balance': balance,
    'compare': None if compare is None else tuple(compare),
  }
  config = configs.assign(overrides.replace(base, changes), SET.value)
  return config.checked()  # Before a model is opened.


def main(config: configs.Decode, place: workdir.Workdir) -> outcome.Outcome:
  """Runs every variant."""
  del place  # Nothing is written but what all launchers write.
  return job.main(config, EVENTS.value, RECORD.value, TIMELINE.value)


if __name__ == '__main__':
  launcher.run(main, build_config)
