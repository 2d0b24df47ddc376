"""Where the time of a run went: device, link, both, neither."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bevy_jax import busy, events
from bevy_jax import window as window_lib


class Split(NamedTuple):
  """Nanoseconds of a window; the first four add up to it.

  Attributes:
    device: the device alone was busy.
    both: device and link were.
    link: the link alone was: the device stalled.
    neither: neither was: the host worked, or nobody had anything to do.
    layers: `link` by the MoE layer of the expert that was on the link.
  """

  device: int
  both: int
  link: int
  neither: int
  layers: tuple[int, ...]


def split(
  log: Sequence[events.Event],
  window: window_lib.Window,
  layers: int,
  experts: int,
) -> Split:
  """Splits a window of a log.

  Args:
    log: all events.
    window: the stretch.
    layers: MoE layers of the model.
    experts: of each, by which keys tell the layer.
  """
  begin, end = window.begin, window.end
  device = [(ran.begin, ran.end) for ran in busy.launches(log)]
  loads = busy.loads(log)
  on_device = busy.covered(device, begin, end)
  on_link = busy.covered(loads, begin, end)
  either = busy.covered([*device, *loads], begin, end)
  waits = [0] * layers
  keys = [e.key for e in log if isinstance(e, events.LoadLanded)]
  for key, ns in zip(keys, _outside(loads, device, begin, end), strict=True):
    waits[key // experts] += ns
  return Split(
    device=either - on_link,
    both=on_device + on_link - either,
    link=either - on_device,
    neither=end - begin - either,
    layers=tuple(waits),
  )


def _outside(
  loads: Sequence[busy.Span], device: Sequence[busy.Span], begin: int, end: int
) -> Iterator[int]:
  """Of each load, the time in which the device did nothing.

  Both are in order of time and neither overlaps itself.
  """
  first = 0
  for load in loads:
    while first < len(device) and device[first][1] <= load[0]:
      first += 1
    low, high = max(load[0], begin), min(load[1], end)
    busy_ns, at = 0, first
    while at < len(device) and device[at][0] < high:
      overlap = min(device[at][1], high) - max(device[at][0], low)
      busy_ns += max(0, overlap)
      at += 1
    yield max(0, high - low) - busy_ns
