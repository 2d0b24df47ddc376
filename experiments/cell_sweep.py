"""Cells on several processes, kept in a CSV as they end and gone on with."""

import concurrent.futures
import csv
import gc
import multiprocessing
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]
Say = Callable[[str], None]


class Task(NamedTuple):
  """One cell.

  Attributes:
    key: the columns that say what it is.
    work: key -> the other columns; a function of a module, or `partial` of
      one, since other processes must find it.
    seconds: what it takes, roughly, to tell the time that is left.
    alone: whether it measures this machine, so that nothing may run beside
      it; such tasks come last, in this process.
  """

  key: Row
  work: Callable[[Row], Row]
  seconds: float = 1.0
  alone: bool = False


class Plan(NamedTuple):
  """The cells of one table.

  Attributes:
    name: in words, for progress.
    path: the CSV.
    columns: all of them; what a cell lacks is left empty.
    tasks: the cells.
  """

  name: str
  path: pathlib.Path
  columns: Sequence[str]
  tasks: Sequence[Task]


def run(plans: Sequence[Plan], jobs: int, say: Say) -> list[list[Row]]:
  """The rows of every plan, in the order of its tasks.

  Files are written cell by cell: a sweep that was stopped goes on where it
  was when the same plans are run again.

  Args:
    plans: what to run.
    jobs: processes; 1 for none beside this one.
    say: hears of each cell and of the time that is left.
  """
  known = [_known(plan) for plan in plans]
  left = [
    (number, task)
    for number, plan in enumerate(plans)
    for task in plan.tasks
    if _name(task.key) not in known[number]
  ]
  shared = [(number, task) for number, task in left if not task.alone]
  shared.sort(key=lambda pair: -pair[1].seconds)
  alone = [(number, task) for number, task in left if task.alone]
  clock = _Clock([task for _, task in left], jobs, say)
  for pairs, workers in ((shared, jobs), (alone, 1)):
    for at, found in _each(_work, [(task,) for _, task in pairs], workers):
      number, task = pairs[at]
      row = task.key | found
      _write(plans[number], [row], 'a')
      known[number][_name(task.key)] = row
      clock.done(plans[number].name, task)
  return [
    [own[_name(task.key)] for task in plan.tasks]
    for plan, own in zip(plans, known, strict=True)
  ]


def load(path: pathlib.Path, columns: Sequence[str]) -> list[Row]:
  """Rows of an earlier run; a line that was cut off is left out.

  Raises:
    ValueError: the file has other columns.
  """
  if not path.exists():
    return []
  text = path.read_text(encoding='utf-8')
  # A process that was killed may have left a part of a line.
  lines = list(csv.reader(text[: text.rfind('\n') + 1].splitlines()))
  if lines and lines[0] != list(columns):
    raise ValueError(
      f'{path} has the columns of another table, so this run cannot go on '
      'with it; name another folder, or remove that one.'
    )
  return [
    {name: _value(text) for name, text in zip(columns, line, strict=True)}
    for line in lines[1:]
  ]


def _known(plan: Plan) -> dict[str, Row]:
  """Finished cells of a plan by name; the file is left with whole lines."""
  rows = load(plan.path, plan.columns)
  _write(plan, rows, 'w')
  names = list(plan.tasks[0].key) if plan.tasks else []
  return {_name({n: row[n] for n in names}): row for row in rows}


def _name(key: Mapping[str, Any]) -> str:
  return ' '.join(f'{name}={value}' for name, value in key.items())


def _write(plan: Plan, rows: Sequence[Row], mode: str) -> None:
  with plan.path.open(mode, encoding='utf-8', newline='') as file:
    writer = csv.DictWriter(file, plan.columns, lineterminator='\n')
    if mode == 'w':
      writer.writeheader()
    writer.writerows(rows)


def _value(text: str) -> Any:
  """As it was before it was written; numbers are the only other kind."""
  for kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      pass
  return text


def _work(task: Task) -> Row:
  return task.work(task.key)


def _each(
  work: Callable[[Task], Row], tasks: Sequence[tuple[Task]], jobs: int
) -> Iterator[tuple[int, Row]]:
  """The number of each task and `work(*task)`, as they come."""
  if jobs == 1 or not tasks:
    yield from ((n, work(*task)) for n, task in enumerate(tasks))
    return
  context = multiprocessing.get_context('spawn')
  with concurrent.futures.ProcessPoolExecutor(
    jobs, mp_context=context, initializer=_begin
  ) as pool:
    numbers = {pool.submit(work, *task): n for n, task in enumerate(tasks)}
    try:
      for future in concurrent.futures.as_completed(numbers):
        yield numbers[future], future.result()
    finally:
      pool.shutdown(cancel_futures=True)


def _begin() -> None:
  """A process of the pool: Ctrl-C is for the one that it works for."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  # A log is many small objects without a cycle: to look for one takes time.
  gc.disable()


class _Clock:
  """Says how far a sweep is."""

  def __init__(self, tasks: Sequence[Task], jobs: int, say: Say):
    self._begun, self._say, self._jobs = time.monotonic(), say, jobs
    self._left = sum(self._wall(task) for task in tasks)
    self._did, self._count, self._of = 0.0, 0, len(tasks)

  def done(self, name: str, task: Task) -> None:
    """A cell has ended."""
    self._left -= self._wall(task)
    self._did += self._wall(task)
    self._count += 1
    took = time.monotonic() - self._begun
    left = took / self._did * self._left
    words = ' '.join(str(value) for value in task.key.values() if value != '')
    self._say(
      f'{self._count}/{self._of} {name}: {words}; {took / 60:.1f} min, about '
      f'{max(0.0, left) / 60:.1f} left'
    )

  def _wall(self, task: Task) -> float:
    return task.seconds / (1 if task.alone else self._jobs)
