"""The grid of schedulers: its cells, and which variants run in each."""

import dataclasses
import itertools
from typing import NamedTuple

from bevy_jax import config as config_lib

REQUESTS = (4, 8, 16, 32)
CACHES = (0.125, 0.25, 0.5, 0.75, 0.9)
PLATFORMS = ('rtx4090', 'rtx5090', 'h200')
FORMS = ('bf16', 'int4')
SHAPE = 'gpt-oss-20b'
SCOPES = ('lines', 'all')
# What stands in for `next_gate`, which a trace cannot run: right as often as
# `next_gate` is on the demo model.
GATE = 'oracle:p=0.8'
# Classes by s, the device's share of lockstep's own time: [least, most).
CLASSES = ((0.0, 0.15), (0.15, 0.35), (0.35, 0.65), (0.65, 1.01))


class Variant(NamedTuple):
  """Who schedules, evicts and prefetches."""

  scheduler: str
  eviction: str
  prefetch: str = 'none'


LOCKSTEP = Variant('lockstep', 'reuse')
# The default with all it does, and the same without its prefetches.
OURS = Variant('runahead', 'reuse', 'mixture:warm=true')
PLAIN = Variant('runahead', 'reuse')


class Cell(NamedTuple):
  """One point of the grid.

  Attributes:
    trace: what `Replay.trace` names.
    platform: a name of `PLATFORMS`.
    form: what the experts are stored as.
    requests: R.
    cache: fraction of all experts.
  """

  trace: str
  platform: str
  form: str
  requests: int
  cache: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
  """Which cells, and how each of them is run.

  Attributes:
    cells: in the order in which they begin, long ones first.
    first: first request of the traces; nothing must have been tuned on those
      that decode.
    skip: tokens of every request before the window opens.
    tokens: of every request in all.
    scope: 'lines' for what the lines of `grid_tables` compare, and `PLAIN`
      and the baseline schedulers in the cells of `_PLAIN` alone; 'all' for
      every variant in every cell.
  """

  cells: tuple[Cell, ...]
  first: int = 0
  skip: int = 32
  tokens: int = 64
  scope: str = 'lines'

  def __post_init__(self) -> None:
    config_lib.choose('scope', self.scope, SCOPES)
    if not (self.first >= 0 and 0 <= self.skip < self.tokens):
      raise ValueError(
        f'first is {self.first}, skip {self.skip}, tokens {self.tokens}; first '
        'must be at least 0 and skip at least 0 and below tokens.'
      )


def scheduler_grid(trace: str, scope: str) -> tuple[Cell, ...]:
  """All cells of recorded routing, and those of synthetic routing.

  With scope 'lines' the synthetic ones are 8 requests, int4, two platforms.
  """
  recorded = [
    Cell(trace, *rest)
    for rest in itertools.product(PLATFORMS, FORMS, REQUESTS, CACHES)
  ]
  synthetic = [cell._replace(trace='zipf') for cell in recorded]
  if scope == 'lines':
    synthetic = [
      cell
      for cell in synthetic
      if cell.requests == 8 and cell.form == 'int4' and cell.platform in _ENDS
    ]
  found = synthetic + (recorded if trace != 'zipf' else [])
  return tuple(sorted(found, key=lambda cell: -cell.requests))


def quick(trace: str, scope: str) -> tuple[Cell, ...]:
  """Two small cells, to see that everything works."""
  del scope
  return tuple(
    Cell(trace, 'rtx4090', 'int4', 2, cache) for cache in (0.25, 0.75)
  )


def make(name: str, trace: str, first: int, scope: str) -> Grid:
  """A grid by its name, of a trace or, where none is named, the bundled one."""
  config_lib.choose('grid', name, GRIDS)
  if name == 'quick_grid':
    cells = GRIDS[name](trace or 'bundled', scope)
    return Grid(cells=cells, first=first, scope=scope, skip=4, tokens=10)
  cells = GRIDS[name](trace or 'bundled', scope)
  return Grid(cells=cells, first=first, scope=scope)


GRIDS = {'scheduler_grid': scheduler_grid, 'quick_grid': quick}
# Where the synthetic cells of 'lines' are.
_ENDS = ('rtx4090', 'h200')
# Requests of the cells, rtx4090 with int4, where baseline schedulers run too.
_PLAIN = (2, 8)
# Below the first limit of s nearly every load is awaited and little is left
# to guess (the headroom of a row says what a perfect prefetcher would gain):
# with bf16 no prefetcher runs there, with int4 `history`, the best of them
# there, and up to so many requests the gate.
_FEW = 8


def variants(
  cell: Cell, s: float, scope: str, *, others: bool
) -> list[Variant]:
  """What runs in a cell beside `LOCKSTEP`, which has told s; lockstep first.

  Args:
    cell: where.
    s: the device's share of the time of `LOCKSTEP`.
    scope: see `Grid`.
    others: whether the trace has requests that do not decode, whose counts
      prefetchers may start from.
  """
  everything, shared = scope == 'all', s >= CLASSES[1][0]
  warm = ':warm=true' if others else ''
  transition, mixture = f'transition{warm}', f'mixture{warm}'
  real = [
    Variant('lockstep', 'reuse', p) for p in ('history', mixture, transition)
  ]
  found = real
  if not (everything or shared):
    found = real[:2] if cell.form == 'int4' else []
  if everything:
    popular = transition.replace('transition', 'popularity')
    found.append(Variant('lockstep', 'reuse', popular))
  if everything or (shared and s < CLASSES[3][0]):
    found += [
      Variant('lockstep', eviction, f'{transition}:guarded=false')
      for eviction in ('lru', 'lfu_decayed')
    ]
  found.append(OURS._replace(prefetch=mixture))
  few = cell.requests <= _FEW and cell.form == 'int4'
  if everything or shared or few:
    found += [LOCKSTEP._replace(prefetch=GATE), OURS._replace(prefetch=GATE)]
  plain = cell[1:3] == ('rtx4090', 'int4') and cell.trace != 'zipf'
  if everything or (plain and cell.requests in _PLAIN):
    found += [
      Variant(scheduler, eviction)
      for eviction in ('lru', 'reuse')
      for scheduler in config_lib.SCHEDULERS
    ]
  unique = dict.fromkeys(v for v in found if v != LOCKSTEP)
  return sorted(unique, key=lambda v: v.scheduler != 'lockstep')
