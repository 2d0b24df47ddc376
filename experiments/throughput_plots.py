"""The pictures of `throughput`: lines over concurrency, a panel a cache."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bevy_jax.experiments import cell_figures, claims, figures_style, study

if TYPE_CHECKING:
  from bevy_jax.experiments import throughput

_LINES = (
  'runahead', 'fastest prefetcher', 'lockstep, LRU', 'no cache',
  'everything resident',
)  # fmt: skip


def speeds(rows: Sequence[study.Row]) -> Any:
  """Tokens/s: a line of panels a place, a panel a cache."""
  places = list(dict.fromkeys(row['place'] for row in rows))
  caches = sorted({row['cache'] for row in rows if 0 < row['cache'] < 1})
  made, axes = figures_style.figure(
    'Decode throughput over concurrency, by how much is resident',
    1 + 3.3 * len(caches), 1 + 3.1 * len(places), len(places), len(caches),
  )  # fmt: skip
  for line, place in zip(axes, places, strict=True):
    own = [row for row in rows if row['place'] == place]
    requests = sorted({row['requests'] for row in own})
    values: list[float] = []
    for panel, cache in zip(line, caches, strict=True):
      for number, name in enumerate(_LINES):
        found = [_speed(own, name, each, cache) for each in requests]
        look = figures_style.look(number)
        panel.plot(requests, found, **look, label=name)
        values += found
      figures_style.log_speed(panel)
      panel.set_title(f'{place}, {cache:.1%} resident')
      figures_style.by_requests(panel, requests)
    for panel in line:
      panel.set_ylim(0.8 * np.nanmin(values), 1.25 * np.nanmax(values))
    kind = 'measured' if place == 'demo' else 'simulated'
    line[0].set_ylabel(f'decoded tokens/s, {kind}')
  figures_style.legend(made, axes[0][0])
  return made


def _speed(
  own: Sequence[study.Row], name: str, requests: int, cache: float
) -> float:
  """Tokens/s of a line in one cell, NaN where it did not run."""
  rows = [row for row in own if row['requests'] == requests]
  here = [row for row in rows if row['cache'] == cache]
  if name == 'fastest prefetcher':
    best = cell_figures.fastest_prefetch(here)
    found = [best] if best else []
  elif name == 'lockstep, LRU':
    plain = cell_figures.NO_CACHE
    found = [row for row in here if cell_figures.variant(row) == plain]
  elif name == 'runahead':
    found = [row for row in here if row['scheduler'] == 'runahead']
  else:
    whole = 0 if name == 'no cache' else 1
    found = [row for row in rows if row['cache'] == whole]
  return max((float(r['tokens_per_s']) for r in found), default=np.nan)


def ratios(found: Sequence['throughput.Ratio']) -> Any:
  """Runahead over no cache, over prefetchers, and over lockstep against s."""
  places = list(dict.fromkeys(each.place for each in found))
  caches = sorted({each.cache for each in found})
  made, axes = figures_style.figure(
    'Runahead over what it is compared with',
    14, 1 + 3.5 * len(places), len(places), 4,
  )  # fmt: skip
  for line, place in zip(axes, places, strict=True):
    own = [each for each in found if each.place == place]
    requests = sorted({each.requests for each in own})
    for number, cache in enumerate(caches):
      here = [each for each in own if each.cache == cache]
      x, look = [r.requests for r in here], figures_style.look(number)
      named = {'label': f'{cache:.1%} of the experts resident'}
      for panel, values in zip(
        line, ('none', 'published', 'prefetch'), strict=False
      ):
        y = [getattr(each, values) or np.nan for each in here]
        panel.plot(x, y, **look | named)
        if np.isnan(y).all() and not number:
          panel.text(0.5, 0.5, 'none ran', transform=panel.transAxes)
      share = [each.share for each in here]
      line[3].plot(
        share, [r.lockstep for r in here], **look | {'linestyle': ''}
      )
    _dress(line, place, requests)
  figures_style.legend(made, axes[0][0])
  return made


def _dress(line: Sequence[Any], place: str, requests: Sequence[int]) -> None:
  """Names, scales and what is compared with."""
  words = ('no cache', 'LRU prefetcher', 'fastest prefetcher', 'lockstep')
  for panel, name in zip(line, words, strict=True):
    panel.set_title(f'{place}: over {name}')
    panel.set_ylabel('times as fast')
  for panel in line[:3]:
    figures_style.by_requests(panel, requests)
    figures_style.level(panel, 1, '')
  line[0].set_yscale('log')
  figures_style.plain_ticks(line[0], (1, 2, 3.46, 5, 10, 20))
  figures_style.level(line[0], claims.LLAMA, 'article: 3.46 over llama.cpp')
  for panel in line[1:3]:
    figures_style.level(panel, claims.PREFETCH, 'article: 1.55')
    panel.set_ylim(top=max(1.75, panel.get_ylim()[1]))
  shares = np.linspace(0.001, 0.999, 200)
  line[3].plot(
    shares, [claims.overlap(s) for s in shares], color='#333333', linewidth=1
  )
  line[3].annotate('1 / max(s, 1 - s)', (0.5, 2), (4, -2), fontsize=8,
                   textcoords='offset points')  # fmt: skip
  line[3].set_xlabel("s, the device's share of lockstep's time")
  line[3].set_xlim(0, 1)
