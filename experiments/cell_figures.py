"""A run's event log as one row of a table."""

from collections.abc import Sequence

from bevy_jax import events, figures
from bevy_jax import window as window_lib
from bevy_jax.experiments import study, time_split

# What a cell is: where it runs, what decodes, and who decides.
KEY = ('place', 'requests', 'cache', 'scheduler', 'eviction', 'prefetch')
FIGURES = (
  'tokens_per_s', 'tokens', 'seconds', 'tpot_p99_ms', 'gpu_busy', 'link_busy',
  'device_alone', 'both', 'link_alone', 'neither', 'stall_by_layer', 'loads',
  'prefetch_loads', 'wasted_prefetches', 'wasted_bytes', 'guess_accuracy',
  'missing_recall', 'missing_precision', 'launches', 'mean_group', 'max_lag',
  'machine_load', 'note',
)  # fmt: skip

# Scheduler, eviction, prefetch.
Variant = tuple[str, str, str]
# Copies what each step uses, as llama.cpp does where it computes on the device.
NO_CACHE = 'lockstep', 'lru', 'none'


def figure(
  log: Sequence[events.Event],
  *,
  rows: int,
  skip: int,
  layers: int,
  experts: int,
  expert_bytes: int,
  note: str = '',
  load: float = 0.0,
) -> study.Row:
  """The measured window of a run; times in seconds, shares of the window.

  Args:
    log: all events.
    rows: that could decode together.
    skip: tokens of every request before the window.
    layers: MoE layers.
    experts: of each.
    expert_bytes: of one.
    note: what a reader must know beside what the window says.
    load: processes that wanted to run on the machine when it was measured.
  """
  window = window_lib.find(log, rows, skip)
  counts = figures.cache(window.inside(log))
  guessed = figures.prefetch(
    log, experts, window.first, window.last, expert_bytes
  )
  spent = time_split.split(log, window, layers, experts)
  ns = window.end - window.begin
  begun = figures.launches(log, window)
  shares = {
    'gpu_busy': (spent.device + spent.both) / ns,
    'link_busy': (spent.link + spent.both) / ns,
    'device_alone': spent.device / ns,
    'both': spent.both / ns,
    'link_alone': spent.link / ns,
    'neither': spent.neither / ns,
  }
  late = figures.speed(log, window)['tpot_ms']['p99']
  found: study.Row = {
    'tokens_per_s': round(window.tokens(log) / window.seconds, 4),
    'tokens': window.tokens(log),
    'seconds': round(window.seconds, 6),
    'tpot_p99_ms': round(late or 0.0, 4),
    'stall_by_layer': ' '.join(f'{each / ns:.5f}' for each in spent.layers),
    'loads': counts['loads'],
    'prefetch_loads': counts['prefetch_loads'],
    'wasted_prefetches': guessed['wasted_prefetches'],
    'wasted_bytes': guessed['wasted_prefetch_bytes'],
    'launches': begun['launches'],
    'mean_group': round(begun['mean_group'], 4),
    'max_lag': figures.max_lag(log, window),
    'machine_load': round(load, 1),
    'note': '; '.join(text for text in (note, window.note) if text),
  }
  for name in ('guess_accuracy', 'missing_recall', 'missing_precision'):
    shares[name] = guessed[name]
  return found | {name: round(value, 5) for name, value in shares.items()}


def label(row: study.Row) -> str:
  """Who ran a cell, in words."""
  if not row['cache']:
    return 'no cache'
  words = f'{row["scheduler"]}, {row["eviction"]}'
  name, _, options = str(row['prefetch']).partition(':')
  if name == 'none':
    return words
  unguarded = ' unguarded' if 'guarded=false' in options else ''
  return f'{words} + {name}{unguarded}'


def key(place: str, requests: int, cache: float, variant: Variant) -> study.Row:
  """The first columns of a cell."""
  whole = (place, requests, cache, *variant)
  return dict(zip(KEY, whole, strict=True))


def variant(row: study.Row) -> Variant:
  """Who ran it: scheduler, eviction, prefetch."""
  return row['scheduler'], row['eviction'], row['prefetch']


def fastest_prefetch(
  rows: Sequence[study.Row], eviction: str = '', *, oracle: bool = False
) -> study.Row | None:
  """The fastest of some cells in which lockstep prefetches, if any does.

  Args:
    rows: cells of one place, one cache and as many requests.
    eviction: the only one to look at, '' for all.
    oracle: whether to look at those that are told the future, or at all others.
  """
  own = [
    row
    for row in rows
    if row['scheduler'] == 'lockstep'
    and row['prefetch'] != 'none'
    and eviction in ('', row['eviction'])
    and str(row['prefetch']).startswith('oracle') == oracle
  ]
  return max(own, key=lambda row: float(row['tokens_per_s']), default=None)
