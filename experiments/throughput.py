"""Tokens/s over concurrency and cache, simulated and on this machine."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple

from bevy_jax.experiments import (
  cell_figures,
  cell_sweep,
  claims,
  demo_cells,
  simulated_cells,
  study,
  throughput_plots,
)

NAME = 'throughput'
ABOUT = """
Runahead, lockstep, the fastest of the prefetchers that ran in each cell, and
everything resident. Lockstep with LRU is a usual batched engine with a cache of
experts; `no cache` has room for one layer's experts and loads nearly all that a
step uses, which is what llama.cpp does where it copies used experts to the
device (its other way, with experts on the CPU, is not simulated, and its
program is not run here). LRU with unguarded prefetches is what most
publications build. `demo` is measured on the machine at hand: a small model,
its link throttled. s is the share of its time that lockstep computes, with the
eviction of runahead; overlap alone can give no more than 1 / max(s, 1 - s), so
what lies above that line loads less or shares more. Where the trace has fewer
requests than decode at once, parts of them decode; everything resident is
simulated as if all of it fitted.
"""
Variants = tuple[cell_figures.Variant, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The experiment.

  Attributes:
    base: the trace, its tokens, what experts weigh.
    places: simulated local platforms.
    requests: how many decode at once.
    caches: fractions of all experts; all of them resident runs beside.
    variants: scheduler, eviction, prefetch.
    demo: how the demo model is measured; None for not at all.
    demo_variants: there.
    seed: of the demo's texts.
  """

  base: simulated_cells.Settings = simulated_cells.DEFAULT
  places: tuple[str, ...] = ('rtx4090', 'rtx4060-laptop')
  requests: tuple[int, ...] = (1, 4, 16, 64)
  caches: tuple[float, ...] = (0.125, 0.25, 0.5, 0.75)
  variants: Variants = (
    ('lockstep', 'lru', 'none'),
    ('lockstep', 'lru', 'mixture:guarded=false'),
    ('lockstep', 'reuse', 'none'),
    ('lockstep', 'reuse', 'mixture'),
    ('runahead', 'reuse', 'mixture'),
  )
  demo: demo_cells.Settings | None = demo_cells.DEFAULT
  demo_variants: Variants = (
    ('lockstep', 'lru', 'none'),
    ('lockstep', 'lfu_decayed', 'none'),
    ('lockstep', 'lfu_decayed', 'next_gate'),
    ('runahead', 'lfu_decayed', 'none'),
  )
  seed: int = 0


class Ratio(NamedTuple):
  """Runahead in one cell, over what it is compared with; 0 where none ran.

  Attributes:
    place: where.
    requests: at once.
    cache: fraction of all experts.
    none: over no cache.
    published: over the fastest prefetcher with LRU.
    prefetch: over the fastest prefetcher of all.
    lockstep: over lockstep with the same eviction, no prefetch.
    share: s of that lockstep.
    resident: over lockstep with everything resident.
  """

  place: str
  requests: int
  cache: float
  none: float
  published: float
  prefetch: float
  lockstep: float
  share: float
  resident: float

  @property
  def words(self) -> str:
    """The cell, for a sentence."""
    return f'{self.requests} at {self.cache:.1%}'


def make(config: Config) -> study.Study:
  """The experiment, to be run."""
  tasks = [
    task
    for place in config.places
    for task in _tasks(
      place, config.requests, config.caches, config.variants,
      functools.partial(simulated_cells.measure, settings=config.base),
    )
  ]  # fmt: skip
  if config.demo:
    rows = [each for each in config.requests if each <= config.demo.rows]
    work = functools.partial(demo_cells.measure, settings=config.demo)
    found = _tasks(
      demo_cells.PLACE, rows, config.caches, config.demo_variants, work
    )
    tasks += [
      task._replace(alone=True, seconds=2 + 0.04 * task.key['requests'])
      for task in found
    ]
  return study.Study(
    NAME,
    'Throughput over concurrency and cache',
    ABOUT,
    config,
    cell_figures.KEY + cell_figures.FIGURES,
    tasks,
    show,
  )


def _tasks(
  place: str,
  requests: Sequence[int],
  caches: Sequence[float],
  variants: Variants,
  work: functools.partial[study.Row],
) -> list[cell_sweep.Task]:
  """Every variant everywhere; beside them no cache, and all resident."""
  eviction = variants[-1][1]
  cells = [(0.0, cell_figures.NO_CACHE), (1.0, ('lockstep', eviction, 'none'))]
  cells += list(itertools.product(caches, variants))
  return [
    cell_sweep.Task(
      cell_figures.key(place, rows, cache, each), work,
      simulated_cells.seconds(rows, each),
    )
    for rows, (cache, each) in itertools.product(requests, cells)
  ]  # fmt: skip


def ratios(rows: Sequence[study.Row]) -> list[Ratio]:
  """Of every cell in which runahead and lockstep ran."""
  found = []
  for place, requests in dict.fromkeys(
    (row['place'], row['requests']) for row in rows
  ):
    own = [r for r in rows if (r['place'], r['requests']) == (place, requests)]
    for cache in dict.fromkeys(r['cache'] for r in own if 0 < r['cache'] < 1):
      here = [row for row in own if row['cache'] == cache]
      found.append(_ratio(place, requests, cache, here, own))
  return found


def _ratio(
  place: str,
  requests: int,
  cache: float,
  here: Sequence[study.Row],
  own: Sequence[study.Row],
) -> Ratio:
  """One cell; `own` are all of its place with as many requests."""
  ours = max(
    (r for r in here if r['scheduler'] == 'runahead'),
    key=lambda row: float(row['tokens_per_s']),
  )
  bare = ('lockstep', ours['eviction'], 'none')
  base = next(r for r in here if cell_figures.variant(r) == bare)
  whole = [r for r in own if r['cache'] == 1]

  def over(found: study.Row | None) -> float:
    return float(ours['tokens_per_s'] / found['tokens_per_s']) if found else 0.0

  return Ratio(
    place,
    requests,
    cache,
    none=over(next((r for r in own if not r['cache']), None)),
    published=over(cell_figures.fastest_prefetch(here, 'lru')),
    prefetch=over(cell_figures.fastest_prefetch(here)),
    lockstep=over(base),
    share=base['gpu_busy'],
    resident=over(max(whole, key=lambda r: float(r['tokens_per_s']))
                  if whole else None),
  )  # fmt: skip


def show(rows: Sequence[study.Row]) -> list[study.Shown]:
  """Throughput, then the ratios."""
  found = ratios(rows)
  places = dict.fromkeys(each.place for each in found)
  speeds = [_speeds(place, found) for place in places]
  speeds += _quiet([r for r in rows if r['place'] == demo_cells.PLACE])
  claimed = [line for place in places for line in say(place, found)]
  return [
    study.Shown(NAME, throughput_plots.speeds(rows), speeds),
    study.Shown(f'{NAME}_ratios', throughput_plots.ratios(found), claimed),
  ]


def _speeds(place: str, found: Sequence[Ratio]) -> str:
  """How far everything resident is, and lockstep."""
  own = [each for each in found if each.place == place]
  near = max(own, key=lambda each: each.resident)
  far = min(own, key=lambda each: each.resident)
  best = max(own, key=lambda each: each.lockstep)
  worst = min(own, key=lambda each: each.lockstep)
  return (
    f'{place}: runahead reaches {far.resident:.0%} ({far.words}) to '
    f'{near.resident:.0%} ({near.words} of the experts resident) of what is '
    'decoded with everything resident; over lockstep with the same eviction it '
    f'is {worst.lockstep:.2f}x ({worst.words}) to {best.lockstep:.2f}x '
    f'({best.words}).'
  )


def _quiet(rows: Sequence[study.Row]) -> list[str]:
  """How far measured cells can be trusted, if there are any."""
  if not rows:
    return []
  loads = sorted(float(row['machine_load']) for row in rows)
  seconds = sorted(float(row['seconds']) for row in rows)
  middle = len(rows) // 2
  return [
    f'demo: each of its {len(rows)} cells is one run, {seconds[middle]:.1f} s '
    f'measured at the median; {loads[middle]:.1f} processes wanted to run '
    f'meanwhile ({loads[-1]:.1f} at most) on {os.cpu_count()} processors. '
    'Where that is more than there are, differences are of the machine as well.'
  ]


def say(place: str, found: Sequence[Ratio]) -> list[str]:
  """What the ratios of a place show, a sentence each."""
  own = [each for each in found if each.place == place]
  said = [
    claims.over_no_cache(
      f'{place}: over no cache', {r.words: r.none for r in own if r.none}
    )
  ]
  for name, words in (
    ('published', 'over the fastest unguarded prefetcher with LRU'),
    ('prefetch', 'over the fastest prefetcher of all'),
  ):
    cells = {r.words: getattr(r, name) for r in own if getattr(r, name)}
    if cells:
      said.append(claims.reached(f'{place}: {words}', cells, claims.PREFETCH))
  above = [r.words for r in own if r.lockstep > claims.overlap(r.share)]
  named = f' ({"; ".join(above)})' if above else ''
  said.append(
    f'{place}: with the same eviction runahead is above 1 / max(s, 1 - s) in '
    f'{len(above)} of {len(own)} cells{named}, where s is '
    f'{min(r.share for r in own):.2f} to {max(r.share for r in own):.2f}.'
  )
  return said
