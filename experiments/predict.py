"""Predicted against measured tokens/s of a model on this machine, one table.

python -m bevy_jax.experiments.predict --platform=file:platform.json \\
  --link=throttled:0.17 --csv=predicted.csv --report=predicted.json

The platform is what `experiments.calibrate` measured on the same machine, in
runs of its own with other prompts. On a GPU --new_tokens=32 --repeats=3 are
done in a minute; see `prediction.compare` for what is compiled.
"""

import functools

from absl import app, flags

from bevy_jax.experiments import ablation, configs, overrides, prediction

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
REPORT = flags.DEFINE_string('report', '', 'Where to write them as JSON.')


def build_config() -> configs.Decode:
  """The runs on the device that the flags ask for."""
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
  return configs.assign(base, SET.value)


def main(argv: list[str]) -> None:
  """Prints the table, writes the CSV."""
  if len(argv) > 1:
    raise app.UsageError(f'not a flag: {argv[1:]}')
  try:
    if not PLATFORM.value:
      raise ValueError('name the platform that calibrate wrote: file:PATH.')
    config = build_config()
    plan = prediction.Plan(
      platform=PLATFORM.value,
      caches=[float(cache) for cache in CACHES.value],
      variants=config.variants(),
      repeats=REPEATS.value,
    )
    say = functools.partial(print, flush=True)
    rows = list(prediction.compare(config, plan, say))
    if CSV.value:
      ablation.save(CSV.value, rows)
    if REPORT.value:
      prediction.save(REPORT.value, PLATFORM.value, rows)
  except (ValueError, OSError) as error:
    raise SystemExit(f'predict: {error}') from error
  except KeyboardInterrupt:
    raise SystemExit(130) from None
  print(ablation.table(rows))
  print(prediction.verdict(rows))


if __name__ == '__main__':
  app.run(main)
