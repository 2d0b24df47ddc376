"""The whole of a job of cells: progress, rows, table, picture."""

import pathlib
from collections.abc import Sequence

import rich.console
import rich.progress

from bevy_jax.experiments import cell_run, cells, overrides, suite_table
from bevy_jax.experiments import suite as suite_lib

_WIDTH = 300


def run(
  suite: cells.Suite,
  options: cell_run.Options,
  changes: Sequence[str] = (),
  report: str = '',
  limit_s: float = 0.0,
) -> None:
  """Measures a suite and shows it; goes on with a report that is there.

  Args:
    suite: which cells, how often.
    options: how they are run.
    changes: `field=value` of the options.
    report: JSON file that every finished cell is added to, with a picture of
      all cells beside it; empty for none.
    limit_s: seconds after which nothing new begins; 0 for no limit.

  Raises:
    ValueError: something asked for cannot be, or a run has failed.
  """
  options = overrides.apply(options, changes)
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
      suite, options, report, limit_s, console.print, progress
    )
    whole = measured.run()
  names = {cell.name for cell in suite.cells}
  rows = [row for row in measured.rows if row['cell'] in names]
  if rows:
    console.print(suite_table.table(rows))
  for line in suite_table.lines(rows):
    console.print(line, highlight=False)
  if not whole:
    console.print('time ran out: the same command goes on where this ended')
  picture = pathlib.Path(report).with_suffix('.png') if report else None
  if picture and rows and not suite_table.roofline(rows, picture):
    console.print('no picture: matplotlib is not installed (extra plot)')
