"""Rows of many tasks: a CSV that grows, the time left, going on."""

import collections
import csv
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bevy_jax.experiments import executors

Row = dict[str, Any]
Say = Callable[[str], None]


class How(NamedTuple):
  """How a sweep is run.

  Attributes:
    path: of the CSV; empty for none.
    resume: whether rows that the CSV has are kept and not run again.
    executor: who runs the tasks.
    say: hears of progress.
    note: hears of every new row.
    redo: schedulers whose rows of an earlier run are forgotten.
  """

  path: str = ''
  resume: bool = False
  executor: executors.Executor = executors.Local(1)
  say: Say = print
  note: Callable[[Row], None] = lambda row: None
  redo: Sequence[str] = ()


class Form(NamedTuple):
  """What the rows of a sweep look like.

  Attributes:
    columns: of the CSV.
    place: those that tell which task a row is of.
    texts: those that hold text; the others hold numbers.
  """

  columns: Sequence[str]
  place: Sequence[str]
  texts: Sequence[str]

  def where(self, row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row's task; numbers as a file has them, 8 or 8.0."""
    return tuple(
      str(row[name]) if name in self.texts else repr(float(row[name]))
      for name in self.place
    )

  def load(self, path: pathlib.Path) -> list[Row]:
    """Rows of an earlier run, none where there is no file.

    A line that was cut off is left out. ValueError: it has other columns.
    """
    if not path.exists():
      return []
    whole = path.read_text('utf-8').rpartition('\n')[0]
    reader = csv.DictReader(whole.splitlines())
    if tuple(reader.fieldnames or ()) != tuple(self.columns):
      raise ValueError(
        f'{path} has not the columns of this sweep; name another file.'
      )
    rows = [row for row in reader if all(row[c] for c in self.columns)]
    return [
      {n: v if n in self.texts else _number(v) for n, v in row.items()}
      for row in rows
    ]

  def save(self, path: pathlib.Path, rows: Iterable[Row]) -> None:
    """Writes a file of these rows; one that is there lasts until it is done."""
    new = path.with_name(path.name + '.new')
    new.write_text(','.join(self.columns) + '\n', encoding='utf-8')
    self.append(new, rows)
    os.replace(new, path)

  def append(self, path: pathlib.Path, rows: Iterable[Row]) -> None:
    """Writes rows behind those of a file."""
    with path.open('a', encoding='utf-8', newline='') as file:
      csv.DictWriter(file, self.columns, lineterminator='\n').writerows(rows)


class Task(NamedTuple):
  """One task: `work(*args, known)` returns its rows that are not known.

  Attributes:
    args: what is run; must travel to other processes.
    where: what `Form.where` says of its rows.
    name: in words.
    weight: how long it takes, in any unit.
  """

  args: tuple[Any, ...]
  where: tuple[str, ...]
  name: str
  weight: float = 1.0


def run(
  tasks: Sequence[Task],
  work: Callable[..., list[Row]],
  form: Form,
  how: How,
  known: Sequence[Row] | None = None,
) -> list[Row]:
  """All rows of the tasks, in their order.

  The file grows task by task, so a sweep that was stopped goes on where it
  was; at the end it is in the order of the tasks. Rows of other tasks that it
  has stay, first.

  Args:
    tasks: what to run.
    work: a function of a module, which a worker can import.
    form: what rows look like.
    how: who runs it, and where rows go.
    known: rows that need not be run; None for what the file has.
  """
  path = pathlib.Path(how.path) if how.path else None
  if path and not path.resolve().parent.is_dir():
    raise ValueError(f'{path}: make its folder first.')
  if known is None:
    known = form.load(path) if path and how.resume else []
  if path:
    form.save(path, known)
  found = collections.defaultdict(list)
  for row in known:
    found[form.where(row)].append(row)
  clock = Clock([task.weight for task in tasks], how.say)
  calls = [(*task.args, found[task.where]) for task in tasks]
  for number, new in how.executor.each(work, calls):
    task = tasks[number]
    if path:
      form.append(path, new)
    for row in new:
      how.note(row)
    found[task.where] = found[task.where] + new
    clock.done(task.name, task.weight, len(new))
  places = dict.fromkeys(task.where for task in tasks)
  rows = [row for place in places for row in found[place]]
  if path:
    others = [row for row in known if form.where(row) not in places]
    form.save(path, [*others, *rows])
  return rows


class Clock:
  """Says how far a sweep is, and about how long it will still take."""

  def __init__(self, weights: Sequence[float], say: Say):
    self._begun, self._say = time.monotonic(), say
    self._total = self._left = sum(weights)
    self._count, self._of, self._skipped = 0, len(weights), 0.0

  def done(self, name: str, weight: float, rows: int) -> None:
    """A task has ended, with so many new rows; 0: it was known already."""
    self._left -= weight
    self._count += 1
    if not rows:
      self._skipped += weight
      return
    took = time.monotonic() - self._begun
    left = took * self._left / (self._total - self._left - self._skipped)
    self._say(
      f'{self._count}/{self._of} {name}: {rows} runs, {took / 60:.1f} min, '
      f'about {left / 60:.1f} left'
    )


def _number(text: str) -> int | float:
  """As it was written: 8 and 8.0 stay what they are."""
  try:
    return int(text)
  except ValueError:
    return float(text)
