"""The event log of a run, turned into figures."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import rich.table

from bevy_jax import bounds as bounds_lib
from bevy_jax import busy, events, figures
from bevy_jax import window as window_lib
from bevy_jax.offload import eviction as eviction_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
  """What a report must know beside the log.

  Attributes:
    config: the resolved configuration, fit for JSON; `table` reads
      'scheduler', 'eviction' and 'prefetch' from it, or from its 'engine'.
    versions: of the packages that decide a result.
    device: in words.
    link: see `EngineConfig`.
    rows: R.
    layers: MoE layers.
    experts: experts of a layer.
    top_k: experts that a token uses.
    slots: size of the cache.
    quota: slots that each layer may fill; empty where all share one pool.
    block_bytes: bytes of an expert, scales included.
    host_blocks: experts that host memory has room for.
    remark: what else a reader must know, empty where nothing.
    cache_bytes: bytes of the cache.
    eviction: the run's own.
    warmup: tokens of every request before the window opens.
  """

  config: dict[str, Any]
  versions: dict[str, str]
  device: str
  link: str
  rows: int
  layers: int
  experts: int
  top_k: int
  slots: int
  block_bytes: int
  cache_bytes: int
  eviction: eviction_lib.Eviction
  warmup: int
  host_blocks: int = 0
  remark: str = ''
  quota: tuple[int, ...] = ()


def make(
  log: Sequence[events.Event], facts: Facts, *, bounds: bool = True
) -> dict[str, Any]:
  """A report: one JSON object, its keys explained in WORKSPACE.md.

  Uses, hits, loads, launches and shares are those of the measured window;
  `prefill_*` and `total` those of the whole run. `s` and `h` are the shares
  of the window that full-batch compute and the host's own work would take.

  Args:
    log: the events.
    facts: what they do not say.
    bounds: whether to compute `bound` and what rests on it, which costs more
      than all the rest.

  Raises:
    ValueError: no decode launch has ended.
  """
  window = window_lib.find(log, facts.rows, facts.warmup)
  loads, ran = busy.loads(log), busy.launches(log)
  inside = window.inside(log)
  report = _head(facts)
  report |= figures.speed(log, window)
  counts = figures.cache(inside)
  report |= counts
  report['load_bytes'] = counts['loads'] * facts.block_bytes
  report |= figures.prefetch(
    log, facts.experts, window.first, window.last, facts.block_bytes
  )
  report['host_blocks'] = facts.host_blocks
  report |= figures.host(inside, facts.block_bytes)
  report |= figures.prefill(log)
  report |= figures.shares(window, loads, ran)
  report |= figures.launches(log, window)
  report['max_lag'] = figures.max_lag(log, window)
  if bounds:
    report |= _bounds(log, window, facts, report, busy.load_seconds(loads), ran)
  report['slots'], report['cache_bytes'] = facts.slots, facts.cache_bytes
  report['capacity'] = 'layer' if facts.quota else 'global'
  report['total'] = _total(log, ran, facts)
  return report


def whole(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """One report as it is, or {"runs": [...]} where there are more."""
  return reports[0] if len(reports) == 1 else {'runs': list(reports)}


def save(path: pathlib.Path | str, reports: Sequence[dict[str, Any]]) -> None:
  """Writes what `whole` says."""
  text = json.dumps(whole(reports), indent=2, allow_nan=False)
  pathlib.Path(path).write_text(text + '\n', encoding='utf-8')


def table(reports: Sequence[dict[str, Any]]) -> rich.table.Table:
  """Runs side by side, one column each; ratios are to the first one."""
  first = reports[0]['tokens_per_s']
  lines: dict[str, Callable[[dict[str, Any]], str]] = {
    'eviction': lambda r: _setting(r, 'eviction'),
    'prefetch': lambda r: _setting(r, 'prefetch'),
    'tokens/s': lambda r: f'{r["tokens_per_s"]:.2f}',
    'ratio': lambda r: f'{r["tokens_per_s"] / first:.2f}' if first else '-',
    'hit rate': lambda r: f'{r["hit_rate"]:.1%}',
    'loads': lambda r: str(r['loads']),
    'link busy': lambda r: f'{r["link_busy"]:.0%}',
    'gpu busy': lambda r: f'{r["gpu_busy"]:.0%}',
    'stall': lambda r: f'{r["stall"]:.0%}',
    'host us a launch': lambda r: f'{sum(r["host_us"].values()):.0f}',
    'mean group': lambda r: f'{r["mean_group"]:.2f}',
    'max lag': lambda r: str(r['max_lag']),
    'of the bound': lambda r: (
      f'{r["bound_fraction"]:.0%}' if 'bound_fraction' in r else '-'
    ),
  }
  if any(r['disk_reads'] for r in reports):
    lines['disk reads'] = lambda r: str(r['disk_reads'])
    lines['disk GB/s'] = lambda r: f'{r["disk_gb_per_s"]:.2f}'
  shown = rich.table.Table()
  shown.add_column('scheduler')
  for report in reports:
    shown.add_column(_setting(report, 'scheduler'), justify='right')
  for name, show in lines.items():
    shown.add_row(name, *(show(report) for report in reports))
  return shown


def _setting(report: dict[str, Any], name: str) -> str:
  config = report['config']
  return str(config.get('engine', config).get(name, 'none'))


def _head(facts: Facts) -> dict[str, Any]:
  notes = [facts.remark] if facts.remark else []
  if facts.link.startswith('throttled'):
    _, speed, *latency = facts.link.split(':')
    late = f' and {latency[0]} us latency' if latency else ''
    notes.append(
      f'link throttled to {speed} GB/s{late}: it stands for a slower link '
      'than this machine has'
    )
  head: dict[str, Any] = {'note': '; '.join(notes)} if notes else {}
  for name in ('config', 'versions', 'device', 'link'):
    head[name] = getattr(facts, name)
  return head


def _bounds(
  log: Sequence[events.Event],
  window: window_lib.Window,
  facts: Facts,
  report: dict[str, Any],
  load_s: float,
  ran: Sequence[busy.Ran],
) -> dict[str, Any]:
  path = bounds_lib.steps(log, facts.experts, window.first, window.last)
  best = bounds_lib.inside(
    path, bounds_lib.belady_misses(path, facts.slots, facts.quota)
  )
  misses = bounds_lib.lockstep_misses(
    path,
    layers=facts.layers,
    experts=facts.experts,
    slots=facts.slots,
    rows=facts.rows,
    eviction=facts.eviction,
    quota=facts.quota,
  )
  lockstep = bounds_lib.inside(path, misses)
  # The window's own launches: the first ones after a start are slower.
  cost = bounds_lib.fit(
    r for r in ran if window.begin <= r.event.time and r.end <= window.end
  )
  device = [cost.seconds(len(step.keys), step.rows) for step in path]
  gpu_s = bounds_lib.inside(path, device)
  headroom_s = bounds_lib.headroom(
    [s.share * n * load_s for s, n in zip(path, misses, strict=True)],
    [s.share * each for s, each in zip(path, device, strict=True)],
  )
  link_s = best * load_s
  # A prefetch that nobody used was of no use to the link.
  own = report['prefetch_loads'] - report['wasted_prefetches']
  useful = min(report['demand_loads'] + max(0, own), lockstep) * load_s
  least = max(link_s, gpu_s)
  return {
    'useful_efficiency': figures.part(max(useful, gpu_s), window.seconds),
    'bound': {
      'link_s': link_s,
      'gpu_s': gpu_s,
      'clairvoyant_s': least,
      'headroom_s': headroom_s,
    },
    'bound_fraction': figures.part(least, window.seconds),
    's': figures.part(gpu_s, window.seconds),
  }


def _total(
  log: Sequence[events.Event], ran: Sequence[busy.Ran], facts: Facts
) -> dict[str, Any]:
  """The whole run, warm-up and tail included."""
  counts = figures.cache(log)
  return {
    'seconds': (ran[-1].end - ran[0].event.time) * 1e-9,
    'launches': len(ran),
    **counts,
    **figures.host(log, facts.block_bytes),
    'load_bytes': (
      sum(isinstance(e, events.LoadIssued) for e in log) * facts.block_bytes
    ),
  }
