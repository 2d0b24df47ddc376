"""How the project's figures look, and the files they become."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# Figures are looked at beside each other: who is who is told by the colour,
# and by a marker and a dash for those who do not see colours.
_LOOKS = (
  ('#0b3c8c', 'o', '-'),
  ('#d95f02', 's', '--'),
  ('#1b9e77', '^', '-.'),
  ('#b3269a', 'D', ':'),
  ('#7a6a00', 'v', '--'),
  ('#5a5a5a', 'X', '-.'),
  ('#00a5c8', 'P', ':'),
  ('#c0392b', '*', '-'),
  ('#8c564b', 'h', '--'),
  ('#2ca02c', '<', '-'),
)
DPI = 110  # of PNG files
_SETTINGS: Any = {
  'font.size': 10,
  'axes.titlesize': 9.5,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.grid': True,
  'grid.color': '#dddddd',
  'grid.linewidth': 0.6,
  'axes.axisbelow': True,
  'legend.frameon': False,
  'svg.hashsalt': 'bevy-jax',
}


def require() -> None:
  """ValueError where matplotlib is missing, with what brings it."""
  try:
    import matplotlib.figure  # noqa: F401
  except ImportError as error:
    raise ValueError(
      'pictures are drawn by matplotlib, which is not installed. The extra '
      "`plot` brings it: pip install 'bevy-jax[plot]', or pip install "
      'matplotlib. Everything else works without it.'
    ) from error


def figure(
  title: str, width: float, height: float, rows: int = 1, columns: int = 1
) -> tuple[Any, npt.NDArray[Any]]:
  """An empty figure in inches, and its axes `[rows, columns]`."""
  require()
  import matplotlib
  import matplotlib.figure

  with matplotlib.rc_context(_SETTINGS):
    made = matplotlib.figure.Figure((width, height), layout='constrained')
    axes = made.subplots(rows, columns, squeeze=False)
  made.suptitle(title, fontsize=12)
  return made, np.asarray(axes)


def look(number: int) -> dict[str, Any]:
  """Colour, marker and dash of the n-th line, for `axes.plot`."""
  colour, marker, dash = _LOOKS[number % len(_LOOKS)]
  return {
    'color': colour, 'marker': marker, 'linestyle': dash, 'markersize': 5,
  }  # fmt: skip


def colour(number: int) -> str:
  """The colour alone."""
  return _LOOKS[number % len(_LOOKS)][0]


def level(axes: Any, at: float, words: str, *, left: bool = False) -> None:
  """A thin line across at a height that is compared with, named above it."""
  axes.axhline(at, color='#333333', linewidth=1, linestyle=(0, (4, 2)))
  axes.annotate(
    words,
    (0.01 if left else 1, at),
    (0, 2),
    xycoords=('axes fraction', 'data'),
    textcoords='offset points',
    ha='left' if left else 'right',
    va='bottom',
    fontsize=8,
    color='#333333',
  )


def by_requests(axes: Any, requests: Sequence[int]) -> None:
  """The lower axis: how many requests decode at once, each twice the last."""
  axes.set_xscale('log', base=2)
  axes.set_xticks(list(requests), [str(each) for each in requests])
  axes.set_xlabel('requests at once')


def by_cache(axes: Any) -> None:
  """The lower axis: how much of the experts is resident."""
  axes.set_xlabel('cache (% of all experts)')
  axes.set_xlim(0, 100)
  axes.set_xticks([0, 25, 50, 75, 100])


def save(made: Any, folder: pathlib.Path, name: str) -> list[pathlib.Path]:
  """Writes NAME.png and NAME.svg; equal figures make equal files."""
  import matplotlib

  paths = [folder / f'{name}.{ending}' for ending in ('png', 'svg')]
  with matplotlib.rc_context(_SETTINGS):
    made.savefig(paths[0], dpi=DPI, metadata={'Software': None})
    made.savefig(paths[1], metadata={'Date': None, 'Creator': None})
  return paths


def legend(made: Any, axes: Any) -> None:
  """One key for all panels, beneath them, of what the first one shows."""
  handles, labels = axes.get_legend_handles_labels()
  columns = min(len(labels), 5)
  made.legend(
    handles, labels, loc='outside lower center', ncols=columns, frameon=False
  )


def plain_ticks(axes: Any, values: Sequence[float]) -> None:
  """Ticks of a logarithmic upright axis, as plain numbers."""
  axes.set_yticks(list(values), [f'{value:g}' for value in values])
  axes.set_yticks([], minor=True)


def log_speed(axes: Any) -> None:
  """An upright axis of speeds, each step a factor, its ticks plain numbers."""
  import matplotlib.ticker

  axes.set_yscale('log')
  for place, steps in (('major', (1, 2, 5)), ('minor', (1, 2, 3, 5, 7))):
    locator = matplotlib.ticker.LogLocator(10, steps)
    getattr(axes.yaxis, f'set_{place}_locator')(locator)
  axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter('%g'))
  axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
