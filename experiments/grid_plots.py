"""Heat maps of a grid's ratios, requests by cache."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bevy_jax.experiments import grid_tables

_MAPS = ('lockstep', 'real', 'gate')


def save(
  rows: Sequence[Mapping[str, Any]], folder: pathlib.Path
) -> list[pathlib.Path]:
  """Writes a PNG a trace and ratio, a map a platform and form.

  Returns:
    The files; none where matplotlib (the extra `plot`) is not installed.
  """
  try:
    import matplotlib.figure
  except ImportError:
    return []
  found = []
  for trace in dict.fromkeys(row['trace'] for row in rows):
    own = [row for row in rows if row['trace'] == trace]
    for name in _MAPS:
      grid = tables(own, name)
      if grid:
        path = folder / f'{pathlib.Path(trace).stem}_{name}.png'
        figure = matplotlib.figure.Figure(layout='constrained')
        _draw(figure, grid, f'{trace}: {grid_tables.RATIOS[name]}')
        figure.savefig(path, dpi=150)
        found.append(path)
  return found


class Table:
  """One map: a ratio for each number of requests and each cache.

  Attributes:
    requests: of its lines, ascending.
    caches: of its columns, ascending.
    values: float[line, column], NaN where nothing ran.
  """

  def __init__(self, values: Mapping[tuple[float, float], float]):
    self.requests = sorted({requests for requests, _ in values})
    self.caches = sorted({cache for _, cache in values})
    self.values = np.array(
      [
        [values.get((requests, cache), np.nan) for cache in self.caches]
        for requests in self.requests
      ]
    )


def tables(
  rows: Sequence[Mapping[str, Any]], name: str
) -> dict[tuple[str, str], Table]:
  """By platform and form, the maps of one ratio of one trace."""
  values: dict[tuple[str, str], dict[tuple[float, float], float]] = {}
  places: dict[tuple[str, str, float, float], list[Mapping[str, Any]]] = {}
  for row in rows:
    place = row['platform'], row['form']
    at = float(row['requests']), float(row['cache'])
    places.setdefault((*place, *at), []).append(row)
  for (platform, form, requests, cache), own in places.items():
    for cell in grid_tables.cells(own):
      if name in cell.ratios:
        held = values.setdefault((platform, form), {})
        held[requests, cache] = cell.ratios[name]
  return {place: Table(held) for place, held in sorted(values.items())}


def _draw(
  figure: Any, grid: Mapping[tuple[str, str], Table], title: str
) -> None:
  width = min(2, len(grid))
  height = -(-len(grid) // width)
  figure.set_size_inches(5 * width, 3 * height)
  figure.suptitle(f'{title}\nsimulated machines', fontsize=9)
  most = max(float(np.nanmax(table.values)) for table in grid.values())
  for i, (place, table) in enumerate(grid.items()):
    axes = figure.add_subplot(height, width, i + 1)
    # 1 is white: who wins is told by the colour.
    span = max(0.05, most - 1)
    axes.imshow(
      table.values, cmap='RdBu', vmin=1 - span, vmax=1 + span, aspect='auto'
    )
    axes.set_title(' '.join(place), fontsize=9)
    axes.set_xticks(
      range(len(table.caches)), [f'{cache:.1%}' for cache in table.caches]
    )
    axes.set_yticks(
      range(len(table.requests)), [f'{rows:g}' for rows in table.requests]
    )
    axes.set_xlabel('cache')
    axes.set_ylabel('requests')
    for line, column in np.ndindex(table.values.shape):
      value = table.values[line, column]
      if not np.isnan(value):
        dark = abs(value - 1) > 0.6 * span
        axes.text(
          column, line, f'{value:.2f}', ha='center', va='center',
          color='white' if dark else 'black',
        )  # fmt: skip
