"""What prefetchers see coming: the larger the cache, the less of it counts."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from bevy_jax import config as config_lib
from bevy_jax import foresight
from bevy_jax import shapes as shapes_lib
from bevy_jax import trace as trace_lib
from bevy_jax.experiments import (
  cell_sweep,
  demo_cells,
  figures_style,
  simulated_cells,
  study,
)

NAME = 'prefetch_accuracy'
ABOUT = """
Accuracy: of the experts that a predictor names for the next layer, those that
the router then asks for. Recall: of the experts that are asked for and are not
resident, those that it had named; only these can be loaded in time. Precision:
of the named ones that are not resident, those that are asked for. Wasted: bytes
that were loaded for guesses and evicted before anybody used them. On the trace
requests decode in lockstep order through the cache alone, no clock; accuracy,
recall and precision are taken while nothing is prefetched, waste with up to
`ahead` prefetches before each layer. LRU is what most publications cache with,
`reuse` the best eviction here. `oracle:p=0.8` knows the answer and is wrong
for one expert in five, whatever the cache: it stands for `next_gate`, which
applies the next layer's router early and needs a model.
"""
PANELS = {
  'guess_accuracy': 'accuracy (%)',
  'missing_recall': 'recall on missing (%)',
  'missing_precision': 'precision on missing (%)',
  'wasted': 'wasted (MB a token)',
}
_KEY = ('place', 'requests', 'cache', 'eviction', 'prefetch')
_SEEN = (
  'guess_accuracy', 'missing_recall', 'missing_precision', 'prefetch_loads',
  'wasted_prefetches', 'wasted', 'misses',
)  # fmt: skip
_MB = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The experiment.

  Attributes:
    base: the trace and its tokens.
    requests: R, on the trace and on the demo model.
    caches: fractions of all experts.
    predictors: on the trace.
    evictions: likewise.
    ahead: prefetches before each layer, where waste is counted.
    demo: how the demo model is measured; None for not at all.
    demo_caches: fractions there.
    demo_predictors: there.
    seed: of the oracle's errors and the demo's texts.
  """

  base: simulated_cells.Settings = simulated_cells.DEFAULT
  requests: int = 8
  caches: tuple[float, ...] = (0.125, 0.25, 0.5, 0.75, 0.9)
  predictors: tuple[str, ...] = (
    'popularity', 'transition', 'history', 'mixture', 'oracle:p=0.8',
  )  # fmt: skip
  evictions: tuple[str, ...] = ('lru', 'reuse')
  ahead: int = 8
  demo: demo_cells.Settings | None = demo_cells.DEFAULT
  demo_caches: tuple[float, ...] = (0.125, 0.375, 0.75)
  demo_predictors: tuple[str, ...] = (
    'popularity', 'transition', 'history', 'mixture', 'next_gate',
  )  # fmt: skip
  seed: int = 0


def make(config: Config) -> study.Study:
  """The experiment, to be run."""
  on_trace = [
    cell_sweep.Task(
      dict(zip(_KEY, ('trace', config.requests, cache, eviction, name),
               strict=True)),
      functools.partial(see, config=config), 0.8,
    )
    for eviction in config.evictions
    for name in config.predictors
    for cache in config.caches
  ]  # fmt: skip
  on_demo = [
    cell_sweep.Task(
      dict(zip(_KEY, ('demo', config.requests, cache, 'lfu_decayed', name),
               strict=True)),
      functools.partial(measure, settings=config.demo), 3, alone=True,
    )
    for name in config.demo_predictors
    for cache in config.demo_caches
    if config.demo
  ]  # fmt: skip
  return study.Study(
    NAME,
    'What prefetchers see coming',
    ABOUT,
    config,
    (*_KEY, *_SEEN),
    on_trace + on_demo,
    show,
  )


def see(key: study.Row, config: Config) -> study.Row:
  """A cell on the trace."""
  base, requests = config.base, key['requests']
  trace = trace_lib.load(base.trace)
  name = key['prefetch']
  if name.startswith('oracle'):
    name += f':seed={config.seed}'
  prefetcher = simulated_cells.prefetcher(name, trace, base.first, requests)
  slots = int(key['cache'] * trace.layers * trace.num_experts)
  looked, loaded = (
    foresight.see(
      trace, range(base.first, base.first + requests), range(base.tokens),
      slots, config_lib.EVICTIONS[key['eviction']], prefetcher, ahead=ahead,
      warmup=base.skip,
    )
    for ahead in (0, config.ahead)
  )  # fmt: skip
  shape, form = shapes_lib.parse(base.model_shape)
  wasted = loaded.figures['wasted_prefetches'] * shape.expert_bytes(form)
  row: study.Row = {
    name: round(looked.figures[name], 5) for name in list(PANELS)[:3]
  }
  for name in ('prefetch_loads', 'wasted_prefetches'):
    row[name] = loaded.figures[name]
  tokens = requests * (base.tokens - base.skip)
  row['wasted'] = round(wasted / _MB / tokens, 5)
  row['misses'] = sum(looked.misses[base.skip * trace.layers :])
  return row


def measure(key: study.Row, settings: demo_cells.Settings) -> study.Row:
  """A cell on the demo model: lockstep, prefetching in the time there is."""
  found = demo_cells.measure(key | {'scheduler': 'lockstep'}, settings)
  found['wasted'] = round(found['wasted_bytes'] / _MB / found['tokens'], 5)
  return {name: found[name] for name in _SEEN if name in found}


def show(rows: Sequence[study.Row]) -> list[study.Shown]:
  """A picture a place, a line of panels an eviction."""
  found = []
  for place, title in (
    ('trace', 'Recorded routing, lockstep order'),
    ('demo', 'Demo model, measured on this machine'),
  ):
    own = [row for row in rows if row['place'] == place]
    if own:
      drawn = _draw(own, title)
      found.append(study.Shown(f'{NAME}_{place}', drawn, say(own)))
  return found


def say(rows: Sequence[study.Row]) -> list[str]:
  """What the rows of one place show, a sentence each."""
  found = []
  for eviction in dict.fromkeys(row['eviction'] for row in rows):
    own = [row for row in rows if row['eviction'] == eviction]
    worse, told = [], []
    names = list(dict.fromkeys(row['prefetch'] for row in own))
    low, high = _ends(own)
    for name in names:
      first, last = (_at(own, name, cache) for cache in (low, high))
      told.append(
        f'{name} {first["missing_recall"]:.0%} to {last["missing_recall"]:.0%}'
      )
      if last['missing_recall'] < first['missing_recall']:
        worse.append(name)
    found.append(
      f'With {eviction}, from {low:.1%} to {high:.1%} of the experts resident, '
      f'recall on missing experts goes from {", ".join(told)}: a larger cache '
      f'makes {len(worse)} of {len(names)} predictors see less of what is '
      'missing' + (f' ({", ".join(worse)}).' if worse else '.')
    )
    found.append(_steady(own, names, eviction))
  return found


def _steady(own: Sequence[study.Row], names: Sequence[str], of: str) -> str:
  """How much accuracy itself depends on the cache, and the most waste."""
  spread = max(
    max(values) - min(values)
    for values in (
      [r['guess_accuracy'] for r in own if r['prefetch'] == name]
      for name in names
    )
  )
  worst = max(own, key=lambda row: float(row['wasted']))
  return (
    f'With {of}, accuracy itself moves by at most {100 * spread:.1f} points '
    f'with the cache; most is wasted by {worst["prefetch"]} at '
    f'{worst["cache"]:.1%}: {worst["wasted"]:.2f} MB a token.'
  )


def _ends(rows: Sequence[study.Row]) -> tuple[float, float]:
  caches = [float(row['cache']) for row in rows]
  return min(caches), max(caches)


def _at(rows: Sequence[study.Row], name: str, cache: float) -> study.Row:
  return next(r for r in rows if (r['prefetch'], r['cache']) == (name, cache))


def _seen(row: study.Row, column: str) -> float:
  """A figure; no precision where nothing that was missing had been named."""
  if column == 'missing_precision' and not row['missing_recall']:
    return math.nan
  return float(row[column])


def _draw(rows: Sequence[study.Row], title: str) -> Any:
  evictions = list(dict.fromkeys(row['eviction'] for row in rows))
  names = list(dict.fromkeys(row['prefetch'] for row in rows))
  made, axes = figures_style.figure(
    f'{title}: what predictors see of the next layer',
    13, 0.9 + 2.9 * len(evictions), len(evictions), len(PANELS),
  )  # fmt: skip
  for line, eviction in zip(axes, evictions, strict=True):
    for panel, (column, words) in zip(line, PANELS.items(), strict=True):
      for number, name in enumerate(names):
        who = eviction, name
        own = [r for r in rows if (r['eviction'], r['prefetch']) == who]
        scale = 1 if column == 'wasted' else 100
        panel.plot(
          [100 * row['cache'] for row in own],
          [scale * _seen(row, column) for row in own],
          **figures_style.look(number), label=name,
        )  # fmt: skip
      panel.set_ylabel(words)
      panel.set_ylim(bottom=0, top=None if column == 'wasted' else 100)
      panel.set_title(eviction)
      figures_style.by_cache(panel)
  figures_style.legend(made, axes[0][0])
  return made
