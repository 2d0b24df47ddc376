"""What prefetching gives in time, by cache size, and where it hurts."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from bevy_jax.experiments import (
  cell_figures,
  cell_sweep,
  claims,
  figures_style,
  simulated_cells,
  study,
)

NAME = 'prefetch_benefit'
ABOUT = """
Simulated decoding of recorded routing. Lockstep with LRU and an unguarded
prefetcher (it takes the eviction's victim whatever it guesses) is what most
publications build; `reuse` is the best eviction here, with which prefetches are
guarded. All of them wait behind all demand here and must be expected to pay, so
that a wrong one costs little. `oracle:p=0.8` stands for `next_gate`, which
needs a model. `no cache` has room for one layer's experts and loads nearly all
that a step uses: what llama.cpp does where it copies used experts to the
device. Its other way, with experts on the CPU, is not simulated, and its
program is not run here.
"""
_NO_CACHE = 'over no cache'
_UNGUARDED = ':guarded=false'
_HURTS = 0.995  # Below, a prefetcher costs more than a draw of routing would.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The experiment.

  Attributes:
    base: the trace, its tokens, what experts weigh.
    place: the simulated platform.
    requests: R.
    caches: fractions of all experts.
    variants: scheduler, eviction, prefetch of each line.
    seed: of nothing here, for simulated time has no chance in it.
  """

  base: simulated_cells.Settings = simulated_cells.DEFAULT
  place: str = 'rtx4090'
  requests: int = 8
  caches: tuple[float, ...] = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.9)
  variants: tuple[cell_figures.Variant, ...] = (
    ('runahead', 'reuse', 'mixture'),
    ('runahead', 'reuse', 'none'),
    ('lockstep', 'reuse', 'none'),
    ('lockstep', 'reuse', 'history'),
    ('lockstep', 'reuse', 'mixture'),
    ('lockstep', 'reuse', 'oracle:p=0.8'),
    ('lockstep', 'lru', 'none'),
    ('lockstep', 'lru', 'transition' + _UNGUARDED),
    ('lockstep', 'lru', 'history' + _UNGUARDED),
    ('lockstep', 'lru', 'mixture' + _UNGUARDED),
  )
  seed: int = 0


def make(config: Config) -> study.Study:
  """The experiment, to be run."""
  work = functools.partial(simulated_cells.measure, settings=config.base)
  places = [(0.0, cell_figures.NO_CACHE)]
  places += [(cache, each) for cache in config.caches
             for each in config.variants]  # fmt: skip
  tasks = [
    cell_sweep.Task(
      cell_figures.key(config.place, config.requests, cache, each), work,
      simulated_cells.seconds(config.requests, each),
    )
    for cache, each in places
  ]  # fmt: skip
  return study.Study(
    NAME,
    'What prefetching gives, and where it hurts',
    ABOUT,
    config,
    cell_figures.KEY + cell_figures.FIGURES,
    tasks,
    show,
  )


def benefits(rows: Sequence[study.Row]) -> dict[str, dict[float, float]]:
  """Of each prefetcher, by cache: its speed over the same without it."""
  bare = {
    (r['cache'], r['eviction']): r['tokens_per_s']
    for r in rows
    if r['scheduler'] == 'lockstep' and r['prefetch'] == 'none'
  }
  found: dict[str, dict[float, float]] = {}
  for row in rows:
    place = row['cache'], row['eviction']
    if row['scheduler'] != 'lockstep' or row['prefetch'] == 'none':
      continue
    if place in bare:
      own = found.setdefault(cell_figures.label(row), {})
      own[row['cache']] = row['tokens_per_s'] / bare[place]
  return found


def over(rows: Sequence[study.Row]) -> dict[str, dict[float, float]]:
  """By cache: the fastest runahead over what it is compared with."""
  found: dict[str, dict[float, float]] = {}
  slow = next((r['tokens_per_s'] for r in rows if not r['cache']), None)
  for cache in dict.fromkeys(row['cache'] for row in rows if row['cache']):
    here = [row for row in rows if row['cache'] == cache]
    speeds = [r['tokens_per_s'] for r in here if r['scheduler'] == 'runahead']
    if not speeds:
      continue
    ours = max(speeds)
    for eviction in dict.fromkeys(row['eviction'] for row in here):
      for name, oracle in (('real prefetcher', False), ('oracle', True)):
        best = cell_figures.fastest_prefetch(here, eviction, oracle=oracle)
        if best:
          words = f'over the fastest {name} with {eviction}'
          ratio = ours / best['tokens_per_s']
          found.setdefault(words, {})[cache] = ratio
    if slow:
      found.setdefault(_NO_CACHE, {})[cache] = ours / slow
  return found


def show(rows: Sequence[study.Row]) -> list[study.Shown]:
  """One picture of three panels."""
  return [study.Shown(NAME, _draw(rows), say(rows))]


def say(rows: Sequence[study.Row]) -> list[str]:
  """What the rows show, a sentence each."""
  found = [_hurting(name, own) for name, own in benefits(rows).items()]
  for name, own in over(rows).items():
    cells = {f'{cache:.1%}': ratio for cache, ratio in own.items()}
    what = f'Runahead {name}:'
    if name == _NO_CACHE:
      found.append(claims.over_no_cache(what, cells))
    else:
      found.append(claims.reached(what, cells, claims.PREFETCH))
  return found


def _hurting(name: str, own: Mapping[float, float]) -> str:
  """Where a prefetcher gives most and where it costs."""
  best = max(own, key=lambda cache: own[cache])
  worst = min(own, key=lambda cache: own[cache])
  most = (
    f'it gives most at {best:.1%} of the experts resident, {own[best]:.2f}x, '
    f'and least at {worst:.1%}, {own[worst]:.2f}x'
  )
  hurt = [cache for cache, ratio in own.items() if ratio < _HURTS]
  if not hurt:
    return f'{name} never hurts here; {most}.'
  words = ', '.join(f'{cache:.1%} ({own[cache]:.2f}x)' for cache in hurt)
  return f'{name} hurts at {words}; {most}.'


def _draw(rows: Sequence[study.Row]) -> Any:
  first = rows[0]
  made, axes = figures_style.figure(
    f'Prefetching against running ahead: {first["place"]} simulated, '
    f'{first["requests"]} requests',
    14, 5.6, 1, 3,
  )  # fmt: skip
  speeds, gain, ours = axes[0]
  cached = [row for row in rows if row['cache']]
  names = list(dict.fromkeys(map(cell_figures.label, cached)))
  looks = {name: figures_style.look(n) for n, name in enumerate(names)}
  for name in names:
    own = [row for row in cached if cell_figures.label(row) == name]
    x = [100 * row['cache'] for row in own]
    speeds.plot(x, [r['tokens_per_s'] for r in own], **looks[name], label=name)
  for row in rows:
    if not row['cache']:
      figures_style.level(speeds, row['tokens_per_s'], 'no cache')
  figures_style.log_speed(speeds)
  speeds.set_ylabel('decoded tokens/s')
  for name, by_cache in benefits(rows).items():
    _line(gain, by_cache, looks[name])
    hurt = {c: ratio for c, ratio in by_cache.items() if ratio < _HURTS}
    gain.plot(
      [100 * cache for cache in hurt], list(hurt.values()), linestyle='',
      marker='o', markersize=13, markerfacecolor='none', color='#d62728',
    )  # fmt: skip
  figures_style.level(gain, 1.0, 'no prefetch, same eviction', left=True)
  gain.set_ylim(bottom=min(0.98, gain.get_ylim()[0]))
  gain.set_ylabel('speed over no prefetch (ringed red: it hurts)')
  for number, (name, by_cache) in enumerate(over(rows).items()):
    _line(ours, by_cache, figures_style.look(number) | {'label': name})
  ours.set_yscale('log')
  figures_style.plain_ticks(ours, (1, 1.55, 2, 3.46, 5, 10, 20))
  figures_style.level(ours, claims.PREFETCH, 'article: 1.55 over prefetching')
  figures_style.level(ours, claims.LLAMA, 'article: 3.46 over llama.cpp')
  ours.set_ylabel('fastest runahead over ...')
  ours.legend(loc='best', fontsize=8)
  for panel in axes[0]:
    figures_style.by_cache(panel)
  figures_style.legend(made, speeds)
  return made


def _line(
  axes: Any, by_cache: Mapping[float, float], look: Mapping[str, Any]
) -> None:
  axes.plot([100 * c for c in by_cache], list(by_cache.values()), **look)
