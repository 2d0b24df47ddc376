"""A folder of results: what ran, where, with what, and what came out."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from bevy_jax.experiments import figures_style, run, study

_CONFIG, ROWS = 'config.json', 'rows.csv'


def begin(folder: pathlib.Path, made: study.Study) -> None:
  """Makes the folder and writes what will run in it.

  Raises:
    ValueError: it holds the rows of another configuration.
  """
  folder.mkdir(parents=True, exist_ok=True)
  facts = _facts(made)
  path = folder / _CONFIG
  if path.exists():
    before = json.loads(path.read_text(encoding='utf-8'))['config']
    other = [
      f'{name} is {before.get(name)} there and {value} here'
      for name, value in facts['config'].items()
      if before.get(name) != value
    ]
    if other:
      raise ValueError(
        f'{folder} holds results of another configuration: {"; ".join(other)}. '
        'Name another folder, or remove that one.'
      )
  _write(path, facts)


def finish(
  folder: pathlib.Path, made: study.Study, rows: Sequence[study.Row]
) -> list[study.Shown]:
  """Draws the figures and writes result.json; what was shown, in order."""
  shown = made.show(rows)
  for each in shown:
    figures_style.save(each.figure, folder, each.name)
  said = {each.name: each.said for each in shown}
  whole = _facts(made) | {'said': said, 'rows': list(rows)}
  _write(folder / 'result.json', whole)
  return shown


def _facts(made: study.Study) -> dict[str, Any]:
  """Everything that somebody needs to run it again; tuples as lists."""
  config = dataclasses.asdict(made.config)
  facts = {
    'experiment': made.name,
    'config': config,
    'seed': config['seed'],
    'command': run.command(),
    'versions': run.versions(),
    'hardware': run.device(),
  }
  return dict(json.loads(json.dumps(facts)))


def _write(path: pathlib.Path, whole: dict[str, Any]) -> None:
  text = json.dumps(whole, indent=1, allow_nan=False)
  path.write_text(text + '\n', encoding='utf-8')
