"""The article's figures: every experiment, one report."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bevy_jax import config as config_lib
from bevy_jax.experiments import (
  artifacts,
  cell_sweep,
  demo_cells,
  figures_style,
  html_report,
  prefetch_accuracy,
  prefetch_benefit,
  run,
  scheduler_ablation,
  simulated_cells,
  stall_breakdown,
  study,
  throughput,
)

_TITLE = 'Bevy-JAX: the figures of the article'
_TINY = simulated_cells.Settings(skip=1, tokens=4)


class Experiment(NamedTuple):
  """One of them.

  Attributes:
    make: its configuration -> its cells and figures.
    full: the configuration of the report.
    quick: so small that it takes seconds, to see that all works.
  """

  make: Callable[[Any], study.Study]
  full: Any
  quick: Any


EXPERIMENTS = {
  prefetch_accuracy.NAME: Experiment(
    prefetch_accuracy.make,
    prefetch_accuracy.Config(),
    prefetch_accuracy.Config(
      base=_TINY, requests=2, caches=(0.25, 0.75), ahead=2, demo=None,
      predictors=('transition', 'history'),
    ),
  ),
  prefetch_benefit.NAME: Experiment(
    prefetch_benefit.make,
    prefetch_benefit.Config(),
    prefetch_benefit.Config(
      base=_TINY, requests=2, caches=(0.25, 0.75),
      variants=(
        ('runahead', 'reuse', 'none'),
        ('lockstep', 'lru', 'none'),
        ('lockstep', 'lru', 'history:guarded=false'),
      ),
    ),
  ),
  throughput.NAME: Experiment(
    throughput.make,
    throughput.Config(),
    throughput.Config(
      base=_TINY, places=('rtx4090',), requests=(2, 17), caches=(0.25,),
      demo=None,
    ),
  ),
  scheduler_ablation.NAME: Experiment(
    scheduler_ablation.make,
    scheduler_ablation.Config(),
    scheduler_ablation.Config(base=_TINY, cells=(('rtx4090', 2, 0.75),)),
  ),
  stall_breakdown.NAME: Experiment(
    stall_breakdown.make,
    stall_breakdown.Config(),
    stall_breakdown.Config(
      base=_TINY, places=('rtx4090',), requests=2, demo=None,
      variants=(('lockstep', 'lru', 'none'), ('runahead', 'reuse', 'none')),
    ),
  ),
}  # fmt: skip


class Choice(NamedTuple):
  """Which experiments, and how.

  Attributes:
    only: their names; empty for all.
    quick: the small configurations.
    trace: routing for the simulator, see `Replay.trace`.
    model_shape: what its experts and layers weigh.
    first: the first request of it that decodes.
    demo: whether the demo model is measured too.
    seed: of what is drawn.
  """

  only: Sequence[str] = ()
  quick: bool = False
  trace: str = simulated_cells.DEFAULT.trace
  model_shape: str = simulated_cells.DEFAULT.model_shape
  first: int = 0
  demo: bool = True
  seed: int = 0


def studies(choice: Choice) -> list[study.Study]:
  """The experiments of a choice; ValueError for a name that is unknown."""
  for name in choice.only:
    config_lib.choose('experiment', name, EXPERIMENTS)
  found = []
  for name, each in EXPERIMENTS.items():
    if name in (choice.only or EXPERIMENTS):
      config = each.quick if choice.quick else each.full
      found.append(each.make(_configured(config, choice)))
  return found


def main(
  out: str, choice: Choice, jobs: int, say: cell_sweep.Say
) -> pathlib.Path:
  """Runs them, writes a folder each and report.html; where that lies.

  Cells that are in the folders already are not run again.

  Args:
    out: the folder of all folders, made where it is not there.
    choice: which experiments, and how.
    jobs: processes of the simulator; the demo is measured alone.
    say: hears of each cell and of the time that is left.
  """
  figures_style.require()
  say(json.dumps(choice._asdict() | {'versions': run.versions()}))
  folder, begun = pathlib.Path(out), time.monotonic()
  made = studies(choice)
  for each in made:
    artifacts.begin(folder / each.name, each)
  plans = [
    cell_sweep.Plan(
      each.name, folder / each.name / artifacts.ROWS, each.columns, each.tasks
    )
    for each in made
  ]
  rows = cell_sweep.run(plans, jobs, say)
  parts = [
    (each, own, artifacts.finish(folder / each.name, each, own))
    for each, own in zip(made, rows, strict=True)
  ]
  for each, _, shown in parts:
    for picture in shown:
      say(f'\n{each.name}/{picture.name}.png')
      for text in picture.said:
        say(f'  {text}')
  facts = {
    'command': run.command(),
    'hardware': run.device(),
    'versions': run.versions(),
    'seed': choice.seed,
    'simulated with': f'{choice.trace} routing, {choice.model_shape}',
    'took': f'{(time.monotonic() - begun) / 60:.1f} minutes since it was '
    'started or gone on with',
  }
  path = folder / 'report.html'
  text = html_report.make(_TITLE, facts, parts, folder)
  path.write_text(text, encoding='utf-8')
  return path


def _configured(config: Any, choice: Choice) -> Any:
  """A configuration with what the choice says of all of them."""
  base = dataclasses.replace(
    config.base, trace=choice.trace, model_shape=choice.model_shape,
    first=choice.first,
  )  # fmt: skip
  config = dataclasses.replace(config, base=base, seed=choice.seed)
  demo: demo_cells.Settings | None = getattr(config, 'demo', None)
  if demo:
    demo = dataclasses.replace(demo, seed=choice.seed) if choice.demo else None
    config = dataclasses.replace(config, demo=demo)
  return config
