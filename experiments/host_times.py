"""Short runs that decode, by their event logs: host, and launches beside it."""

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bevy_jax import costs, events
from bevy_jax import window as window_lib
from bevy_jax.experiments import layer_times

_SLEEPS = 100
_NAP = 30e-6  # Seconds between two looks of a device's executor.
_LOAD = 5e-4  # Seconds, about as long as a wait for a load.
_KEPT = 0.98  # Of the launches, in the second and third fit.
_FEW = 8  # Launches that tell nothing yet.


class Host(NamedTuple):
  """Host time in microseconds.

  Attributes:
    launch: to decide on a launch and begin it.
    answer: to see that it has ended and what that means.
    row: more of both for each of its rows.
    load: of a load that begins, the choice of a victim included.
    land: of a load that has landed, its slot write included.
    look: between two looks while both link and device are busy.
    wake: overslept when only the link is waited for.
    loads: loads a launch that these were measured with.
  """

  launch: float
  answer: float
  row: float
  load: float
  land: float
  look: float
  wake: float
  loads: float


class _Spent(NamedTuple):
  """Between the beginnings of two launches; times in ns."""

  deciding: int
  looking: int
  rows: int
  ended: int
  answered: int  # Rows of those that ended.
  issued: int
  landed: int


def host(runs: Sequence[layer_times.Decoded], rows: int, warmup: int) -> Host:
  """Least squares over the launches of runs with few and with many loads.

  What the host does is a sum: so much for a launch, for each of its rows, for
  each load that begins and for each that lands. Nothing costs less than 0.
  Runs of different schedulers are needed: lockstep has many rows and loads a
  launch, runahead few. The 2 % that take longest beyond their sum are left out.

  Args:
    runs: whole ones.
    rows: R.
    warmup: decode tokens a request that are left out.
  """
  spent = [s for run in runs for s in _between(run.log, rows, warmup)]
  naps = [nap for run in runs for nap in run.naps]
  ones = [1.0] * len(spent)
  deciding = _factors(
    [ones, [s.rows for s in spent], [s.issued for s in spent]],
    [s.deciding for s in spent],
  )
  looking = _factors(
    [
      [s.ended for s in spent],
      [s.answered for s in spent],
      [s.landed for s in spent],
    ],
    [s.looking for s in spent],
  )
  # Where launches are over before the host can wait for them, it never naps.
  look = statistics.median(naps) * 1e-3 if naps else _NAP * 1e6
  return Host(
    launch=deciding[0] * 1e-3,
    answer=looking[0] * 1e-3,
    row=(deciding[1] + looking[1]) * 1e-3,
    load=deciding[2] * 1e-3,
    land=looking[2] * 1e-3,
    look=look if naps else look + overslept_us(_NAP),
    wake=overslept_us(_LOAD),
    loads=statistics.mean(s.issued for s in spent),
  )


def overslept_us(seconds: float) -> float:
  """What a sleep takes more than was asked for, median of many."""
  found = []
  for _ in range(_SLEEPS):
    begun = time.perf_counter()
    time.sleep(seconds)
    found.append(time.perf_counter() - begun - seconds)
  return statistics.median(found) * 1e6


class Beside(NamedTuple):
  """Launches of a run that the host waited for, beside those measured alone.

  Attributes:
    rows: what they are padded to.
    factor: median of the time in the run over the time alone.
    head_us: median of what head and sampling took; -1 where too few did.
    seen: how many there were.
  """

  rows: int
  factor: float
  head_us: float
  seen: int


def beside(
  runs: Sequence[layer_times.Decoded],
  table: Iterable[layer_times.Launch],
  layers: int,
  buckets: Sequence[int],
  rows: int,
  warmup: int,
) -> list[Beside]:
  """How much longer launches take in a run than one by one.

  There caches are colder, and the host's own work and the link's want the
  same memory. Only ends that the host waited for tell: others are seen when
  it comes to look.

  Args:
    runs: whole ones.
    table: launches one by one.
    layers: with experts.
    buckets: numbers of rows that launches are padded to, ascending.
    rows: R.
    warmup: decode tokens a request that are left out.

  Returns:
    For each bucket that has been seen often enough; ascending.
  """
  alone = costs.Table(
    costs.Measured(m.rows, m.distinct, 1, m.us) for m in table
  )
  plain: dict[int, list[float]] = {}
  last: dict[int, list[tuple[float, float]]] = {}
  for begun, us in (x for r in runs for x in _awaited(r, rows, warmup)):
    bucket = next(n for n in buckets if n >= len(begun.requests))
    wanted = alone.ns(len(begun.requests), len(begun.experts))
    if begun.layer + 1 == layers:
      last.setdefault(bucket, []).append((us, wanted))
    else:
      plain.setdefault(bucket, []).append(us / wanted)
  found = []
  for bucket, ratios in sorted(plain.items()):
    if len(ratios) < _FEW:
      continue
    factor, ends = statistics.median(ratios), last.get(bucket, [])
    more = [us - factor * wanted for us, wanted in ends]
    head = max(0.0, statistics.median(more)) if len(more) >= _FEW else -1.0
    found.append(Beside(bucket, factor, head, len(ratios) + len(ends)))
  return found


def corrected(
  table: Iterable[layer_times.Launch],
  head: Iterable[tuple[int, float]],
  found: Iterable[Beside],
  buckets: Sequence[int],
) -> tuple[list[layer_times.Launch], list[tuple[int, float]]]:
  """Launches as runs had them; what these never showed stays as it was."""
  seen = {b.rows: b for b in found}

  def there(rows: int) -> Beside | None:
    return seen.get(next(n for n in buckets if n >= rows))

  launches, heads = [], []
  for m in table:
    b = there(m.rows)
    launches.append(m._replace(us=m.us * b.factor) if b else m)
  for rows, us in head:
    b = there(rows)
    heads.append((rows, b.head_us if b and b.head_us >= 0 else us))
  return launches, heads


def _awaited(
  run: layer_times.Decoded, rows: int, warmup: int
) -> Iterator[tuple[events.LaunchBegun, float]]:
  """Launches that were alone and awaited, with their microseconds."""
  window = window_lib.find(run.log, rows, warmup)
  flying: dict[int, events.LaunchBegun] = {}
  ends: dict[int, int] = {}
  before: events.LaunchBegun | None = None
  for event in run.log[window.first : window.last]:
    if isinstance(event, events.LaunchEnded) and event.launch in flying:
      ends[event.launch] = event.time
      del flying[event.launch]
    elif isinstance(event, events.LaunchBegun):
      # What the call of a launch took is told by the next one.
      if before is not None and before.launch in ends:
        call = events.HostTime(*event.host).launch
        call -= events.HostTime(*before.host).launch
        us = (ends[before.launch] - before.time - call) * 1e-3
        us -= run.awaited.get(before.launch, 0.0) * 1e-3
        if us > 0 and before.finish and before.launch in run.awaited:
          yield before, us
      before = None if flying or event.kind != 'decode' else event
      flying[event.launch] = event


def _between(
  log: Sequence[events.Event], rows: int, warmup: int
) -> list[_Spent]:
  window = window_lib.find(log, rows, warmup)
  found: list[_Spent] = []
  sizes: dict[int, int] = {}
  before: events.LaunchBegun | None = None
  ended = answered = issued = landed = 0
  for event in log[window.first : window.last]:
    if isinstance(event, events.LoadIssued):
      issued += 1
    elif isinstance(event, events.LoadLanded):
      landed += 1
    elif isinstance(event, events.LaunchEnded):
      ended += 1
      answered += sizes.pop(event.launch, 0)
    elif isinstance(event, events.LaunchBegun):
      sizes[event.launch] = len(event.requests)
      if before is not None:
        past, now = events.HostTime(*before.host), events.HostTime(*event.host)
        looking = now.poll + now.settle - past.poll - past.settle
        deciding = sum(now) - sum(past) - looking
        many = len(before.requests)
        found.append(
          _Spent(deciding, looking, many, ended, answered, issued, landed)
        )
      before, ended, answered, issued, landed = event, 0, 0, 0, 0
  return found


def _factors(
  terms: Sequence[Sequence[float]], wanted: Sequence[float]
) -> list[float]:
  """Least squares without the few that took longest beyond the sum.

  In them something else had the processor.
  """
  table, y = np.array(terms, np.float64), np.array(wanted, np.float64)
  factors = _least_squares(table, y)
  for _ in range(2):
    beyond = y - table.T @ np.array(factors)
    kept = beyond <= np.quantile(beyond, _KEPT)
    factors = _least_squares(table[:, kept], y[kept])
  return factors


def _least_squares(
  table: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]
) -> list[float]:
  """Factors of each term, none below 0: those that would be are left out."""
  factors, used = np.zeros(len(table)), list(range(len(table)))
  while used:
    fitted = np.linalg.lstsq(table[used].T, wanted, rcond=None)[0]
    if fitted.min() >= 0:
      factors[used] = fitted
      break
    del used[int(fitted.argmin())]
  return [float(x) for x in factors]
