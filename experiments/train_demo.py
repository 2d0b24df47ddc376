"""Trains the demo model; the same command again resumes where it stopped.

python -m bevy_jax.experiments.train_demo --corpus=DIR --plan_minutes=15
"""

import logging
import pathlib

import jax
from absl import flags
from rich import logging as rich_logging

from bevy_jax.experiments import (
  ablation,
  demo_model,
  forward,
  launcher,
  outcome,
  overrides,
  train_loop,
  workdir,
)

CORPUS = flags.DEFINE_string(
  'corpus', None, 'Has {books,python}.{train,valid}.txt.xz.', required=True
)
TARGET = flags.DEFINE_string(
  'target', 'bevy_jax/demo', 'Folder for the Hugging Face directory.'
)
TOKENIZER = flags.DEFINE_string(
  'tokenizer', 'bevy_jax/demo/tokenizer.json', 'Trained first where missing.'
)
MODEL = flags.DEFINE_enum('model', 'demo', [*demo_model.CONFIGS], 'Its shape.')
STEPS = flags.DEFINE_integer(
  'steps', 0, 'Length of the schedule; 0 fixes it from --plan_minutes.'
)
PLAN = flags.DEFINE_float(
  'plan_minutes', 0.0, 'Training time of the whole schedule, all calls.'
)
STRETCH = flags.DEFINE_float(
  'stretch_minutes', 9.0, 'This call stops training after that.'
)
SAMPLES = flags.DEFINE_integer(
  'samples', 120, 'New tokens of each sample text, 0 for no samples.'
)
SET = flags.DEFINE_multi_string(
  'set', [], 'field=value or train.field=value of the job.'
)


def build_config() -> train_loop.Job:
  """The flags as one job; ValueError says what ails."""
  job = train_loop.Job(
    corpus=pathlib.Path(CORPUS.value),
    work=pathlib.Path(launcher.WORKDIR.value),
    target=pathlib.Path(TARGET.value),
    tokenizer=pathlib.Path(TOKENIZER.value),
    model=demo_model.CONFIGS[MODEL.value](),
    steps=STEPS.value,
    plan_minutes=PLAN.value,
    stretch_minutes=STRETCH.value,
  )
  job = overrides.apply(job, SET.value)
  kind = forward.best_attention(job.model, job.train.window)
  return overrides.apply(job, [f'train.attention={kind}'])


def main(job: train_loop.Job, place: workdir.Workdir) -> outcome.Outcome:
  """One stretch: train, save, judge, export, show samples."""
  handler = rich_logging.RichHandler(show_path=False, show_level=False)
  logging.basicConfig(
    level=logging.INFO, format='%(message)s', force=True, handlers=[handler]
  )
  logging.getLogger('absl').setLevel(logging.WARNING)
  cache = job.work.absolute() / 'compiled'
  jax.config.update('jax_compilation_cache_dir', str(cache))
  run = train_loop.Run(job)
  metrics = run.finish(run.train())
  place.note({k: metrics[k] for k in ('step', 'finished', 'tokens_seen')})
  if SAMPLES.value:
    run.samples(SAMPLES.value)
  rows = [{'text': name} | told for name, told in metrics['texts'].items()]
  return outcome.Outcome(metrics, (ablation.table(rows),))


if __name__ == '__main__':
  flags.set_default(launcher.WORKDIR, 'runs/demo')
  launcher.run(main, build_config, resumable=True)
