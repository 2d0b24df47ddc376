"""What an experiment is made of: cells to run, and what their rows show."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bevy_jax.experiments import cell_sweep

Row = cell_sweep.Row


class Shown(NamedTuple):
  """A figure and what is to be seen in it.

  Attributes:
    name: of its files.
    figure: a matplotlib Figure.
    said: sentences, computed from the rows that it shows.
  """

  name: str
  figure: Any
  said: list[str]


class Study(NamedTuple):
  """One experiment.

  Attributes:
    name: of its folder.
    title: a line.
    about: what stands for what, for a reader who sees the report alone.
    config: a frozen dataclass with a `seed`.
    columns: of its table.
    tasks: its cells.
    show: rows, in the order of the tasks -> its figures.
  """

  name: str
  title: str
  about: str
  config: Any
  columns: tuple[str, ...]
  tasks: list[cell_sweep.Task]
  show: Callable[[Sequence[Row]], list[Shown]]
