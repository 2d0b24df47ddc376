"""A run as a picture to walk through: its event log for Perfetto.

The file is JSON in Chrome's trace format, which https://ui.perfetto.dev opens.
Link, device, host and disk have a track each, and so has every request. Times
are those of `busy`, which the report adds up too.
"""

import dataclasses
import gzip
import itertools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bevy_jax import busy, events

Record = dict[str, Any]
_Landed = list[tuple[events.LoadLanded, busy.Load]]

_MACHINE, _REQUESTS = 1, 2  # Processes, as Perfetto calls groups of tracks.
_TRACKS = {'device': 1, 'link': 2, 'host': 3, 'disk': 4}
_SECTIONS = tuple(field.name for field in dataclasses.fields(events.HostTime))


class Wait(NamedTuple):
  """A request between two launches.

  Attributes:
    request: who.
    layer: the MoE layer at which it waits, -1 where its first launch is due.
    experts: ids that it needs there.
    missing: how many of them were not resident when its router named them.
    span: from that moment to the begin of the launch that takes it on.
  """

  request: int
  layer: int
  experts: tuple[int, ...]
  missing: int
  span: busy.Span


def make(log: Sequence[events.Event], experts: int) -> list[Record]:
  """The records of a run, by when they begin; the first event is at 0.

  Args:
    log: its events.
    experts: of a layer, by which keys tell layer and expert.
  """
  launches, landed = busy.launches(log), _landed(log)
  found = [
    *_device(launches),
    *_link(log, landed, experts),
    *_disk(log, experts),
    *_host(log),
    *_requests(log, launches),
    *_flows(log, launches, landed),
    *_counters(log),
  ]
  start = log[0].time / 1000 if log else 0.0
  for record in found:
    record['ts'] -= start
  found.sort(key=lambda record: record['ts'])
  return [*_names(log), *found]


def save_all(
  path: str, logs: Sequence[Sequence[events.Event]], experts: int
) -> list[str]:
  """A file a run; of several the first is run.0.json.gz for run.json.gz."""
  found = pathlib.Path(path)
  stem, dot, endings = found.name.partition('.')
  paths = [path]
  if len(logs) > 1:
    names = [f'{stem}.{number}{dot}{endings}' for number in range(len(logs))]
    paths = [str(found.with_name(name)) for name in names]
  for own, log in zip(paths, logs, strict=True):
    save(own, log, experts)
  return paths


def save(
  path: pathlib.Path | str, log: Sequence[events.Event], experts: int
) -> None:
  """Writes what `make` gives, packed where the path ends in .gz."""
  text = json.dumps({'traceEvents': make(log, experts)}).encode()
  if str(path).endswith('.gz'):
    text = gzip.compress(text, mtime=0)
  pathlib.Path(path).write_bytes(text)


def _slice(
  track: int, name: str, span: busy.Span, process: int = _MACHINE, **args: Any
) -> Record:
  begin, end = span
  return {
    'ph': 'X',
    'pid': process,
    'tid': track,
    'name': name,
    'ts': begin / 1000,
    'dur': (end - begin) / 1000,
    'args': args,
  }


def _names(log: Sequence[events.Event]) -> Iterator[Record]:
  """What processes and tracks are called."""
  tracks = [(_MACHINE, track, name) for name, track in _TRACKS.items()]
  tracks += [
    (_REQUESTS, _track(e.request), f'request {e.request}')
    for e in log
    if isinstance(e, events.Admitted)
  ]
  for process, name in ((_MACHINE, 'machine'), (_REQUESTS, 'requests')):
    yield _name('process_name', process, 0, name)
  for process, track, name in tracks:
    yield _name('thread_name', process, track, name)


def _track(request: int) -> int:
  # Perfetto reads a tid of 0 as the pid: request 0 would share a track with
  # the request of that number. A tid that is the pid is shown first.
  return _REQUESTS + request


def _name(what: str, process: int, track: int, name: str) -> Record:
  args = {'name': name}
  return {'ph': 'M', 'pid': process, 'tid': track, 'name': what, 'args': args}


def _device(launches: Sequence[busy.Ran]) -> Iterator[Record]:
  for ran in launches:
    launch = ran.event
    yield _slice(
      _TRACKS['device'],
      _launch_name(launch),
      (ran.begin, ran.end),
      launch=launch.launch,
      requests=list(launch.requests),
      experts=len(launch.experts) + ran.more,
      hops=launch.hops,
    )


def _launch_name(launch: events.LaunchBegun) -> str:
  if launch.kind != 'decode':
    return launch.kind if launch.layer < 0 else f'{launch.kind} {launch.layer}'
  wave = '' if launch.finish else ' (wave)'
  return f'layer {launch.layer}, {len(launch.requests)} rows{wave}'


def _landed(log: Sequence[events.Event]) -> _Landed:
  landed = [e for e in log if isinstance(e, events.LoadLanded)]
  return list(zip(landed, busy.loads(log), strict=True))


def _link(
  log: Sequence[events.Event], landed: _Landed, experts: int
) -> Iterator[Record]:
  causes = {}
  for event in log:
    if isinstance(event, events.LoadIssued):
      causes[event.key] = event.cause
  for event, load in landed:
    yield _slice(
      _TRACKS['link'],
      _expert_name(event.key, experts),
      (load.begin, load.end),
      slot=event.slot,
      cause=causes[event.key],
    )


def _disk(log: Sequence[events.Event], experts: int) -> Iterator[Record]:
  for event in log:
    if isinstance(event, events.LoadLanded) and event.read:
      begin, end = event.read
      name = _expert_name(event.key, experts)
      yield _slice(_TRACKS['disk'], name, (begin, end))


def _expert_name(key: int, experts: int) -> str:
  layer, expert = divmod(key, experts)
  return f'layer {layer}, expert {expert}'


def _host(log: Sequence[events.Event]) -> Iterator[Record]:
  """What the host did since the launch before, set before the next one.

  The log tells how much of each kind, not when: it is drawn in one piece.
  """
  before, free = [0] * len(_SECTIONS), 0
  for event in log:
    if not isinstance(event, events.LaunchBegun):
      continue
    now = [*event.host, *[0] * (len(_SECTIONS) - len(event.host))]
    spent = [a - b for a, b in zip(now, before, strict=True)]
    at = max(free, event.time - sum(spent))
    for name, ns in zip(_SECTIONS, spent, strict=True):
      end = min(at + ns, event.time)
      if end > at:
        yield _slice(_TRACKS['host'], name, (at, end))
        at = end
    before, free = now, event.time


def waits(log: Sequence[events.Event]) -> Iterator[Wait]:
  """What requests do between launches, by when it ends."""
  since: dict[int, events.Routed | events.Admitted] = {}
  for event in log:
    if isinstance(event, events.Admitted | events.Routed):
      since[event.request] = event
    elif isinstance(event, events.Finished):
      since.pop(event.request, None)
    elif isinstance(event, events.LaunchBegun):
      for request in event.requests:
        found = since.pop(request, None)
        if isinstance(found, events.Admitted):
          yield Wait(request, -1, (), 0, (found.time, event.time))
        elif found is not None:
          span, missing = (found.time, event.time), len(found.experts)
          missing -= found.hits
          yield Wait(request, found.layer, found.experts, missing, span)


def _requests(
  log: Sequence[events.Event], launches: Sequence[busy.Ran]
) -> Iterator[Record]:
  """Each request in a launch, and in between what it waits for."""
  for wait in waits(log):
    words = 'admitted'
    if wait.layer >= 0:
      missing = wait.missing
      words = f'waits for {missing} experts' if missing else 'ready'
      words = f'{words}, layer {wait.layer}'
    if wait.span[1] > wait.span[0]:
      yield _slice(_track(wait.request), words, wait.span, _REQUESTS)
  for ran in launches:
    name, span = _launch_name(ran.event), (ran.event.time, ran.end)
    for request in ran.event.requests:
      yield _slice(_track(request), name, span, _REQUESTS)


def _flows(
  log: Sequence[events.Event], launches: Sequence[busy.Ran], landed: _Landed
) -> Iterator[Record]:
  """From each load to the first launch that read what it brought."""
  begins = {ran.event.launch: ran.begin for ran in launches}
  ends = {id(event): load.end for event, load in landed}
  fresh: dict[int, int] = {}
  numbers = itertools.count(1)
  for event in log:
    if isinstance(event, events.LoadLanded):
      fresh[event.key] = ends[id(event)]
    elif isinstance(event, events.LaunchBegun | events.Crossed):
      if event.launch not in begins:
        continue
      for key in event.experts:
        if key in fresh:
          span = fresh.pop(key), begins[event.launch]
          yield from _flow(*span, next(numbers))


def _flow(landed: int, read: int, number: int) -> Iterator[Record]:
  # Perfetto drops an arrow whose id is text and no hexadecimal number.
  both = {'name': 'used', 'cat': 'load', 'id': number, 'pid': _MACHINE}
  # An arrow begins inside of the slice that it leaves.
  yield both | {'ph': 's', 'tid': _TRACKS['link'], 'ts': (landed - 1) / 1000}
  at = max(read, landed) / 1000
  yield both | {'ph': 'f', 'bp': 'e', 'tid': _TRACKS['device'], 'ts': at}


def _counters(log: Sequence[events.Event]) -> Iterator[Record]:
  resident, at = 0, dict[int, int]()
  for event in log:
    if isinstance(event, events.LoadLanded | events.Evicted):
      resident += 1 if isinstance(event, events.LoadLanded) else -1
      yield _counter('resident experts', event.time, resident)
    elif isinstance(event, events.LaunchBegun):
      yield _counter('rows of a launch', event.time, len(event.requests))
    elif isinstance(event, events.Routed):
      at[event.request] = event.position
      lag = max(at.values()) - min(at.values())
      yield _counter('lag in layers', event.time, lag)
    elif isinstance(event, events.Finished):
      at.pop(event.request, None)


def _counter(name: str, time: int, value: int) -> Record:
  args = {'value': value}
  return {
    'ph': 'C', 'pid': _MACHINE, 'tid': 0, 'name': name, 'ts': time / 1000,
    'args': args,
  }  # fmt: skip
