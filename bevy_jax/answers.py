"""What launches answer: rows move at once, and all else is told afterwards."""

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bevy_jax import events, protocols
from bevy_jax import flights as flights_lib
from bevy_jax import guesses as guesses_lib
from bevy_jax import loads as loads_lib
from bevy_jax import request as request_lib

# Called with a request and its new token; a reason ends the request.
StopRule = Callable[[request_lib.Progress, int], str | None]

_BY_ROW = operator.attrgetter('row')
_UNSOUND = 'error: a value in the model was not finite'


class _Note(NamedTuple):
  """An answer whose rows have moved and that has not been told.

  Attributes:
    at: events in the log before what it tells.
    flight: the launch.
    ended: what it answered.
    starts: position and tokens of each row when it began.
    came: for each hop, of who came to its router: index in the hop's answer
      and place in the launch. Nobody who had ended before.
    crossed: how many layers each row has come further.
    over: why a row ended where it came to, by its place in the launch.
  """

  at: int
  flight: flights_lib.Flight
  ended: protocols.Ended
  starts: list[tuple[int, int]]
  came: list[list[tuple[int, int]]]
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
    group, hops, layers = flight.group, ended.hops, self._layers
    starts = [(p.position, len(p.generated)) for p in group]
    crossed, over = [0] * len(group), dict[int, str]()
    note = _Note(len(self._log), flight, ended, starts, [], crossed, over)
    self._notes.append(note)
    index = [0] * len(group)  # Of each row in the hop that it came to last.
    read, head = 0, _head(flight, layers)
    for number, hop in enumerate(hops):
      came = list(enumerate(hop.places or range(len(group))))
      if over:
        came = [(i, place) for i, place in came if place not in over]
      note.came.append(came)
      if number:
        before = hops[number - 1].choices
        read += len(set().union(*[before[index[place]] for _, place in came]))
      for i, place in came:
        crossed[place], index[place] = number + 1, i
      if number == head or not all(hop.sound):
        self._end(group, hop, came, over, head=number == head)
    stay = []
    decoded = flight.kind == 'decode'
    for place, p in enumerate(group):
      if place in over:
        continue
      count = crossed[place]
      p.layer = (flight.layer + count) % layers
      p.choices = tuple(hops[count - 1].choices[index[place]])
      p.need = 0
      for expert in p.choices:
        p.need |= 1 << expert
      p.position += count * decoded
      stay.append(p)
    self.back(stay)
    return crossed, read

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

  def _end(
    self,
    group: Sequence[request_lib.Progress],
    hop: protocols.Hop,
    came: Sequence[tuple[int, int]],
    over: dict[int, str],
    *,
    head: bool,
  ) -> None:
    """Rows take their tokens behind a head; notes who ends, and why."""
    for i, place in came:
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
    needs, read = [0] * len(flight.group), list[int]()
    for number, came in enumerate(note.came):
      if number:
        layer = (flight.layer + number) % self._layers
        read += self._flights.read(layer, [needs[place] for _, place in came])
      self._tell_hop(note, number, needs)
    if flight.hops > 1:
      self._log.append(
        events.Crossed(
          ended.time, ended.launch, tuple(note.crossed), tuple(read)
        )
      )

  def _tell_hop(self, note: _Note, number: int, needs: list[int]) -> None:
    """What a router has said of the rows that came to it."""
    flight, time, hop = note.flight, note.ended.time, note.ended.hops[number]
    layer = (flight.layer + number + 1) % self._layers
    decoded, head = flight.kind == 'decode', _head(flight, self._layers)
    behind, further = int(number >= head >= 0), (number + 1) * decoded
    resident, log = self._view.resident[layer], self._log.append
    stay: list[guesses_lib.Came] = []
    given: list[Sequence[Sequence[int]]] = []
    for i, place in note.came[number]:
      p, (position, tokens) = flight.group[place], note.starts[place]
      if number == head and hop.sound[i]:
        log(events.Token(time, p.request.number, tokens, hop.tokens[i]))
        self._count_token()
      if place in note.over and note.crossed[place] == number + 1:
        self.leave(p, note.over[place], time)
        continue
      choices, need = tuple(hop.choices[i]), 0
      for expert in choices:
        need |= 1 << expert
      needs[place] = need
      log(
        events.Routed(
          time,
          p.request.number,
          tokens + behind,
          layer,
          choices,
          (need & resident).bit_count(),
          position + further,
        )
      )
      stay.append(guesses_lib.Came(p.request, p.row, choices, need))
      if hop.guesses:
        given.append(hop.guesses[i])
    self._loads.revealed(time, layer, stay, given)

  def _count_token(self) -> None:
    self._tokens += 1
    self._loads.uses.advance(self._tokens / len(self._rows))


def _head(flight: flights_lib.Flight, layers: int) -> int:
  """The hop of a launch that lies behind the head; -1 where none does."""
  decoded = flight.kind == 'decode'
  return layers - 1 - flight.layer if decoded else -1
