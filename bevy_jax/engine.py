"""The one loop: poll, admit, load, launch, wait. No device, no clock."""

import bisect
import operator
from collections import deque
from collections.abc import Callable, Sequence

from bevy_jax import events, failures, protocols
from bevy_jax import flights as flights_lib
from bevy_jax import loads as loads_lib
from bevy_jax import prefill as prefill_lib
from bevy_jax import request as request_lib
from bevy_jax.layers import config as model_config
from bevy_jax.offload import prefetch, slot_table

# Called with a request and its new token; a reason ends the request.
StopRule = Callable[[request_lib.Progress, int], str | None]


class Engine:
  """Owner of the slot table, of every request's progress and of the log.

  Attributes:
    table: which expert lies where.
    log: every event so far.
    view: what the scheduler sees.
  """

  def __init__(
    self,
    model: model_config.ModelConfig,
    executor: protocols.Executor,
    scheduler: protocols.Scheduler,
    eviction: protocols.Eviction,
    *,
    rows: int,
    slots: int,
    link_depth: int,
    quota: Sequence[int] = (),
    stop: StopRule | None = None,
    prefetcher: protocols.Prefetcher = prefetch.PREFETCHERS['none'],
  ):
    layers = len(model.moe_ids)
    loads_lib.check_room(slots, quota, model.top_k)
    self._model, self._layers = model, layers
    self._executor, self._scheduler, self._stop = executor, scheduler, stop
    self.table = slot_table.SlotTable(layers, model.num_experts, slots, quota)
    self.log: list[events.Event] = []
    self.view = protocols.View(
      [],
      0,
      0,
      self.table.resident,
      self.table.loading,
      slots,
      experts=model.num_experts,
      quota=quota,
    )
    self._loads = loads_lib.Loads(
      self.table,
      executor,
      eviction,
      link_depth,
      rows,
      self.log.append,
      prefetcher,
      model.top_k,
      self.view.pace,
    )
    # Where the last layer has experts, nothing behind them reads a prompt.
    self._prefilled = layers - model.moe_layers[-1]
    self._rows: list[request_lib.Progress | None] = [None] * rows
    self._queue: deque[tuple[request_lib.Request, int]] = deque()
    self._prefill: prefill_lib.Prefill | None = None
    self._flights = flights_lib.Flights(
      executor, self.table, self.view, self.log.append
    )
    self._host = self._flights.host
    self._tokens = 0
    self._stirred = True  # Whether the view changed since the last decision.

  @property
  def busy(self) -> bool:
    """Whether a request has not ended."""
    return bool(self._queue) or self._rows.count(None) < len(self._rows)

  def submit(self, request: request_lib.Request) -> None:
    """Queues a request; it is admitted when a row is free."""
    if not self.busy:
      self.view.pace.pause()
    self._queue.append((request, self._executor.now()))
    self._stirred = True

  def step(self) -> None:
    """Once round the loop; everything that happened is in the log."""
    begun = self._executor.now()
    for event in (happened := self._executor.poll()):
      self.view.pace.now = event.time
      if isinstance(event, protocols.Landed):
        self._loads.landed(event)
      elif isinstance(event, protocols.Failed):
        self._failed(event)
      else:
        self._ended(event)
    if not happened and not self._stirred:
      # Decisions depend on the view alone, and nothing in it has changed.
      if self.busy:
        self._executor.wait()
      return
    self._admit()
    self._host.poll += self._executor.now() - begun
    self._load()
    self._stirred = self._launch()

  def _failed(self, failed: protocols.Failed) -> None:
    self._loads.failed(failed)
    experts, prefill = self.table.experts, self._prefill
    for p in failures.affected(failed, experts, self.view, prefill):
      self._finish(p, f'error: {failed.reason}', failed.time)
    if prefill is not None and not prefill.group:
      self._prefill = None
    self._set_floor()

  # Admission and prefill.

  def _admit(self) -> None:
    if self._prefill is not None or not self._queue:
      return
    group = []
    for row, held in enumerate(self._rows):
      if held is None and self._queue:
        group.append(self._seat(row, *self._queue.popleft()))
    if group:
      self._prefill = prefill_lib.Prefill(group, self._executor.chunk)

  def _seat(
    self, row: int, request: request_lib.Request, arrived: int
  ) -> request_lib.Progress:
    now, tokens = self._executor.now(), len(request.prompt)
    self.log.append(events.Admitted(now, request.number, row, tokens, arrived))
    # It joins the pack where the last one is, so that nobody waits for it to
    # make up passes it never had to do.
    floor = self.view.floor if self.view.active else 0
    progress = request_lib.Progress(
      request, row, position=floor // self._layers * self._layers
    )
    self._rows[row] = progress
    return progress

  def _launch_prefill(self, prefill: prefill_lib.Prefill) -> bool:
    if prefill.in_flight:
      return False
    if prefill.done:
      self._enter(prefill)
      return True
    if prefill.layer < 0:
      batch = protocols.Batch('prefill', -1, chunk=prefill.next_chunk())
      self._flights.begin(batch, prefill.group)
      prefill.in_flight = True
      return True
    experts = self._prefill_wave(prefill)
    if experts & ~self.table.resident[prefill.layer]:
      return False
    batch = prefill.batch(self.table, experts)
    self._flights.begin(batch, prefill.group)
    prefill.in_flight = True
    return True

  def _prefill_wave(self, prefill: prefill_lib.Prefill) -> int:
    """What to apply next, leaving what decoding requests await in place."""
    awaited = {
      p.layer * self._model.num_experts + e
      for p in self.view.waiting
      for e in p.choices
      if not self.view.quota or p.layer == prefill.layer
    }
    room = self.view.room(prefill.layer) - len(awaited)
    room = max(self._model.top_k, room)
    return prefill.wave(self.table.resident[prefill.layer], room)

  def _ended_prefill(
    self, flight: flights_lib.Flight, ended: protocols.Ended
  ) -> None:
    prefill = self._prefill
    assert prefill is not None, 'a chunk ended that nobody began'
    prefill.in_flight = False
    if not flight.finish:
      prefill.need &= ~flight.experts
      return
    layer = flight.layer + 1
    if layer >= self._prefilled:
      prefill.finish_chunk()
      return
    uses = prefill.arrive(layer, ended.hops[0].choices)
    resident = self.table.resident[layer]
    self.log.append(prefill_lib.routed(ended.time, layer, uses, resident))
    if uses:
      self._loads.uses.touch_all(layer, dict.fromkeys(uses, 1))

  def _enter(self, prefill: prefill_lib.Prefill) -> None:
    """The last prompt tokens enter their rows; decoding goes on."""
    numbers = tuple(p.request.number for p in prefill.group)
    self.log.append(events.Prefilled(self._executor.now(), numbers))
    self._prefill = None
    entries = prefill.entries()
    self.view.active += len(entries)
    batch = protocols.Batch('enter', -1, entries=entries)
    self._flights.begin(batch, prefill.group)

  def _load(self) -> None:
    clock, prefill = self._executor.now, self._prefill
    idle = prefill is not None and (prefill.layer < 0 or prefill.in_flight)
    if self._loads.full or idle:
      return
    begun = clock()
    wants = self._scheduler.wants(self.view)
    wanted = clock()
    self._host.schedule += wanted - begun
    if prefill is None:
      self._loads.issue(wants, len(wants), 'demand')
      if self._loads.guesses.on:
        wants += [protocols.Want(p.layer, p.need) for p in self.view.waiting]
        self._loads.prefetch(wants)
    else:
      wave = self._prefill_wave(prefill)
      wants.insert(0, protocols.Want(prefill.layer, wave))
      # A scheduler may want for some of those who wait (lockstep: for the
      # last ones); what the others await is no less dear than what nobody
      # awaits, whatever the eviction thinks of it.
      wants += [protocols.Want(p.layer, p.need) for p in self.view.waiting]
      self._loads.issue(wants, 1, 'prefill')
    self._host.load += clock() - wanted

  # Launches.

  def _launch(self) -> bool:
    clock = self._executor.now
    begun = clock()
    if self._prefill is not None:
      launched = self._launch_prefill(self._prefill)
      self._host.launch += clock() - begun
      return launched
    if self.view.in_flight >= self._scheduler.depth:
      return False
    launch = self._scheduler.launch(self.view)
    self._host.schedule += clock() - begun
    if launch is None:
      return False
    begun = clock()
    self._flights.decode(launch)
    self._host.launch += clock() - begun
    return True

  def _ended(self, ended: protocols.Ended) -> None:
    flight = self._flights.end(ended)
    crossed, read = [1], 0
    if flight.kind == 'prefill':
      self._ended_prefill(flight, ended)
    elif flight.finish:
      crossed, read = self._moved_on(flight, ended)
    else:
      for p in flight.group:
        p.need &= ~flight.experts
        self._await(p)
    if flight.kind == 'decode' and flight.finish:
      reached = {(flight.layer + hops) % self._layers for hops in crossed}
      missing = sum(map(self.view.missing, reached))
      self.view.pace.launch_ended(
        ended.time, ended.launch, missing, ended.began, flight.hops, read
      )
    elif flight.kind == 'decode':
      self.view.pace.wave_ended(ended.time, ended.launch, ended.began)
    self._set_floor()

  def _moved_on(
    self, flight: flights_lib.Flight, ended: protocols.Ended
  ) -> tuple[list[int], int]:
    """The rows of a launch have come one or more layers further.

    Hop by hop, as if each had been a launch of its own. Who ends by a token
    on the way has no part in the hops behind it, whatever the device did.
    Returns how many layers each crossed, and how many experts it took behind
    the first one.
    """
    group, layer = flight.group, flight.layer
    crossed, read = [0] * len(group), list[int]()
    for number, hop in enumerate(ended.hops):
      places = hop.places or range(len(group))
      came = [
        (group[place], i)
        for i, place in enumerate(places)
        if self._rows[group[place].row] is group[place]
      ]
      if number:
        read += self._flights.read(layer, [p.need for p, _ in came])
      layer = (layer + 1) % self._layers
      for p, i in came:
        crossed[places[i]] += 1
        p.position += flight.kind == 'decode'
      self._came(came, layer, hop, ended.time, flight.kind == 'decode')
    for p in group:
      if self._rows[p.row] is p:
        self._await(p)
    if flight.hops > 1:
      self.log.append(
        events.Crossed(ended.time, ended.launch, tuple(crossed), tuple(read))
      )
    return crossed, len(read)

  def _came(
    self,
    came: Sequence[tuple[request_lib.Progress, int]],
    layer: int,
    hop: protocols.Hop,
    time: int,
    decoded: bool,
  ) -> None:
    """Requests at a router, each with its index in what that says."""
    touched: dict[int, int] = {}
    stay: list[request_lib.Progress] = []
    given: list[Sequence[Sequence[int]]] = []
    for p, i in came:
      reason: str | None = None
      if not hop.sound[i]:
        reason = 'error: a value in the model was not finite'
      elif decoded and layer == 0:
        reason = self._take_token(p, hop.tokens[i], time)
      if reason is not None:
        self._finish(p, reason, time)
        self.view.active -= 1
        continue
      p.layer, p.choices = layer, tuple(hop.choices[i])
      p.need = 0
      for expert in p.choices:
        p.need |= 1 << expert
        touched[expert] = touched.get(expert, 0) + 1
      self._revealed(p, time)
      stay.append(p)
      given += hop.guesses[i : i + 1]
    self._loads.guesses.reveal(time, layer, stay, given)
    self._loads.uses.reveal(
      layer, [p.row for p in stay], [p.choices for p in stay]
    )
    if touched:
      self._loads.uses.touch_all(layer, touched)

  def _revealed(self, p: request_lib.Progress, time: int) -> None:
    hits = (p.need & self.table.resident[p.layer]).bit_count()
    self.log.append(
      events.Routed(
        time,
        p.request.number,
        len(p.generated),
        p.layer,
        p.choices,
        hits,
        p.position,
      )
    )

  def _await(self, p: request_lib.Progress) -> None:
    p.in_flight = False
    bisect.insort(self.view.waiting, p, key=operator.attrgetter('row'))

  def _take_token(
    self, p: request_lib.Progress, token: int, time: int
  ) -> str | None:
    """Records a token; a reason where it is the request's last."""
    index = len(p.generated)
    p.generated.append(token)
    self.log.append(events.Token(time, p.request.number, index, token))
    self._tokens += 1
    self._loads.uses.advance(self._tokens / len(self._rows))
    reason = self._stop(p, token) if self._stop else None
    if reason is not None:
      return reason
    if token in p.request.eos_ids:
      return 'eos'
    return 'length' if index + 1 >= p.request.new_tokens else None

  def _finish(self, p: request_lib.Progress, reason: str, time: int) -> None:
    what, _, detail = reason.partition(': ')
    self.log.append(events.Finished(time, p.request.number, what, detail))
    self._rows[p.row] = None
    self._loads.uses.leave(p.row)
    self._loads.guesses.leave(p.row)

  def _set_floor(self) -> None:
    positions = [p.position for p in self._rows if p is not None]
    self.view.floor = min(positions, default=0)
