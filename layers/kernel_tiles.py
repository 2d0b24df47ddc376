"""How the work of each expert kernel is cut: what `tune_tiles` has found.

A sum is made in steps of `inner` columns, and other steps round it otherwise.
So `inner` is one for all rows of a shape: what a row becomes must not hang on
who is with it, in fast numerics neither.
"""

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


Pair = tuple[Tile, Tile]


def expert(form: str, shape: tuple[int, ...], rows: int) -> Pair:
  """Tiles of gate and up, and of the way down.

  Args:
    form: 'float', or the name of a `quant.Format`.
    shape: of the expert, `(3, F, D)`.
    rows: of the launch; it takes the tiles of the least number that was
      measured and is no smaller, of the largest one where there is none.

  Returns:
    What was measured for this shape, or else what suits its kind.
  """
  _, f, d = shape
  found = _MEASURED.get((form, f, d), _DEFAULT[form.split(':')[0]])
  return found[min((n for n in found if n >= rows), default=max(found))]


# By kind, for shapes that nobody has measured: the best for most of them.
_DEFAULT: dict[str, dict[int, Pair]] = {
  'float': {
    4: (Tile(32, 128, 2, 4), Tile(64, 64, 4, 4)),
    64: (Tile(64, 128, 4, 3), Tile(64, 64, 4, 4)),
  },
  'int8': {64: (Tile(32, 128, 4, 3), Tile(64, 64, 4, 3))},
  'int4': {64: (Tile(32, 128, 4, 3), Tile(64, 128, 4, 3))},
}
# By form and `F, D`: for rows up to so many, as `tune_tiles` prints it; on an
# H200.
_MEASURED: dict[tuple[str, int, int], dict[int, Pair]] = {
  ('int4:32', 768, 2048): {
    2: (Tile(64, 128, 4, 3), Tile(64, 64, 4, 3)),
    8: (Tile(32, 128, 4, 3), Tile(64, 64, 4, 3)),
  },
  ('int4:32', 2880, 2880): {
    2: (Tile(32, 128, 4, 3), Tile(32, 128, 2, 3)),
    16: (Tile(32, 128, 4, 3), Tile(64, 128, 4, 3)),
  },
}
