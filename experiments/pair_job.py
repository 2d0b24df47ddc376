"""The whole of a job of pairs on the demo: measure, judge, tell."""

from collections.abc import Callable
from typing import Any

from bevy_jax.experiments import ablation, configs, outcome, pairs, run


def job(
  config: configs.Decode,
  count: int,
  note: Callable[[dict[str, Any]], None],
  *,
  rounds: bool = False,
) -> outcome.Outcome:
  """Measures so many pairs, or rounds of all variants, and judges them.

  Args:
    config: what is run; pairs compare its first two variants.
    count: how many pairs or rounds.
    note: hears of each of them when all are done.
    rounds: whether all variants take their turns, each set beside the last.

  Raises:
    ValueError: something asked for cannot be, or tokens differ.
  """
  bench = run.Bench(config, lambda what: print(what, '...'))
  if rounds:
    found = pairs.ratios(pairs.rounds(bench, count, print))
    judged: dict[str, Any] = {
      'link': bench.link,
      'versions': run.versions(),
      'ratios': found,
    }
    met = all(row.get('met', True) for row in found)
    shown = ablation.table(found)
  else:
    judged = pairs.judge(pairs.measure(bench, count, print))
    met = judged['met']
    shown = '\n'.join(f'{k:>22}: {value}' for k, value in judged.items())
  for number, ratio in enumerate(judged['ratios'], 1):
    note(ratio if rounds else {'pair': number, 'ratio': ratio})
  report = {'command': run.command()} | judged
  return outcome.Outcome(report, (shown,), outcome.judged(met))
