"""The figures of a report that need no model of the machine."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from bevy_jax import busy, events
from bevy_jax import window as window_lib

_HOST_SIDE = 'from launch to seen-ended'
_DEVICE_SIDE = 'from begin to end on the device'
_SECTIONS = tuple(f.name for f in dataclasses.fields(events.HostTime))


def speed(
  log: Sequence[events.Event], window: window_lib.Window
) -> dict[str, Any]:
  """Tokens and the times of requests; only the rate is the window's."""
  tokens = window.tokens(log)
  arrived: dict[int, int] = {}
  times: dict[int, list[int]] = {}
  admitted: dict[int, int] = {}
  prompts = 0
  for e in log:
    if isinstance(e, events.Admitted):
      arrived[e.request], admitted[e.request] = e.arrived, e.time
    elif isinstance(e, events.Prefilled):
      prompts += e.time - min(admitted[r] for r in e.requests)
    elif isinstance(e, events.Token):
      times.setdefault(e.request, []).append(e.time)
  first = [ts[0] - arrived[r] for r, ts in times.items()]
  each = [
    (ts[-1] - ts[0]) / (len(ts) - 1) for ts in times.values() if len(ts) > 1
  ]
  return {
    'tokens_per_s': tokens / window.seconds if window.seconds else 0.0,
    'decode_seconds': window.seconds,
    'window': {
      'begin_ns': window.begin,
      'end_ns': window.end,
      'tokens': tokens,
      'note': window.note,
    },
    'prefill_seconds': prompts * 1e-9,
    'requests': len(arrived),
    'new_tokens': sum(len(ts) for ts in times.values()),
    'ttft_ms': _percentiles(first),
    'tpot_ms': _percentiles(each),
  }


def _percentiles(ns: Sequence[float]) -> dict[str, float | None]:
  """In milliseconds; None where there is nothing to take them of."""
  return {
    f'p{p}': float(np.percentile(ns, p)) * 1e-6 if ns else None
    for p in (50, 95, 99)
  }


def cache(log: Sequence[events.Event]) -> dict[str, Any]:
  """Uses and loads of decoding among some events."""
  routed = [e for e in log if isinstance(e, events.Routed)]
  causes = [e.cause for e in log if isinstance(e, events.LoadIssued)]
  uses = sum(len(e.experts) for e in routed)
  hits = sum(e.hits for e in routed)
  return {
    'hit_rate': part(hits, uses),
    'uses': uses,
    'hits': hits,
    'loads': sum(cause != 'prefill' for cause in causes),
    'demand_loads': causes.count('demand'),
    'reloads': causes.count('reload'),
    'prefetch_loads': causes.count('prefetch'),
    'wasted_loads': sum(
      isinstance(e, events.Evicted) and not e.used for e in log
    ),
  }


def prefetch(
  log: Sequence[events.Event],
  experts: int,
  first: int,
  last: int,
  block_bytes: int,
) -> dict[str, Any]:
  """What guesses were worth, and what came of the loads made for them.

  Args:
    log: all events, since a prefetch may begin long before it is used.
    experts: experts of a layer.
    first: index after which the measured window counts.
    last: index before which it does.
    block_bytes: bytes of an expert.
  """
  judged = [e for e in log[first + 1 : last] if isinstance(e, events.Judged)]
  guessed = sum(e.guessed for e in judged)
  useful = sum(e.useful for e in judged)
  late, wasted = _outcomes(log, experts, first, last)
  return {
    'guess_accuracy': part(sum(e.right for e in judged), guessed),
    'missing_recall': part(useful, sum(e.missing for e in judged)),
    'missing_precision': part(useful, sum(e.away for e in judged)),
    'late_prefetches': late,
    'wasted_prefetches': wasted,
    'wasted_prefetch_bytes': wasted * block_bytes,
  }


def _outcomes(
  log: Sequence[events.Event], experts: int, first: int, last: int
) -> tuple[int, int]:
  """Prefetches needed before they landed, and those evicted unused."""
  coming: set[int] = set()
  prefetched: set[int] = set()
  late = wasted = 0
  for i, event in enumerate(log):
    inside = first < i < last
    if isinstance(event, events.LoadIssued):
      prefetched.discard(event.key)
      if event.cause == 'prefetch':
        coming.add(event.key)
        prefetched.add(event.key)
    elif isinstance(event, events.LoadLanded):
      coming.discard(event.key)
    elif isinstance(event, events.LoadFailed):
      coming.discard(event.key)
      prefetched.discard(event.key)
    elif isinstance(event, events.Routed) and coming:
      found = coming & {event.layer * experts + e for e in event.experts}
      coming -= found
      late += inside * len(found)
    elif isinstance(event, events.Evicted):
      wasted += inside and not event.used and event.key in prefetched
  return late, wasted


def host(log: Sequence[events.Event], block_bytes: int) -> dict[str, Any]:
  """Where the loads among some events came from: host memory or the disk."""
  landed = sum(isinstance(e, events.LoadLanded) for e in log)
  reads = busy.reads(log)
  begin = min((first for first, _ in reads), default=0)
  end = max((last for _, last in reads), default=0)
  # Bytes per nanosecond in which at least one read went on.
  nbytes, ns = len(reads) * block_bytes, busy.covered(reads, begin, end)
  return {
    'host_hits': landed - len(reads),
    'disk_reads': len(reads),
    'disk_bytes': nbytes,
    'disk_gb_per_s': part(nbytes, ns),
  }


def prefill(log: Sequence[events.Event]) -> dict[str, Any]:
  """Uses and loads of prompts."""
  routed = [e for e in log if isinstance(e, events.PrefillRouted)]
  return {
    'prefill_uses': sum(e.uses for e in routed),
    'prefill_hits': sum(e.hits for e in routed),
    'prefill_loads': sum(
      isinstance(e, events.LoadIssued) and e.cause == 'prefill' for e in log
    ),
  }


def shares(
  window: window_lib.Window,
  loads: Sequence[busy.Load],
  ran: Sequence[busy.Ran],
) -> dict[str, Any]:
  """Fractions of the window."""
  begin, end = window.begin, window.end
  link_spans = [(load.begin, load.end) for load in loads]
  gpu_spans = [(r.begin, r.end) for r in ran]
  told = all(r.told for r in ran)
  link = busy.covered(link_spans, begin, end)
  gpu = busy.covered(gpu_spans, begin, end)
  either = busy.covered(link_spans + gpu_spans, begin, end)
  return {
    'link_busy': part(link, end - begin),
    'gpu_busy': part(gpu, end - begin),
    'gpu_busy_source': _DEVICE_SIDE if told else _HOST_SIDE,
    'stall': part(either - gpu, end - begin),
    'overlap_efficiency': part(max(link, gpu), end - begin),
  }


def launches(
  log: Sequence[events.Event], window: window_lib.Window
) -> dict[str, Any]:
  """Decode launches that begin in the window, and the host's work for them.

  Host time counts from the launch before the window, so that as many
  intervals as launches are measured.
  """
  begun = [
    (i, e) for i, e in enumerate(log) if isinstance(e, events.LaunchBegun)
  ]
  before = [e.host for i, e in begun if i < window.first]
  here = [
    e
    for i, e in begun
    if window.first <= i < window.last and e.kind == 'decode'
  ]
  whole = [e for e in here if e.finish]
  far = {e.launch: e.layers for e in log if isinstance(e, events.Crossed)}
  rows = sum(len(e.requests) for e in whole)
  crossed = sum(sum(far.get(e.launch, (1,) * len(e.requests))) for e in whole)
  # A log may be older than a section: nothing was spent in it then.
  start = events.HostTime(*before[-1]) if before else events.HostTime()
  last = events.HostTime(*here[-1].host)
  host = [b - a for a, b in zip(start, last, strict=True)]
  return {
    'launches': len(here),
    'host_us': {
      name: ns * 1e-3 / len(here)
      for name, ns in zip(_SECTIONS, host, strict=True)
    },
    'h': part(sum(host), window.end - window.begin),
    'mean_group': part(rows, len(whole)),
    'mean_hops': part(crossed, rows),
  }


def max_lag(log: Sequence[events.Event], window: window_lib.Window) -> int:
  """Layers between the first and the last request, at most, in the window."""
  at: dict[int, int] = {}
  most, moved = 0, True
  for i, event in enumerate(log[: window.last + 1]):
    if isinstance(event, events.Routed):
      at[event.request] = event.position
      moved = True
    elif isinstance(event, events.Finished):
      at.pop(event.request, None)
      moved = True
    elif moved and i >= window.first and not isinstance(event, events.Token):
      # Rows of one launch move on together: looked at once all of them have.
      moved = False
      if at:
        most = max(most, max(at.values()) - min(at.values()))
  return most


def part(amount: float, whole: float) -> float:
  """A fraction, 0 of nothing."""
  return amount / whole if whole else 0.0
