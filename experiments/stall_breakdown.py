"""Where the time of a token goes, per scheduler, and for which layer."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from bevy_jax.experiments import (
  cell_figures,
  cell_sweep,
  demo_cells,
  figures_style,
  schedule_picture,
  simulated_cells,
  study,
)

NAME = 'stall_breakdown'
ABOUT = """
The time of the measured window over the tokens decoded in it, split by what was
busy: the device alone, device and link, the link alone (the device stalls), or
neither (the host works). A stall is put down to the layer of the expert that is
on the link. Simulated decoding of recorded routing, and the demo model measured
on the machine at hand with a throttled link.
"""
SHARES = {
  'device_alone': 'device alone',
  'both': 'device and link',
  'link_alone': 'link alone: the device stalls',
  'neither': 'neither',
}
_COLOURS = ('#1b9e77', '#0b3c8c', '#d62728', '#bbbbbb')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The experiment.

  Attributes:
    base: the trace, its tokens, what experts weigh.
    places: simulated platforms.
    requests: R.
    cache: fraction of all experts.
    variants: scheduler, eviction, prefetch of each bar.
    demo: how the demo model is measured; None for not at all.
    demo_cache: fraction there.
    demo_variants: there.
    seed: of the demo's texts.
  """

  base: simulated_cells.Settings = simulated_cells.DEFAULT
  places: tuple[str, ...] = ('rtx4090', 'rtx4060-laptop')
  requests: int = 8
  cache: float = 0.75
  variants: tuple[cell_figures.Variant, ...] = (
    ('lockstep', 'lru', 'none'),
    ('lockstep', 'lru', 'mixture:guarded=false'),
    ('lockstep', 'reuse', 'none'),
    ('lockstep', 'reuse', 'mixture'),
    ('bevy', 'reuse', 'none'),
    ('runahead', 'reuse', 'none'),
    ('runahead', 'reuse', 'mixture'),
  )
  demo: demo_cells.Settings | None = demo_cells.DEFAULT
  demo_cache: float = 0.5
  demo_variants: tuple[cell_figures.Variant, ...] = (
    ('lockstep', 'lru', 'none'),
    ('lockstep', 'lfu_decayed', 'none'),
    ('lockstep', 'lfu_decayed', 'next_gate'),
    ('runahead', 'lfu_decayed', 'none'),
  )
  seed: int = 0


def make(config: Config) -> study.Study:
  """The experiment, to be run."""
  work = functools.partial(simulated_cells.measure, settings=config.base)
  tasks = [
    cell_sweep.Task(
      cell_figures.key(place, config.requests, config.cache, each), work,
      simulated_cells.seconds(config.requests, each),
    )
    for place in config.places
    for each in config.variants
  ]  # fmt: skip
  if config.demo:
    on_demo = functools.partial(demo_cells.measure, settings=config.demo)
    rows, cache = min(config.requests, config.demo.rows), config.demo_cache
    for each in config.demo_variants:
      key = cell_figures.key(demo_cells.PLACE, rows, cache, each)
      tasks.append(cell_sweep.Task(key, on_demo, 3, alone=True))
  return study.Study(
    NAME,
    'Where the time goes',
    ABOUT,
    config,
    cell_figures.KEY + cell_figures.FIGURES,
    tasks,
    functools.partial(show, config=config),
  )


def per_token(row: study.Row) -> dict[str, float]:
  """Milliseconds a decoded token by what was busy; they add up to all."""
  whole = 1e3 / row['tokens_per_s']
  return {name: row[name] * whole for name in SHARES}


def by_layer(row: study.Row) -> list[float]:
  """Milliseconds a decoded token that the device stalled for each layer."""
  whole = 1e3 / row['tokens_per_s']
  return [float(x) * whole for x in str(row['stall_by_layer']).split()]


def show(rows: Sequence[study.Row], config: Config) -> list[study.Shown]:
  """A schedule; bars, and stalls by layer, a line of panels a place."""
  said = [
    line
    for place in dict.fromkeys(row['place'] for row in rows)
    for line in say([row for row in rows if row['place'] == place])
  ]
  return [_schedule(config), study.Shown(NAME, _draw(rows), said)]


def say(rows: Sequence[study.Row]) -> list[str]:
  """What the rows of one place show, a sentence each."""
  place, first = rows[0]['place'], rows[0]
  stalls = {
    cell_figures.label(row): per_token(row)['link_alone'] for row in rows
  }
  most = max(stalls, key=lambda name: stalls[name])
  least = min(stalls, key=lambda name: stalls[name])
  fast = max(rows, key=lambda row: float(row['tokens_per_s']))
  layers = by_layer(fast)
  worst = max(range(len(layers)), key=lambda layer: layers[layer])
  gain = fast['tokens_per_s'] / first['tokens_per_s']
  tail = 'the device never stalls with it'
  if layers[worst]:
    share = layers[worst] / sum(layers)
    tail = f'it stalls most for layer {worst}, {share:.0%} of all its stalls'
  return [
    f'{place}: the device stalls {stalls[most]:.2f} ms a token with {most}, '
    f'the most, and {stalls[least]:.2f} ms with {least}, the least.',
    f'{place}: the fastest is {cell_figures.label(fast)}, {gain:.2f}x '
    f'{cell_figures.label(first)}; device and link work at once '
    f"{fast['both']:.0%} of its time and {first['both']:.0%} of the other's, "
    f'neither works {fast["neither"]:.0%} and {first["neither"]:.0%}; {tail}.',
  ]


def _schedule(config: Config) -> study.Shown:
  """Lockstep and the last variant, with the same eviction, request by request.

  Simulated anew, which takes seconds: rows keep no log.
  """
  place, (scheduler, eviction, prefetch) = config.places[0], config.variants[-1]
  logs, experts = {}, 1
  for each in (
    ('lockstep', eviction, 'none'), (scheduler, eviction, prefetch)
  ):  # fmt: skip
    key = cell_figures.key(place, config.requests, config.cache, each)
    sim, _ = simulated_cells.simulate(key, config.base)
    experts = sim.trace.num_experts
    logs[cell_figures.label(key)] = simulated_cells.log(sim, each)
  title = f'{place} simulated, {config.cache:.1%} of the experts resident'
  skip = config.base.skip
  made = schedule_picture.draw(logs, experts, skip=skip, title=title)
  said = [panel.get_title() for panel in made.axes if panel.get_title()]
  return study.Shown('schedule', made, [f'{text}.' for text in said])


def _draw(rows: Sequence[study.Row]) -> Any:
  places = list(dict.fromkeys(row['place'] for row in rows))
  made, axes = figures_style.figure(
    'Where the time of a decoded token goes',
    14, 1 + 3.3 * len(places), len(places), 2,
  )  # fmt: skip
  for (bars, layers), place in zip(axes, places, strict=True):
    own = [row for row in rows if row['place'] == place]
    _bars(bars, own)
    kind = 'measured' if place == demo_cells.PLACE else 'simulated'
    first = own[0]
    bars.set_title(
      f'{place}, {kind}: {first["requests"]} requests, {first["cache"]:.1%} of '
      'the experts resident'
    )
    for number, row in enumerate(own):
      stall = by_layer(row)
      look = figures_style.look(number) | {'markersize': 3}
      look['label'] = cell_figures.label(row)
      layers.plot(range(len(stall)), stall, **look)
    layers.set_xlabel('layer that is waited for')
    layers.set_ylabel('stall (ms a token)')
    layers.set_ylim(bottom=0)
    layers.legend(fontsize=8, loc='center left', bbox_to_anchor=(1, 0.5))
  figures_style.legend(made, axes[0][0])
  return made


def _bars(axes: Any, own: Sequence[study.Row]) -> None:
  names = [cell_figures.label(row) for row in own]
  left = [0.0] * len(own)
  for (column, words), colour in zip(SHARES.items(), _COLOURS, strict=True):
    widths = [per_token(row)[column] for row in own]
    axes.barh(names, widths, 0.75, left, color=colour, label=words)
    left = [a + b for a, b in zip(left, widths, strict=True)]
  axes.invert_yaxis()
  axes.grid(visible=False, axis='y')
  axes.set_xlabel('ms a token')
