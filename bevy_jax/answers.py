"""What launches answer: rows move at once, and all else is told afterwards."""

import operator
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from bevy_jax import events, protocols
from bevy_jax import flights as flights_lib
from bevy_jax import loads as loads_lib
from bevy_jax import request as request_lib

# Called with a request and its new token; a reason ends the request.
StopRule = Callable[[request_lib.Progress, int], str | None]

_BY_ROW = operator.attrgetter('row')
_UNSOUND = 'error: a value in the model was not finite'


class _Came(NamedTuple):
  """Who came to a router; nobody who had ended before.

  Attributes:
    places: theirs in the launch.
    needs: what they use there, as bitmaps.
    hop: what the router answers of them.
  """

  places: Sequence[int]
  needs: list[int]
  hop: protocols.Hop


class _Note(NamedTuple):
  """An answer whose rows have moved and that has not been told.

  Attributes:
    at: events in the log before what it tells.
    flight: the launch.
    ended: what it answered.
    starts: position and tokens of each row when it began.
    came: for each hop, who came to its router; empty until it is told where
      everybody has passed.
    read: for each hop, bitmap of the experts that brought them there from the
      router before; 0 at the first one: the launch itself names those.
    crossed: how many layers each row has come further.
    over: why a row ended where it came to, by its place in the launch.
  """

  at: int
  flight: flights_lib.Flight
  ended: protocols.Ended
  starts: list[tuple[int, int]]
  came: list[_Came]
  read: list[int]
  crossed: list[int]
  over: dict[int, str]


class Answers:
  """The engine's ear on the device.

  The next decision needs to know where rows are and what they need. What
  else an answer means (events, the history that evictions look at, guesses)
  can wait until the next launch is on its way: the device may be idle before
  that and is not behind it. `settle` catches up, and whoever looks at any of
  it calls that first. The log has everything where it belongs afterwards.
  """

  def __init__(
    self,
    rows: list[request_lib.Progress | None],
    flights: flights_lib.Flights,
    view: protocols.View,
    loads: loads_lib.Loads,
    log: list[events.Event],
    stop: StopRule | None,
  ):
    """Args: `rows` loses who ends, as does the `view`."""
    self._rows, self._flights, self._view = rows, flights, view
    self._loads, self._log, self._stop = loads, log, stop
    self._layers = len(view.resident)
    self._notes: list[_Note] = []
    self._tokens = 0

  @property
  def pending(self) -> bool:
    """Whether something has not been told."""
    return bool(self._notes)

  def moved(
    self, flight: flights_lib.Flight, ended: protocols.Ended
  ) -> tuple[list[int], int]:
    """The rows of a launch have come one or more layers further.

    Who ends by a token on the way has no part in the hops behind it, whatever
    the device did. Returns how many layers each crossed, and how many experts
    it took behind the first one.
    """
    group = flight.group
    starts = [(p.position, len(p.generated)) for p in group]
    crossed = [0] * len(group)
    over: dict[int, str] = {}  # `dict[int, str]()` costs .7 us.
    note = _Note(len(self._log), flight, ended, starts, [], [], crossed, over)
    self._notes.append(note)
    passed, taken = ended.passed, None
    if passed is not None:
      taken = self._behind_head(group, passed)
      if not taken:
        return self._pass(note, passed)
    self._follow(note, taken)
    for p, count in zip(group, crossed, strict=True):
      self._move(p, flight, count)
    if over:
      group = [p for place, p in enumerate(group) if place not in over]
    self.back(group)
    return crossed, sum([experts.bit_count() for experts in note.read])

  def back(self, group: Sequence[request_lib.Progress]) -> None:
    """Rows that a launch has carried wait again."""
    for p in group:
      p.in_flight = False
    self._view.waiting += group
    self._view.waiting.sort(key=_BY_ROW)

  def leave(self, p: request_lib.Progress, reason: str, time: int) -> None:
    """Tells that a request has ended; its row is free."""
    what, _, detail = reason.partition(': ')
    self._log.append(events.Finished(time, p.request.number, what, detail))
    self._loads.uses.leave(p.row)
    self._loads.guesses.leave(p.row)

  def settle(self) -> None:
    """Tells what has not been told, in order."""
    notes, log, clock = self._notes, self._log, self._flights.clock
    if not notes:
      return
    begun = clock()
    self._notes = []
    first = notes[0].at
    behind = log[first:]
    del log[first:]
    ends = [note.at for note in notes[1:]] + [first + len(behind)]
    for note, end in zip(notes, ends, strict=True):
      self._tell(note)
      log += behind[note.at - first : end - first]
    self._flights.host.settle += clock() - begun

  def _pass(
    self, note: _Note, passed: protocols.Passed
  ) -> tuple[list[int], int]:
    """All rows have come where the last hop says, and nobody has ended."""
    flight, crossed = note.flight, note.crossed
    came = _came(passed.last, len(flight.group))
    for place, p in enumerate(flight.group):
      p.need, p.choices = came.needs[place], passed.last.choices[place]
      crossed[place] = flight.hops
      self._move(p, flight, flight.hops)
    self.back(flight.group)
    return crossed, passed.read

  def _follow(self, note: _Note, taken: dict[int, str] | None) -> None:
    """The rows of a launch hop by hop; `taken`: who ends behind its head.

    None where their tokens have not been taken yet.
    """
    flight, crossed, over = note.flight, note.crossed, note.over
    group, head = flight.group, _head(flight, self._layers)
    for number, hop in enumerate(note.ended.hops):
      came = _came(hop, len(group))
      if over:
        came = _without(came, over)
      places, needs, hop = came
      read = 0
      for place, need, ids in zip(places, needs, hop.choices, strict=True):
        p = group[place]
        if number:
          read |= p.need
        p.need, p.choices = need, ids
        crossed[place] = number + 1
      note.came.append(came)
      note.read.append(read)
      if number == head and taken is not None:
        over.update(taken)
      elif number == head or not all(hop.sound):
        self._end(group, came, over, head=number == head)

  def _move(
    self, p: request_lib.Progress, flight: flights_lib.Flight, count: int
  ) -> None:
    p.layer = (flight.layer + count) % self._layers
    if flight.kind == 'decode':
      p.position += count

  def _behind_head(
    self, group: Sequence[request_lib.Progress], passed: protocols.Passed
  ) -> dict[int, str]:
    """Rows that have all passed take their tokens; who ends, and why."""
    over: dict[int, str] = {}
    if passed.tokens:
      hop = passed.last._replace(tokens=passed.tokens)
      self._end(group, _Came(range(len(group)), [], hop), over, head=True)
    return over

  def _end(
    self,
    group: Sequence[request_lib.Progress],
    came: _Came,
    over: dict[int, str],
    *,
    head: bool,
  ) -> None:
    """Rows take their tokens behind a head; notes who ends, and why."""
    hop = came.hop
    for i, place in enumerate(came.places):
      p, reason = group[place], None
      if not hop.sound[i]:
        reason = _UNSOUND
      elif head:
        reason = self._take_token(p, hop.tokens[i])
      if reason is not None:
        over[place] = reason
        self._rows[p.row] = None
        self._view.active -= 1

  def _take_token(self, p: request_lib.Progress, token: int) -> str | None:
    """A row has its next token; a reason where it is the request's last."""
    p.generated.append(token)
    reason = self._stop(p, token) if self._stop else None
    if reason is not None:
      return reason
    if token in p.request.eos_ids:
      return 'eos'
    last = len(p.generated) >= p.request.new_tokens
    return 'length' if last else None

  def _tell(self, note: _Note) -> None:
    """Hop by hop, as if each had been a launch of its own."""
    flight, ended = note.flight, note.ended
    if not note.came:
      _recall(note)
    read: list[int] = []
    for number, experts in enumerate(note.read):
      if experts:
        layer = (flight.layer + number) % self._layers
        read += self._flights.read(layer, experts)
      self._tell_hop(note, number)
    if flight.hops > 1:
      self._log.append(
        events.Crossed(
          ended.time, ended.launch, tuple(note.crossed), tuple(read)
        )
      )

  def _tell_hop(self, note: _Note, number: int) -> None:
    """What a router has said of the rows that came to it."""
    flight, time, over = note.flight, note.ended.time, note.over
    came, log, group = note.came[number], self._log.append, flight.group
    layer = (flight.layer + number + 1) % self._layers
    resident = self._view.resident[layer]
    head, choices = _head(flight, self._layers), came.hop.choices
    behind = 1 if number >= head >= 0 else 0
    further = number + 1 if flight.kind == 'decode' else 0
    if over:
      over = {p: over[p] for p in over if note.crossed[p] == number + 1}
    for place, need, ids in zip(came.places, came.needs, choices, strict=True):
      p, (position, tokens) = group[place], note.starts[place]
      if number == head:
        self._tell_token(note, came, place)
      if over and place in over:
        self.leave(p, over[place], time)
        continue
      tokens, position = tokens + behind, position + further
      hits = (need & resident).bit_count()
      log(
        events.Routed(
          time, p.request.number, tokens, layer, ids, hits, position
        )
      )
    if over:
      came = _without(came, over)
    stay = [group[place] for place in came.places]
    self._loads.revealed(time, layer, stay, came.needs, came.hop)

  def _tell_token(self, note: _Note, came: _Came, place: int) -> None:
    """A row has passed the head; what is not sound is no token."""
    at = came.places.index(place)
    if came.hop.sound[at]:
      number = note.flight.group[place].request.number
      tokens, token = note.starts[place][1], came.hop.tokens[at]
      self._log.append(events.Token(note.ended.time, number, tokens, token))
      self._count_token()

  def _count_token(self) -> None:
    self._tokens += 1
    self._loads.uses.advance(self._tokens / len(self._rows))


def _recall(note: _Note) -> None:
  """Hop by hop, what a launch answered whose rows have all passed."""
  read = 0
  for hop in note.ended.hops:
    came = _came(hop, len(note.flight.group))
    note.came.append(came)
    note.read.append(read)
    read = 0
    for need in came.needs:
      read |= need


def _head(flight: flights_lib.Flight, layers: int) -> int:
  """The hop of a launch that lies behind the head; -1 where none does."""
  decoded = flight.kind == 'decode'
  return layers - 1 - flight.layer if decoded else -1


def _came(hop: protocols.Hop, rows: int) -> _Came:
  """Everybody who came to a router, of so many rows of the launch."""
  needs = []
  for choices in hop.choices:
    need = 0
    for expert in choices:
      need |= 1 << expert
    needs.append(need)
  return _Came(hop.places or range(rows), needs, hop)


def _without(came: _Came, gone: Container[int]) -> _Came:
  """Those who came but for some places."""
  hop = came.hop
  kept = [i for i, place in enumerate(came.places) if place not in gone]
  return _Came(
    [came.places[i] for i in kept],
    [came.needs[i] for i in kept],
    protocols.Hop(
      [hop.tokens[i] for i in kept],
      [hop.sound[i] for i in kept],
      [hop.choices[i] for i in kept],
      [hop.guesses[i] for i in kept] if hop.guesses else (),
    ),
  )
