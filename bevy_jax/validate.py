"""Whether a schedule was possible at all, told by its event log alone.

Nothing of the engine is imported: what it believes about slots, waiting
requests and the clock is computed again, from what it wrote down. The order
of the log is the order in which the engine learned; times say when it was.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from bevy_jax import costs as costs_lib
from bevy_jax import crossing, events


class Facts(NamedTuple):
  """What a log does not say of itself.

  Attributes:
    layers: layers with experts.
    experts: experts of a layer.
    slots: size of the cache.
    rows: R.
    costs: of a simulated machine; None where times are measured.
    quota: slots that each layer may fill; empty where all share one pool.
  """

  layers: int
  experts: int
  slots: int
  rows: int
  costs: costs_lib.Costs | None = None
  quota: Sequence[int] = ()


# With these an answer has been told to its end.
_DECISIONS = (
  events.Admitted,
  events.LoadIssued,
  events.LoadLanded,
  events.LoadFailed,
  events.LaunchBegun,
)


def faults(log: Sequence[events.Event], facts: Facts) -> list[str]:
  """What is impossible in a log, one line each; empty where nothing is.

  After the first fault the later ones may follow from it.
  """
  check = _Check(facts)
  for index, event in enumerate(log):
    check.look(index, event)
  return check.found


@dataclasses.dataclass
class _Request:
  """What a log has told of one request that has a row."""

  row: int
  token: int = 0  # Index of the token that it is making.
  layer: int = -1
  position: int = -1
  need: frozenset[int] = frozenset()  # Keys still to be applied.
  launch: int | None = None  # Which carries it.
  moved: bool = False  # Its launch has ended, and it has not been routed.
  crossed: int = 0  # Layers that its last launch has carried it over.


class _Check:
  """A log as it is read."""

  def __init__(self, facts: Facts):
    self.found: list[str] = []
    self._facts, self._index = facts, 0
    self._slots: dict[int, int] = {}  # Slot -> key, resident or coming.
    self._coming: dict[int, events.LoadIssued] = {}
    self._landed: dict[int, int] = {}  # Resident key -> when it landed.
    self._running: dict[int, crossing.Flight] = {}
    self._over: crossing.Flight | None = None  # Its answer is being told.
    self._requests: dict[int, _Request] = {}
    self._prefilled: set[int] = set()
    self._prompt: set[int] | None = None  # Keys that a prompt chunk needs.
    self._doomed: set[int] = set()  # Who waits for what has failed.
    self._clock = self._link = self._device = self._answer = 0
    self._launches = 0

  def look(self, index: int, event: events.Event) -> None:
    """Reads one event."""
    self._index = index
    if isinstance(event, _DECISIONS):
      self._over = None
    if self._doomed and not isinstance(event, events.Finished):
      self._must(False, f'{sorted(self._doomed)} wait for what has failed')
      self._doomed.clear()
    match event:
      case events.Admitted():
        self._admitted(event)
      case events.Prefilled():
        self._prefilled |= set(event.requests)
      case events.LoadIssued():
        self._issued(event)
      case events.LoadLanded():
        self._has_landed(event)
      case events.LoadFailed():
        self._has_failed(event)
      case events.Evicted():
        self._evicted(event)
      case events.LaunchBegun():
        self._begun(event)
      case events.LaunchEnded():
        self._ended(event)
      case events.Crossed():
        self._has_crossed(event)
      case events.PrefillRouted():
        base = event.layer * self._facts.experts
        self._prompt = {base + e for e in event.experts}
      case events.Routed():
        self._routed(event)
      case events.Token():
        self._token(event)
      case events.Finished():
        self._finished(event)

  def _must(self, holds: bool, what: str) -> None:
    if not holds:
      self.found.append(f'event {self._index}: {what}')

  def _decided(self, event: events.Event) -> None:
    """What the engine does, it does at the clock's own time."""
    self._must(event.time >= self._clock, 'the clock went back')
    self._clock = max(self._clock, event.time)

  # The link and the slots.

  def _issued(self, e: events.LoadIssued) -> None:
    self._decided(e)
    self._must(0 <= e.slot < self._facts.slots, f'slot {e.slot} is none')
    self._must(e.slot not in self._slots, f'slot {e.slot} is overwritten')
    self._must(
      e.key not in self._slots.values(), f'key {e.key} is loaded twice'
    )
    self._slots[e.slot] = e.key
    self._coming[e.key] = e
    if self._facts.quota:
      layer = e.key // self._facts.experts
      lie = sum(k // self._facts.experts == layer for k in self._slots.values())
      most = self._facts.quota[layer]
      self._must(lie <= most, f'layer {layer} fills {lie} of its {most} slots')

  def _has_landed(self, e: events.LoadLanded) -> None:
    issued = self._coming.pop(e.key, None)
    if issued is None or issued.slot != e.slot:
      self._must(False, f'key {e.key} lands that is not under way to {e.slot}')
      return
    self._must(e.time >= issued.time, f'key {e.key} lands before it began')
    self._landed[e.key] = e.time
    self._must(e.time >= self._link, 'landings are told out of order')
    if e.began >= 0:
      self._must(
        max(self._link, issued.time) <= e.began <= e.time,
        'the link carries two loads at once',
      )
    if self._facts.costs is not None:
      costs = self._facts.costs
      least = max(self._link, issued.time + costs.host_load + costs.latency)
      self._must(e.time - least >= costs.load, 'a load is faster than the link')
    self._link = max(self._link, e.time)

  def _has_failed(self, e: events.LoadFailed) -> None:
    issued = self._coming.pop(e.key, None)
    if issued is None or issued.slot != e.slot:
      self._must(False, f'key {e.key} fails that is not under way to {e.slot}')
      return
    self._must(e.time >= issued.time, f'key {e.key} fails before it began')
    del self._slots[e.slot]
    # Who is in a launch, a wave of the same layer, tries it again.
    self._doomed = {
      number
      for number, r in self._requests.items()
      if e.key in r.need and r.launch is None and not r.moved
    }

  def _evicted(self, e: events.Evicted) -> None:
    self._decided(e)
    self._must(
      self._slots.get(e.slot) == e.key and e.key in self._landed,
      f'key {e.key} gives up slot {e.slot}, where it does not lie',
    )
    reading = [
      n
      for n, flight in self._running.items()
      if e.key in flight.begun.experts or e.key in flight.may
    ]
    self._must(not reading, f'key {e.key} is given up while {reading} read it')
    self._slots.pop(e.slot, None)
    self._landed.pop(e.key, None)

  # Launches.

  def _begun(self, e: events.LaunchBegun) -> None:
    self._decided(e)
    self._must(e.launch == self._launches, 'a launch is left out')
    self._launches = e.launch + 1
    for key in e.experts:
      there = self._landed.get(key)
      self._must(there is not None, f'launch {e.launch} reads {key}, not here')
      self._must(
        there is None or there <= e.time,
        f'launch {e.launch} reads {key} before it lands',
      )
      self._must(
        key // self._facts.experts == e.layer,
        f'launch {e.launch} reads {key} of another layer',
      )
    layers, experts = self._facts.layers, self._facts.experts
    self._must(
      1 <= e.hops <= (layers if e.finish else 1),
      f'launch {e.launch} may cross {e.hops} layers',
    )
    may = crossing.may_read(e, self._landed, layers, experts)
    self._running[e.launch] = crossing.Flight(e, may)
    if e.kind == 'prefill':
      self._begun_prefill(e)
      return
    self._must(bool(e.requests), f'launch {e.launch} carries nobody')
    for number in e.requests:
      self._carries(e, number)

  def _begun_prefill(self, e: events.LaunchBegun) -> None:
    if self._prompt is None:
      return
    if e.finish and e.layer >= 0:
      left = self._prompt - set(e.experts)
      self._must(not left, f'launch {e.launch} leaves out {sorted(left)}')
    self._prompt -= set(e.experts)

  def _carries(self, e: events.LaunchBegun, number: int) -> None:
    r = self._requests.get(number)
    if r is None:
      self._must(False, f'launch {e.launch} carries {number}, who has no row')
      return
    self._must(r.launch is None, f'request {number} is in two launches')
    self._must(not r.moved, f'request {number} goes on before it is routed')
    r.launch, r.crossed = e.launch, 0
    if e.kind == 'enter':
      self._must(
        r.layer < 0 and number in self._prefilled,
        f'request {number} enters without its prompt, or twice',
      )
      return
    self._must(
      r.layer == e.layer,
      f'request {number} is at layer {r.layer}, launched at {e.layer}',
    )
    r.need -= set(e.experts)
    if e.finish:
      self._must(
        not r.need, f'launch {e.launch} leaves out {sorted(r.need)} of {number}'
      )

  def _ended(self, e: events.LaunchEnded) -> None:
    first = next(iter(self._running), None)
    self._must(first == e.launch, f'launch {e.launch} ends out of turn')
    self._over = self._running.pop(e.launch, None)
    if self._over is None:
      return
    begun = self._over.begun
    self._must(e.time >= begun.time, f'launch {e.launch} ends before it began')
    self._must(e.time >= self._device, 'ends are told out of order')
    if e.began >= 0:
      self._must(
        max(self._device, begun.time) <= e.began <= e.time,
        'the device runs two launches at once',
      )
    if self._facts.costs is not None and begun.kind != 'prefill':
      host = begun.time + self._facts.costs.host_launch
      self._over.spent = e.time - max(self._device, host)
      if begun.hops == 1:
        self._took(self._facts.costs, self._over)
    self._device = max(self._device, e.time)
    self._answer = e.time
    for number in begun.requests:
      r = self._requests.get(number)
      if r is not None and r.launch == e.launch:
        r.launch, r.moved = None, begun.finish
        r.crossed = int(begun.finish)

  def _took(self, costs: costs_lib.Costs, over: crossing.Flight) -> None:
    """A launch needs its time, each of its layers."""
    layers, experts = self._facts.layers, self._facts.experts
    self._must(
      over.spent >= over.least(costs, layers, experts),
      f'launch {over.begun.launch} is faster than the device',
    )

  def _goes_on(self, number: int, r: _Request) -> None:
    """A launch that may cross more layers has carried a request on."""
    over = self._over
    if r.moved or over is None or number not in over.begun.requests:
      return
    self._must(
      r.crossed < over.begun.hops, f'request {number} crosses {r.crossed + 1}'
    )
    self._must(
      r.need <= over.may,
      f'request {number} goes on without {sorted(r.need - over.may)}',
    )
    over.read |= r.need
    r.need, r.moved, r.crossed = frozenset(), True, r.crossed + 1

  def _has_crossed(self, e: events.Crossed) -> None:
    over = self._over
    if over is None or over.begun.launch != e.launch:
      self._must(False, f'launch {e.launch} has not just ended')
      return
    self._must(
      set(e.experts) == over.read, f'launch {e.launch} read other experts'
    )
    here = (self._requests.get(number) for number in over.begun.requests)
    self._must(
      len(e.layers) == len(over.begun.requests)
      and all(
        r is None or r.crossed == layers
        for r, layers in zip(here, e.layers, strict=False)
      ),
      f'launch {e.launch} did not cross {e.layers}',
    )
    if self._facts.costs is not None:
      self._took(self._facts.costs, over)

  # Requests.

  def _admitted(self, e: events.Admitted) -> None:
    self._decided(e)
    taken = [r.row for r in self._requests.values()]
    self._must(
      0 <= e.row < self._facts.rows and e.row not in taken,
      f'row {e.row} is not free',
    )
    self._must(e.arrived <= e.time, f'{e.request} is admitted before it came')
    self._requests[e.request] = _Request(e.row)

  def _routed(self, e: events.Routed) -> None:
    r = self._requests.get(e.request)
    if r is None:
      self._must(False, f'{e.request} is routed and has no row')
      return
    self._goes_on(e.request, r)
    self._must(
      r.moved and e.time == self._answer,
      f'request {e.request} is routed, but no launch of it has ended',
    )
    first = r.layer < 0
    after = 0 if first else (r.layer + 1) % self._facts.layers
    self._must(
      (e.layer, e.token) == (after, r.token),
      f'request {e.request} is routed at layer {e.layer}, token {e.token}; '
      f'next are {after}, {r.token}',
    )
    self._must(
      first or e.position == r.position + 1,
      f'request {e.request} jumps to position {e.position}',
    )
    base = e.layer * self._facts.experts
    r.need = frozenset(base + x for x in e.experts)
    self._must(
      len(r.need) == len(e.experts)
      and all(0 <= x < self._facts.experts for x in e.experts),
      f'request {e.request} is routed to {e.experts}',
    )
    hits = sum(key in self._landed for key in r.need)
    self._must(e.hits == hits, f'{e.hits} hits are told, {hits} are resident')
    r.layer, r.position, r.moved = e.layer, e.position, False

  def _token(self, e: events.Token) -> None:
    r = self._requests.get(e.request)
    if r is None:
      self._must(False, f'{e.request} has a token and no row')
      return
    self._goes_on(e.request, r)
    self._must(
      r.moved and r.layer == self._facts.layers - 1,
      f'request {e.request} has a token at layer {r.layer}',
    )
    self._must(e.index == r.token, f'token {e.index} comes, not {r.token}')
    r.token = e.index + 1

  def _finished(self, e: events.Finished) -> None:
    r = self._requests.pop(e.request, None)
    if r is not None and e.reason == 'error':
      self._goes_on(e.request, r)
    self._doomed.discard(e.request)
    if e.reason == 'error' and e.request not in self._prefilled:
      self._prompt = None  # What the other prompts need the log does not say.
    self._must(
      r is not None and r.launch is None,
      f'request {e.request} ends that has no row, or in a launch',
    )
