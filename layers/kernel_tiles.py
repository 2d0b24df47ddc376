"""How the work of each expert kernel is cut: the best of sweeps on one H200."""

from typing import NamedTuple


class Tile(NamedTuple):
  """One program's part of an expert, and how it runs.

  Attributes:
    outer: outputs of a program.
    inner: columns of a step.
    warps: of 32 threads, a program.
    stages: steps whose loads are under way at once.
  """

  outer: int
  inner: int
  warps: int
  stages: int


def expert(kind: str, rows: int) -> tuple[Tile, Tile]:
  """Tiles of gate and up, and of the way down.

  Args:
    kind: 'float', 'int8' or 'int4'.
    rows: of the launch.
  """
  few = rows <= 2
  return _EXPERT[kind, few]


_EXPERT = {
  ('float', True): (Tile(64, 128, 4, 4), Tile(64, 256, 4, 3)),
  ('float', False): (Tile(64, 128, 4, 3), Tile(64, 64, 4, 4)),
  ('int8', True): (Tile(64, 128, 4, 3), Tile(128, 64, 4, 3)),
  ('int8', False): (Tile(64, 128, 4, 3), Tile(128, 64, 4, 3)),
  ('int4', True): (Tile(64, 128, 4, 3), Tile(128, 32, 4, 4)),
  ('int4', False): (Tile(64, 128, 4, 3), Tile(128, 32, 4, 4)),
}
