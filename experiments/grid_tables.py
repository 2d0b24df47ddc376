"""A grid's rows as ratios by class, and the cells that miss a line."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bevy_jax import config as config_lib
from bevy_jax.experiments import grids

_REAL = ('transition', 'popularity', 'history', 'mixture')
_PLACE = ('trace', 'first', 'platform', 'form', 'requests', 'cache')
# The part of the cells that may miss a line.
_MOST_MISSED = 0.05


class Line(NamedTuple):
  """What a ratio must reach, by class of s.

  Attributes:
    ratio: which one, of `RATIOS`.
    classes: indices of `grids.CLASSES` that it is told of together.
    least: in each cell; None for no line.
    mean: of all of these cells; None for no line.
  """

  ratio: str
  classes: tuple[int, ...]
  least: float | None
  mean: float | None


class Cell(NamedTuple):
  """One cell's ratios.

  Attributes:
    place: trace, platform, form, requests and cache, in words.
    s: the device's share of lockstep's own time.
    ratios: by name; those whose runs the cell lacks are left out.
  """

  place: str
  s: float
  ratios: dict[str, float]

  @property
  def group(self) -> int:
    """Index of its class."""
    return next(
      i
      for i, (least, most) in enumerate(grids.CLASSES)
      if least <= self.s < most
    )


# In words, and in this order in the tables. Means are geometric; that of
# `useful` is a plain one.
RATIOS = {
  'lockstep': 'runahead as it comes / lockstep, both with reuse',
  'plain': 'the same without prefetches of its own',
  'overlap': 'the same, over 1 / max(s, 1 - s), all that overlap can give',
  'real': 'runahead / lockstep with its fastest real prefetcher or none',
  'gate': f'both with reuse and {grids.GATE}, which stands for next_gate',
  'lru': 'runahead / lockstep with LRU and unguarded transition',
  'lfu': 'runahead / lockstep with decayed LFU and unguarded transition',
  'headroom': 'runahead / what a perfect prefetcher in lockstep would reach',
  'useful': 'useful_efficiency of runahead with reuse',
}
LINES = (
  Line('overlap', (0,), 0.97, None),
  Line('lockstep', (1,), 1.10, 1.25),
  Line('lockstep', (2,), 1.05, 1.25),
  Line('lockstep', (3,), 0.99, None),
  Line('real', (0, 1, 2, 3), 0.99, 1.06),
  Line('gate', (0, 1, 2, 3), 0.96, 1.0),
  Line('lru', (1, 2), None, 1.55),
  Line('lfu', (1, 2), None, 1.2),
  Line('useful', (0,), None, 0.99),
  Line('useful', (1,), None, 0.95),
  Line('useful', (2,), None, 0.80),
)


def cells(rows: Iterable[Mapping[str, Any]]) -> list[Cell]:
  """The ratios of every cell in which lockstep ran."""
  places: dict[tuple[Any, ...], dict[grids.Variant, Mapping[str, Any]]] = {}
  for row in rows:
    place = tuple(row[name] for name in _PLACE)
    variant = grids.Variant(row['scheduler'], row['eviction'], row['prefetch'])
    places.setdefault(place, {})[variant] = row
  found = []
  for place, runs in places.items():
    if grids.LOCKSTEP in runs:
      s = float(runs[grids.LOCKSTEP]['gpu_busy'])
      trace, first, platform, form, requests, cache = place
      words = f'{trace}+{first:g} {platform} {form} R={requests:g} {cache:g}'
      found.append(Cell(words, s, _ratios(runs, s)))
  return found


def _ratios(
  runs: Mapping[grids.Variant, Mapping[str, Any]], s: float
) -> dict[str, float]:
  speeds = {v: float(row['tokens_per_s']) for v, row in runs.items()}
  ours = speeds.get(grids.OURS)
  found: dict[str, float] = {}
  if ours is None:
    return found
  found['lockstep'] = ours / speeds[grids.LOCKSTEP]
  if grids.PLAIN in speeds:
    found['plain'] = speeds[grids.PLAIN] / speeds[grids.LOCKSTEP]
  found['overlap'] = found['lockstep'] * max(s, 1 - s)
  real = [
    speed
    for v, speed in speeds.items()
    if v[:2] == grids.LOCKSTEP[:2]
    and v.prefetch.partition(':')[0] in _REAL
    and 'guarded=false' not in v.prefetch
  ]
  if real:
    # Who knows that it slows them down turns it off.
    found['real'] = ours / max(*real, speeds[grids.LOCKSTEP])
  both = [
    speeds.get(v._replace(prefetch=grids.GATE))
    for v in (grids.OURS, grids.LOCKSTEP)
  ]
  if both[0] and both[1]:
    found['gate'] = both[0] / both[1]
  for name, eviction in (('lru', 'lru'), ('lfu', 'lfu_decayed')):
    published = [
      speed
      for v, speed in speeds.items()
      if v[:2] == ('lockstep', eviction) and 'guarded=false' in v.prefetch
    ]
    if published:
      found[name] = ours / max(published)
  row = runs[grids.OURS]
  found['headroom'] = ours / float(row['headroom_tokens_per_s'])
  found['useful'] = float(row['useful_efficiency'])
  return found


def ratios(found: Sequence[Cell]) -> str:
  """Each ratio by class of s: cells, least, mean, most."""
  lines = []
  for name, words in RATIOS.items():
    lines.append(f'{name}: {words}')
    for i, title in enumerate(_titles()):
      own = [c.ratios[name] for c in found if c.group == i and name in c.ratios]
      if own:
        lines.append('  ' + _summary(title, own, name))
    every = [c.ratios[name] for c in found if name in c.ratios]
    if every:
      lines.append('  ' + _summary('all', every, name))
  return '\n'.join(lines)


def schedulers(rows: Sequence[Mapping[str, Any]]) -> str:
  """Each scheduler over lockstep with the same eviction, by class of s.

  Only cells in which all of `config.SCHEDULERS` ran: the same for each.
  """
  runs: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
  for row in rows:
    if row['prefetch'] == 'none':
      place = (*(row[name] for name in _PLACE), row['eviction'])
      runs.setdefault(place, {})[row['scheduler']] = row
  whole = [r for r in runs.items() if set(config_lib.SCHEDULERS) <= set(r[1])]
  lines = []
  for eviction in sorted({place[-1] for place, _ in whole}):
    lines.append(f'over lockstep, both with {eviction}')
    for name in config_lib.SCHEDULERS:
      own = [
        float(r[name]['tokens_per_s']) / float(r['lockstep']['tokens_per_s'])
        for place, r in whole
        if place[-1] == eviction
      ]
      lines.append('  ' + _summary(name, own, name))
  return '\n'.join(lines)


def misses(found: Sequence[Cell]) -> str:
  """Every line, whether it is met, and the cells that are below it."""
  lines, bad = [], set()
  for line in LINES:
    own = [c for c in found if c.group in line.classes]
    own = [c for c in own if line.ratio in c.ratios]
    title = ' and '.join(_titles()[i] for i in line.classes)
    if len(line.classes) == len(grids.CLASSES):
      title = 'all s'
    if not own:
      lines.append(f'{line.ratio}, {title}: no cells')
      continue
    if line.mean is not None:
      mean = _mean([c.ratios[line.ratio] for c in own], line.ratio)
      lines.append(
        f'{line.ratio}, {title}: mean {mean:.3f} of {len(own)} cells, '
        f'line {line.mean}: {"met" if mean >= line.mean else "MISSED"}'
      )
    if line.least is not None:
      low = [c for c in own if c.ratios[line.ratio] < line.least]
      bad |= {c.place for c in low}
      lines.append(
        f'{line.ratio}, {title}: {len(low)} of {len(own)} cells below '
        f'{line.least}'
      )
      lines += [
        f'  {c.place}: {c.ratios[line.ratio]:.3f} (s {c.s:.2f})'
        for c in sorted(low, key=lambda c: c.ratios[line.ratio])
      ]
  share = len(bad) / max(1, len(found))
  lines.append(
    f'{len(bad)} of {len(found)} cells ({share:.1%}) miss a line of their own; '
    f'{_MOST_MISSED:.0%} may: {"met" if share <= _MOST_MISSED else "MISSED"}'
  )
  return '\n'.join(lines)


def report(
  rows: Sequence[Mapping[str, Any]], say: Callable[[str], None]
) -> None:
  """All tables, each trace by itself: what is synthetic stays apart."""
  for trace in dict.fromkeys(row['trace'] for row in rows):
    own = [row for row in rows if row['trace'] == trace]
    kind = 'synthetic' if float(own[0]['synthetic']) else 'recorded'
    found = cells(own)
    say(f'\n{trace} ({kind} routing, simulated machines), {len(found)} cells')
    say(ratios(found))
    compared = schedulers(own)
    if compared:
      say(compared)
    say(misses(found))


def _titles() -> list[str]:
  return [
    f's < {most}'
    if not least
    else f'{least} <= s'
    if most > 1
    else f'{least} <= s < {most}'
    for least, most in grids.CLASSES
  ]


def _summary(title: str, values: Sequence[float], name: str) -> str:
  mean = _mean(values, name)
  return (
    f'{title:<16} {len(values):>4} cells  least {min(values):.3f}  '
    f'mean {mean:.3f}  most {max(values):.3f}'
  )


def _mean(values: Sequence[float], name: str) -> float:
  if name == 'useful':
    return sum(values) / len(values)
  return math.exp(sum(map(math.log, values)) / len(values))
