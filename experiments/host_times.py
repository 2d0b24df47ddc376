"""What the host does in runs that decode, told by their event logs alone."""

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bevy_jax import events
from bevy_jax import window as window_lib

_SLEEPS = 100


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
  issued: int
  landed: int


def fit(logs: Iterable[Sequence[events.Event]], rows: int, warmup: int) -> Host:
  """Least squares over the launches of runs with few and with many loads.

  What the host does is a sum: so much for a launch, for each of its rows, for
  each load that begins and for each that lands. Nothing costs less than 0.
  Runs of different schedulers are needed: lockstep has many rows and loads a
  launch, runahead few.

  Args:
    logs: of whole runs.
    rows: R.
    warmup: decode tokens a request that are left out.
  """
  spent = [s for log in logs for s in _between(log, rows, warmup)]
  ones = [1.0] * len(spent)
  deciding = _least_squares(
    [ones, [s.rows for s in spent], [s.issued for s in spent]],
    [s.deciding for s in spent],
  )
  looking = _least_squares(
    [ones, [s.rows for s in spent], [s.landed for s in spent]],
    [s.looking for s in spent],
  )
  return Host(
    launch=deciding[0] * 1e-3,
    answer=looking[0] * 1e-3,
    row=(deciding[1] + looking[1]) * 1e-3,
    load=deciding[2] * 1e-3,
    land=looking[2] * 1e-3,
    look=0.0,
    wake=0.0,
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


def _between(
  log: Sequence[events.Event], rows: int, warmup: int
) -> list[_Spent]:
  window = window_lib.find(log, rows, warmup)
  found: list[_Spent] = []
  before: events.LaunchBegun | None = None
  issued = landed = 0
  for event in log[window.first : window.last]:
    if isinstance(event, events.LoadIssued):
      issued += 1
    elif isinstance(event, events.LoadLanded):
      landed += 1
    elif isinstance(event, events.LaunchBegun):
      if before is not None:
        past, now = events.HostTime(*before.host), events.HostTime(*event.host)
        whole, then = sum(now), sum(past)
        looking = now.poll - past.poll
        found.append(
          _Spent(
            whole - then - looking,
            looking,
            len(before.requests),
            issued,
            landed,
          )
        )
      before, issued, landed = event, 0, 0
  return found


def _least_squares(
  terms: Sequence[Sequence[float]], wanted: Sequence[float]
) -> npt.NDArray[np.float64]:
  """Factors of each term, none below 0: those that would be are left out."""
  table, found = np.array(terms, np.float64), np.zeros(len(terms))
  used = list(range(len(terms)))
  while used:
    fitted = np.linalg.lstsq(table[used].T, np.array(wanted), rcond=None)[0]
    if fitted.min() >= 0:
      found[used] = fitted
      break
    del used[int(fitted.argmin())]
  return found
