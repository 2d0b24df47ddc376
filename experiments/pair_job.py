"""The whole of a job of pairs on the demo: measure, judge, print, write."""

import json
import pathlib

from bevy_jax.experiments import ablation, configs, pairs, run


def job(
  config: configs.Decode, count: int, report: str = '', *, rounds: bool = False
) -> None:
  """Measures so many pairs, or rounds of all variants, and says what came.

  Args:
    config: what is run; pairs compare its first two variants.
    count: how many pairs or rounds.
    report: where to write the figures; empty for nowhere.
    rounds: whether all variants take their turns, each set beside the last.

  Raises:
    ValueError: something asked for cannot be, or tokens differ.
  """
  bench = run.Bench(config, lambda what: print(what, '...'))
  if rounds:
    found = pairs.ratios(pairs.rounds(bench, count, print))
    outcome = {'link': bench.link, 'versions': run.versions(), 'ratios': found}
  else:
    outcome = pairs.judge(pairs.measure(bench, count, print))
  for name, value in outcome.items():
    print(f'{name:>22}: {value}')
  if rounds:
    print(ablation.table(found))
  if report:
    text = json.dumps({'command': run.command()} | outcome, indent=1)
    pathlib.Path(report).write_text(text, encoding='utf-8')
