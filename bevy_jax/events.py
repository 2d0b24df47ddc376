"""The event log: everything that a report, a timeline or a bound needs.

Schema version 3; since 2: launches may cross several layers, and `Crossed`;
since 1: loads for 'prefetch', and `Judged`. Times are integers in nanoseconds
of the executor's clock; `key` is layer * experts + expert id, layers counted
among those with experts. A line of an event file is one JSON object: `event`
names the class.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator

VERSION = 3


@dataclasses.dataclass(slots=True)
class Event:
  """Something that happened at `time`.

  Nobody changes an event; that it is not frozen makes it three times as fast.
  """

  time: int


@dataclasses.dataclass(slots=True)
class Admitted(Event):
  """A request got a row."""

  request: int
  row: int
  prompt_tokens: int
  arrived: int


@dataclasses.dataclass(slots=True)
class Prefilled(Event):
  """All admitted prompts have been prefilled."""

  requests: tuple[int, ...]


@dataclasses.dataclass(slots=True)
class LoadIssued(Event):
  """A load began.

  For 'demand', 'reload' (robbed before), 'prefill', or 'prefetch': nobody
  awaits it yet.
  """

  key: int
  slot: int
  cause: str


@dataclasses.dataclass(slots=True)
class LoadLanded(Event):
  """A load ended; the expert is resident.

  `read` is when its read from disk began and ended, empty where the expert
  lay in host memory; `began` when the link turned to it, -1 where nobody can
  tell.
  """

  key: int
  slot: int
  read: tuple[int, ...] = ()
  began: int = -1


@dataclasses.dataclass(slots=True)
class LoadFailed(Event):
  """A load failed; its slot is free, and who waited for it has ended."""

  key: int
  slot: int
  reason: str


@dataclasses.dataclass(slots=True)
class Evicted(Event):
  """An expert lost its slot; `used` says whether a launch ever read it."""

  key: int
  slot: int
  used: bool


@dataclasses.dataclass(slots=True)
class HostTime:
  """Nanoseconds of host time by section, in the order that events keep.

  Attributes:
    schedule: decisions.
    launch: launches begun.
    poll: what happened, as far as the next decision needs it.
    load: loads begun, their victims chosen.
    settle: what else answers mean, mostly behind the next launch.
  """

  schedule: int = 0
  launch: int = 0
  poll: int = 0
  load: int = 0
  settle: int = 0

  def __iter__(self) -> Iterator[int]:
    return iter((self.schedule, self.launch, self.poll, self.load, self.settle))


@dataclasses.dataclass(slots=True)
class LaunchBegun(Event):
  """A launch began; `host` is host time so far, by section, in ns.

  The sections are those of `HostTime`, the last may be left out. `experts` are
  the keys that it reads at its first layer, `hops` the layers that it may
  cross: of those behind the first it may read whatever is resident when it
  begins.
  """

  launch: int
  kind: str
  layer: int
  requests: tuple[int, ...]
  experts: tuple[int, ...]
  finish: bool
  hops: int
  host: tuple[int, ...]


@dataclasses.dataclass(slots=True)
class LaunchEnded(Event):
  """A launch ended; `began`: the device turned to it, -1 where unknown."""

  launch: int
  began: int = -1


@dataclasses.dataclass(slots=True)
class Crossed(Event):
  """How far a launch came that might have crossed more than one layer.

  Behind its end and all that it revealed. Who ended on the way counts up to
  there.

  Attributes:
    launch: which.
    layers: that each of its requests crossed, in their order.
    experts: the keys that it read behind its first layer.
  """

  launch: int
  layers: tuple[int, ...]
  experts: tuple[int, ...]


@dataclasses.dataclass(slots=True)
class Routed(Event):
  """A router revealed what a request's token uses; hits were resident."""

  request: int
  token: int
  layer: int
  experts: tuple[int, ...]
  hits: int
  position: int


@dataclasses.dataclass(slots=True)
class Judged(Event):
  """A router revealed what had been guessed: distinct experts, counted.

  Away is what is not resident, or is so only because a prefetch brought it
  and nobody has used it since: it would have been missing without.

  Attributes:
    request: whose.
    layer: where.
    guessed: experts that were guessed.
    right: those of them that are used.
    away: guessed ones that are away.
    useful: guessed ones that are away and used.
    missing: used ones that are away.
  """

  request: int
  layer: int
  guessed: int
  right: int
  away: int
  useful: int
  missing: int


@dataclasses.dataclass(slots=True)
class PrefillRouted(Event):
  """A prefill chunk revealed what it uses, distinct experts only."""

  layer: int
  experts: tuple[int, ...]
  uses: int
  hits: int


@dataclasses.dataclass(slots=True)
class Token(Event):
  """A request got its next token; `index` counts from 0."""

  request: int
  index: int
  token: int


@dataclasses.dataclass(slots=True)
class Finished(Event):
  """A request ended: 'eos', 'stop', 'length' or 'error', told in `detail`."""

  request: int
  reason: str
  detail: str = ''


KINDS: dict[str, Callable[..., Event]] = {
  kind.__name__: kind
  for kind in (
    Admitted,
    Prefilled,
    LoadIssued,
    LoadLanded,
    LoadFailed,
    Evicted,
    LaunchBegun,
    LaunchEnded,
    Crossed,
    Routed,
    Judged,
    PrefillRouted,
    Token,
    Finished,
  )
}


def save(
  path: pathlib.Path | str, header: dict[str, object], log: Iterable[Event]
) -> None:
  """Writes a log as JSON lines, the header with the schema's version first."""
  with open(path, 'w', encoding='utf-8') as file:
    file.write(json.dumps({'version': VERSION} | header) + '\n')
    for event in log:
      record = {'event': type(event).__name__}
      file.write(json.dumps(record | dataclasses.asdict(event)) + '\n')


def load(path: pathlib.Path | str) -> tuple[dict[str, object], list[Event]]:
  """Reads what `save` wrote; ValueError names the line that is wrong."""
  lines = pathlib.Path(path).read_text(encoding='utf-8').splitlines()
  header = json.loads(lines[0]) if lines else {}
  if header.get('version') != VERSION:
    raise ValueError(
      f'{path} has event schema version {header.get("version")}; this build '
      f'reads version {VERSION}. Record the run again.'
    )
  log: list[Event] = []
  for number, line in enumerate(lines[1:], 2):
    try:
      fields = json.loads(line)
      kind = KINDS[fields.pop('event')]
      log.append(kind(**{k: _frozen(v) for k, v in fields.items()}))
    except (KeyError, TypeError, ValueError) as error:
      raise ValueError(
        f'{path}, line {number}: not an event of version {VERSION} ({error}).'
      ) from error
  return header, log


def _frozen(value: object) -> object:
  return tuple(value) if isinstance(value, list) else value


def unfinished(log: Iterable[Event]) -> list[str]:
  """Requests, launches and loads that a log begins and does not end."""
  open_: set[str] = set()
  for event in log:
    match event:
      case Admitted():
        open_.add(f'request {event.request}')
      case Finished():
        open_.discard(f'request {event.request}')
      case LaunchBegun():
        open_.add(f'launch {event.launch}')
      case LaunchEnded():
        open_.discard(f'launch {event.launch}')
      case LoadIssued():
        open_.add(f'load of {event.key}')
      case LoadLanded() | LoadFailed():
        open_.discard(f'load of {event.key}')
      case _:
        pass
  return sorted(open_)
