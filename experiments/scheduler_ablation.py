"""What each idea of the scheduler is worth: switched off in turn."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from bevy_jax.experiments import (
  cell_figures,
  cell_sweep,
  figures_style,
  simulated_cells,
  study,
  switched_off,
)

NAME = 'scheduler_ablation'
ABOUT = """
Runahead with `reuse` as eviction and prefetches of `mixture` on an idle link,
and the same with one of its ideas taken out. Hops are put in instead, for the
simulator has them off: they save the host launches, but what a long launch
reveals is told at its end, and rows that stop on the way are left behind.
Self-balancing is what it measures of link and device: how far requests may run
ahead, and whether ready groups wait for others. Simulated decoding of recorded
routing.
"""
_KEY = ('place', 'requests', 'cache', 'part')
_NEAR = 0.95  # A figure behind so long a bar would stand on the line at 1.
_SAME = 0.005  # Of the whole's speed: less is called no difference.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The experiment.

  Attributes:
    base: the trace, its tokens, what experts weigh.
    cells: place, requests, cache.
    parts: names of `switched_off.PARTS`; the first is what all are over.
    seed: of nothing here, for simulated time has no chance in it.
  """

  base: simulated_cells.Settings = simulated_cells.DEFAULT
  cells: tuple[tuple[str, int, float], ...] = (
    ('rtx4090', 8, 0.5),
    ('rtx4090', 16, 0.75),
    ('rtx4060-laptop', 8, 0.75),
    ('h200', 8, 0.75),
  )
  parts: tuple[str, ...] = tuple(switched_off.PARTS)
  seed: int = 0


def make(config: Config) -> study.Study:
  """The experiment, to be run."""
  work = functools.partial(measure, settings=config.base)
  tasks = [
    cell_sweep.Task(
      dict(zip(_KEY, (*cell, part), strict=True)), work, 0.2 * (2 + cell[1])
    )
    for cell in config.cells
    for part in config.parts
  ]
  return study.Study(
    NAME,
    'What each part of the scheduler is worth',
    ABOUT,
    config,
    _KEY + cell_figures.FIGURES,
    tasks,
    show,
  )


def measure(key: study.Row, settings: simulated_cells.Settings) -> study.Row:
  """One part in one cell."""
  sim, note = simulated_cells.simulate(key, settings)
  log = simulated_cells.log(sim, switched_off.PARTS[key['part']])
  return simulated_cells.figure(sim, log, note)


def relative(rows: Sequence[study.Row]) -> dict[str, dict[str, float]]:
  """Of each part, by cell in words: its speed over the first part's."""
  found: dict[str, dict[str, float]] = {}
  for cell in dict.fromkeys(map(_cell, rows)):
    own = [row for row in rows if _cell(row) == cell]
    for row in own:
      ratio = row['tokens_per_s'] / own[0]['tokens_per_s']
      found.setdefault(row['part'], {})[cell] = ratio
  return found


def show(rows: Sequence[study.Row]) -> list[study.Shown]:
  """Bars, a group a part."""
  return [study.Shown(NAME, _draw(relative(rows)), say(rows))]


def say(rows: Sequence[study.Row]) -> list[str]:
  """What each part is worth, the dearest first, a sentence each."""
  whole, *others = relative(rows).items()
  others.sort(key=lambda item: min(item[1].values()))
  return [_worth(part, ratios, whole[0]) for part, ratios in others]


def _worth(part: str, ratios: Mapping[str, float], whole: str) -> str:
  low, high = min(ratios.values()), max(ratios.values())
  where = min(ratios, key=lambda cell: ratios[cell])
  span = f'{low:.3f} to {high:.3f} of the speed of the {whole}'
  if len(ratios) == 1:
    span = f'{low:.3f} of the speed of the {whole}'
  if low >= 1 - _SAME:
    gain = 'no slower and no faster' if high <= 1 + _SAME else 'faster'
    return f'{part}: {span}, {gain} everywhere.'
  more = ''
  if high > 1 + _SAME:
    more = f', most is gained at {max(ratios, key=lambda c: ratios[c])}'
  return f'{part}: {span}; most is lost at {where}{more}.'


def _cell(row: study.Row) -> str:
  return f'{row["place"]}, {row["requests"]} requests, {row["cache"]:.1%}'


def _draw(found: Mapping[str, Mapping[str, float]]) -> Any:
  cells = list(next(iter(found.values())))
  made, axes = figures_style.figure(
    'Each idea of the scheduler switched off, or on, in turn (simulated)',
    11,
    1.6 + 0.2 * len(found) * len(cells),
  )
  panel, height = axes[0][0], 0.8 / len(cells)
  for number, cell in enumerate(cells):
    above = (number - (len(cells) - 1) / 2) * height
    y = [place + above for place in range(len(found))]
    widths = [ratios[cell] for ratios in found.values()]
    colour = figures_style.colour(number)
    panel.barh(y, widths, 0.9 * height, color=colour, label=cell)
    for at, width in zip(y, widths, strict=True):
      beside = 1 if _NEAR <= width < 1 else width  # Not across the line.
      panel.annotate(
        f'{width:.2f}', (beside, at), (3, 0), textcoords='offset points',
        va='center', fontsize=8,
      )  # fmt: skip
  panel.axvline(1, color='#333333', linewidth=1)
  panel.set_yticks(range(len(found)), list(found))
  panel.invert_yaxis()
  panel.grid(visible=False, axis='y')
  panel.set_xlabel('tokens/s over those of the whole')
  figures_style.legend(made, panel)
  return made
