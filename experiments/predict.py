"""Predicted against measured tokens/s of a model on this machine, one table.

python -m bevy_jax.experiments.predict --platform=file:platform.json \\
  --link=throttled:0.17 --csv=predicted.csv --report=predicted.json

The platform is what `experiments.calibrate` measured on the same machine, in
runs of its own with other prompts. On a GPU --new_tokens=32 --repeats=3 are
done in a minute; see `prediction.compare` for what is compiled.
"""

from absl import flags

from bevy_jax.experiments import (
  ablation,
  configs,
  launcher,
  outcome,
  overrides,
  prediction,
  workdir,
)

PLATFORM = flags.DEFINE_string('platform', '', 'file:PATH of this machine.')
MODEL = flags.DEFINE_string('model', 'demo', "'demo' or a model's directory.")
LINK = flags.DEFINE_string('link', 'throttled:0.17', 'See decode.')
CACHES = flags.DEFINE_list('caches', ['0.25', '0.5', '0.75'], 'Fractions.')
VARIANTS = flags.DEFINE_list(
  'variants', ['lockstep:lfu_decayed', 'runahead:lfu_decayed'],
  'scheduler:eviction pairs.'
)  # fmt: skip
REQUESTS = flags.DEFINE_integer('requests', 8, 'Rows that decode at once.')
TOKENS = flags.DEFINE_integer('new_tokens', 48, 'Tokens a request.')
REPEATS = flags.DEFINE_integer('repeats', 3, 'Runs on the device.')
SET = flags.DEFINE_multi_string('set', [], 'FIELD=VALUE of the run or engine.')
CSV = flags.DEFINE_string('csv', '', 'Where to write the rows.')


def build_config() -> prediction.Asked:
  """The runs on the device that the flags ask for, and what predicts them."""
  if not PLATFORM.value:
    raise ValueError('name the platform that calibrate wrote: file:PATH.')
  base = configs.Decode(
    model=MODEL.value,
    new_tokens=TOKENS.value,
    ignore_eos=True,
    compare=tuple(VARIANTS.value),
  )
  engine = {'link': LINK.value, 'requests': REQUESTS.value}
  base = overrides.replace(
    base, {'engine': overrides.replace(base.engine, engine)}
  )
  base = configs.assign(base, SET.value)
  plan = prediction.Plan(
    platform=PLATFORM.value,
    caches=[float(cache) for cache in CACHES.value],
    variants=base.variants(),
    repeats=REPEATS.value,
  )
  return prediction.Asked(base, plan)


def main(asked: prediction.Asked, place: workdir.Workdir) -> outcome.Outcome:
  """Measures and predicts, writes the CSV."""
  rows = []
  for row in prediction.compare(asked.base, asked.plan, print):
    rows.append(row)
    place.note(row)
  path = place.path(CSV.value, 'rows.csv')
  if path:
    ablation.save(path, rows)
  report = prediction.report(asked.plan.platform, rows)
  shown = ablation.table(rows), prediction.verdict(rows)
  return outcome.Outcome(report, shown)


if __name__ == '__main__':
  launcher.run(main, build_config)
