"""The one loop: poll, admit, load, launch, wait. No device, no clock."""

from collections import deque
from collections.abc import Sequence

from bevy_jax import answers as answers_lib
from bevy_jax import events, failures, protocols
from bevy_jax import flights as flights_lib
from bevy_jax import loads as loads_lib
from bevy_jax import prefill as prefill_lib
from bevy_jax import request as request_lib
from bevy_jax.layers import config as model_config
from bevy_jax.offload import prefetch, slot_table

StopRule = answers_lib.StopRule


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
    self._executor, self._scheduler = executor, scheduler
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
    self._answers = answers_lib.Answers(
      self._rows, self._flights, self.view, self._loads, self.log, stop
    )
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
    begun, settled = self._executor.now(), self._host.settle
    for event in (happened := self._executor.poll()):
      self.view.pace.now = event.time
      if isinstance(event, protocols.Ended):
        self._ended(event)
        continue
      # It may change what answers are told by: what is resident, who guesses.
      self._answers.settle()
      if isinstance(event, protocols.Landed):
        self._loads.landed(event)
      else:
        self._failed(event)
    if not happened and not self._stirred:
      # Decisions depend on the view alone, and nothing in it has changed.
      if self.busy:
        self._executor.wait()
      return
    self._admit()
    settled = self._host.settle - settled  # It has a section of its own.
    self._host.poll += self._executor.now() - begun - settled
    self._load()
    self._stirred = self._launch()
    self._answers.settle()

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
      self._loads.uses.touch_all(layer, list(uses))

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
    if prefill is None and not self._loads.due(self.view.waiting):
      return
    self._answers.settle()  # Victims and guesses depend on what it tells.
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
      self._answers.settle()
      self._ended_prefill(flight, ended)
    elif flight.finish:
      crossed, read = self._answers.moved(flight, ended)
    else:
      for p in flight.group:
        p.need &= ~flight.experts
      self._answers.back(flight.group)
    if flight.kind == 'decode' and flight.finish:
      reached = {(flight.layer + hops) % self._layers for hops in crossed}
      missing = sum(map(self.view.missing, reached))
      self.view.pace.launch_ended(
        ended.time, ended.launch, missing, ended.began, flight.hops, read
      )
    elif flight.kind == 'decode':
      self.view.pace.wave_ended(ended.time, ended.launch, ended.began)
    self._set_floor()

  def _finish(self, p: request_lib.Progress, reason: str, time: int) -> None:
    self._rows[p.row] = None
    self._answers.leave(p, reason, time)

  def _set_floor(self) -> None:
    positions = [p.position for p in self._rows if p is not None]
    self.view.floor = min(positions, default=0)
