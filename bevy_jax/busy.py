"""When the link and the device were busy, as spans of time."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bevy_jax import events

_RUN = 16  # Loads whose time is measured together.

# From and to in nanoseconds.
Span = tuple[int, int]


class Load(NamedTuple):
  """A load that landed.

  Attributes:
    begin: ns, when the link turned to it: as the executor tells, else when
      it was issued, read from disk where it had to be, and the load before
      it had landed.
    end: ns, when it landed.
  """

  begin: int
  end: int


class Ran(NamedTuple):
  """A launch that ended.

  Attributes:
    event: how it began.
    begin: ns, when the device turned to it: as the executor tells, else
      when it was begun and the launch before it had ended.
    end: ns, when it was seen to end.
    told: whether the executor told when it began.
    more: experts that it read behind its first layer.
  """

  event: events.LaunchBegun
  begin: int
  end: int
  told: bool = False
  more: int = 0


def loads(log: Iterable[events.Event]) -> list[Load]:
  """All loads that landed, in that order; the link carries one at a time.

  A read from disk is no time of the link: its load begins when it has ended.
  """
  issued: dict[int, int] = {}
  found: list[Load] = []
  for event in log:
    if isinstance(event, events.LoadIssued):
      issued[event.key] = event.time
    elif isinstance(event, events.LoadLanded):
      before = found[-1].end if found else 0
      begin = max(issued.pop(event.key), before, event.began, *event.read[1:])
      found.append(Load(begin, max(begin, event.time)))
  return found


def reads(log: Iterable[events.Event]) -> list[Span]:
  """When the disk was read, one span for each load that it was read for."""
  landed = (e for e in log if isinstance(e, events.LoadLanded))
  return [(e.read[0], e.read[1]) for e in landed if e.read]


def launches(log: Iterable[events.Event]) -> list[Ran]:
  """All launches that ended, in that order; the device runs one at a time."""
  begun: dict[int, events.LaunchBegun] = {}
  more: dict[int, int] = {}
  found: list[Ran] = []
  for event in log:
    if isinstance(event, events.LaunchBegun):
      begun[event.launch] = event
    elif isinstance(event, events.LaunchEnded):
      launch = begun.pop(event.launch)
      before = found[-1].end if found else 0
      begin = max(launch.time, before, event.began)
      end = max(begin, event.time)
      found.append(Ran(launch, begin, end, event.began >= 0))
    elif isinstance(event, events.Crossed):
      more[event.launch] = len(event.experts)
  if not more:
    return found
  return [ran._replace(more=more.get(ran.event.launch, 0)) for ran in found]


def covered(spans: Iterable[Span], begin: int, end: int) -> int:
  """Nanoseconds of begin..end that at least one span covers."""
  total, done = 0, begin
  for first, last in sorted(spans):
    first, last = max(first, done), min(last, end)
    if last > first:
      total += last - first
      done = last
  return total


def load_seconds(found: Sequence[Load]) -> float:
  """Link time of one load, 0 where nothing was loaded.

  The host sees landings late, and the busier it is the later. So this is the
  lower quartile over all runs of 16 back-to-back loads (or as many as there
  are), which agrees with a throttled link's own figure within some percent.
  """
  stretches: list[list[Load]] = []
  for load in found:
    if stretches and load.begin == stretches[-1][-1].end:
      stretches[-1].append(load)
    else:
      stretches.append([load])
  run = min(_RUN, max((len(s) for s in stretches), default=0))
  times = [
    (s[i + run - 1].end - s[i].begin) / run
    for s in stretches
    for i in range(len(s) - run + 1)
  ]
  return float(np.percentile(times, 25)) * 1e-9 if times else 0.0
