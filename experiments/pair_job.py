"""The whole of a job of pairs on the demo: measure, judge, print, write."""

import json
import pathlib

from bevy_jax.experiments import configs, pairs, run


def job(config: configs.Decode, count: int, report: str = '') -> None:
  """Measures so many pairs and prints what they say.

  Args:
    config: what is run; its first two variants are compared.
    count: how many pairs.
    report: where to write the figures; empty for nowhere.

  Raises:
    ValueError: something asked for cannot be, or tokens differ.
  """
  bench = run.Bench(config, lambda what: print(what, '...'))
  outcome = pairs.judge(pairs.measure(bench, count, print))
  for name, value in outcome.items():
    print(f'{name:>22}: {value}')
  if report:
    text = json.dumps({'command': run.command()} | outcome, indent=1)
    pathlib.Path(report).write_text(text, encoding='utf-8')
