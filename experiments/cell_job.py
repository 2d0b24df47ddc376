"""The whole of a job of cells: progress, rows, table, picture."""

import pathlib
from typing import NamedTuple

import rich.console
import rich.progress

from bevy_jax.experiments import cell_run, cells, outcome, suite_table
from bevy_jax.experiments import suite as suite_lib

_WIDTH = 300


class Asked(NamedTuple):
  """Which cells are measured how often, and how they are run."""

  suite: cells.Suite
  options: cell_run.Options


def run(asked: Asked, report: str, limit_s: float) -> outcome.Outcome:
  """Measures a suite; goes on with a report that is there.

  Args:
    asked: what.
    report: JSON file that every finished cell is added to, with a picture of
      all cells beside it; empty for none.
    limit_s: seconds after which nothing new begins; 0 for no limit.

  Raises:
    ValueError: something asked for cannot be, or a run has failed.
  """
  console = rich.console.Console()
  if not console.is_terminal:  # A log breaks no lines.
    console = rich.console.Console(width=_WIDTH)
  bar = rich.progress.Progress(
    *rich.progress.Progress.get_default_columns(),
    rich.progress.TransferSpeedColumn(),
    console=console,
    transient=True,
  )
  with bar:
    task = bar.add_task('experts', visible=False)

    def progress(done: int, whole: int) -> None:
      bar.update(task, completed=done, total=whole, visible=done < whole)

    measured = suite_lib.Suite(
      asked.suite, asked.options, report, limit_s, console.print, progress
    )
    whole = measured.run()
  names = {cell.name for cell in asked.suite.cells}
  rows = [row for row in measured.rows if row['cell'] in names]
  if not whole:
    console.print('time ran out: the same command goes on where this ended')
  if not rows:
    return outcome.Outcome({})
  picture = pathlib.Path(report).with_suffix('.png') if report else None
  if picture and not suite_table.roofline(rows, picture):
    console.print('no picture: matplotlib is not installed (extra plot)')
  shown = (suite_table.table(rows), *suite_table.lines(rows))
  return outcome.Outcome({'rows': measured.rows}, shown)
