"""The rows of a suite as a table, and as a roofline."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.table

Figures = Mapping[str, Any]


def table(rows: Sequence[Mapping[str, Any]]) -> rich.table.Table:
  """One line a cell and variant; floors beside the speed, in tokens/s."""
  columns: dict[str, Callable[[Figures], str]] = {
    'tokens/s': lambda f: f'{f["tokens_per_s"]:.1f}',
    'memory floor': lambda f: f'{f["memory_floor_tokens_per_s"]:.0f}',
    'link floor': lambda f: _number(f['link_floor_tokens_per_s'], '.0f'),
    'of the floor': lambda f: f'{f["of_the_floor"]:.0%}',
    'overlap': lambda f: f'{f["overlap_efficiency"]:.2f}',
    'useful': lambda f: _number(f['useful_efficiency'], '.2f'),
    'of the bound': lambda f: _number(f['bound_fraction'], '.2f'),
    'link GB/s': lambda f: f'{f["load_gb_per_s"]:.1f}',
    'hit rate': lambda f: f'{f["hit_rate"]:.1%}',
    'loads': lambda f: f'{f["loads"]:.0f}',
    'host us': lambda f: f'{f["host_us"]["all"]:.0f}',
    'sched/launch/poll/load/settle': lambda f: '/'.join(
      f'{f["host_us"].get(k, 0):.0f}'
      for k in ('schedule', 'launch', 'poll', 'load', 'settle')
    ),
    'group': lambda f: f'{f["mean_group"]:.2f}',
    'hops': lambda f: f'{f["mean_hops"]:.2f}',
  }
  shown = rich.table.Table()
  for name in ('cell', 'variant', *columns, 'over lockstep', 'same tokens'):
    left = name in _LEFT
    shown.add_column(name, justify='left' if left else 'right', no_wrap=left)
  for row in rows:
    first = next(iter(row['variants'].values()))['tokens_per_s']
    cell = row['cell'] + ('' if row['complete'] else ' (incomplete)')
    for name, found in row['variants'].items():
      compiled = ' (compiled)' if found['compiled'] else ''
      shown.add_row(
        cell,
        name + compiled,
        *(show(found) for show in columns.values()),
        f'{found["tokens_per_s"] / first:.3f}',
        _number(row['same_tokens'][name], '.0%'),
      )
      cell = ''
    shown.add_section()
  return shown


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """What a table does not say: ratios with their bounds, notes."""
  out = []
  for row in rows:
    said = [
      f'{name} {r["median"]:.3f} (at least {_number(r["lower_95"], ".3f")})'
      for name, r in row['ratios'].items()
    ]
    out.append(
      f'{row["cell"]}, {row["pairs"]} pairs, {row["routing"]}: runahead over '
      + ', '.join(said)
    )
  notes = dict.fromkeys(row['note'] for row in rows)
  return out + [f'note: {note}' for note in notes if note]


def roofline(
  rows: Sequence[Mapping[str, Any]], path: pathlib.Path
) -> pathlib.Path | None:
  """Draws speeds below their floors; None without matplotlib.

  To the right more bytes come over the link for each that the device's memory
  gives; upwards the share of what that memory alone would allow.
  """
  try:
    import matplotlib.figure
  except ImportError:
    return None
  figure = matplotlib.figure.Figure(figsize=(8, 5), layout='constrained')
  axes = figure.subplots()
  for name, points in _points(rows).items():
    axes.plot(*zip(*points, strict=True), 'o', label=name, markersize=5)
  edge = [10 ** (i / 10) for i in range(-30, 21)]
  axes.plot(edge, [min(1.0, 1 / x) for x in edge], 'k-', linewidth=1)
  axes.set(
    xscale='log', yscale='log', ylim=(0.01, 1.5),
    xlabel='link floor / memory floor',
    ylabel='tokens/s as a share of the memory floor',
  )  # fmt: skip
  axes.legend(fontsize='small')
  figure.savefig(path, dpi=150)
  return path


_LEFT = ('cell', 'variant')


def _points(
  rows: Sequence[Mapping[str, Any]],
) -> dict[str, list[tuple[float, float]]]:
  """Each variant's (link floor / memory floor, share of the memory floor)."""
  out: dict[str, list[tuple[float, float]]] = {}
  for row in rows:
    for name, f in row['variants'].items():
      x = max(f['link_floor_s'] / f['memory_floor_s'], 1e-3)
      y = f['memory_floor_s'] / f['decode_seconds']
      out.setdefault(name, []).append((x, y))
  return out


def _number(value: float | None, form: str) -> str:
  return f'{value:{form}}' if value else '-'
