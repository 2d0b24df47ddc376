"""Launches that are on the device: begun, written down, and ended here."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bevy_jax import events, protocols
from bevy_jax import hops as hops_lib
from bevy_jax import request as request_lib
from bevy_jax.offload import slot_table


class Flight(NamedTuple):
  """A launch that has not ended.

  Attributes:
    kind: see `Batch`.
    layer: see `Batch`.
    group: whom it carries.
    experts: bitmap of those that it applies.
    finish: see `Batch`.
    hops: layers that it may cross.
    held: (layer, bitmap) of all that it may read.
  """

  kind: str
  layer: int
  group: list[request_lib.Progress]
  experts: int
  finish: bool
  hops: int
  held: list[tuple[int, int]]


class Flights:
  """The engine's hand on the device; it alone begins launches.

  Attributes:
    host: host time so far, which every launch writes down.
    clock: what it is measured by.
  """

  def __init__(
    self,
    executor: protocols.Executor,
    table: slot_table.SlotTable,
    view: protocols.View,
    log: Callable[[events.Event], None],
  ):
    self.host, self.clock = events.HostTime(), executor.now
    self._executor, self._table, self._view = executor, table, view
    self._log, self._most = log, executor.hops
    self._flying: dict[int, Flight] = {}
    self._count = 0

  def decode(self, launch: protocols.Launch) -> None:
    """Begins what a scheduler has decided; its requests wait no longer.

    All that is resident at the layers that it may cross is held until it
    ends: which of that it reads is decided on the device.
    """
    table, layer, experts = self._table, launch.layer, launch.experts
    layers, hops = len(table.resident), 1
    if launch.hops > 1 and launch.finish:
      hops = hops_lib.cut(launch.hops, layer, layers, self._most)
    batch = protocols.Batch(
      'decode',
      layer,
      experts,
      [p.row for p in launch.group],
      table.snapshot(layer, experts, hops),
      launch.together,
      finish=launch.finish,
    )
    later = [(layer + hop) % layers for hop in range(1, hops)]
    self.begin(batch, launch.group, later)
    for p in launch.group:
      p.in_flight = True
      self._view.waiting.remove(p)

  def begin(
    self,
    batch: protocols.Batch,
    group: Sequence[request_lib.Progress],
    later: Sequence[int] = (),
  ) -> None:
    """Begins a launch that carries a group; it may cross `later` layers."""
    number, self._count = self._count, self._count + 1
    now, host = self.clock(), tuple(self.host)
    # The device first, the books afterwards: it may be idle until then.
    self._executor.launch(number, batch)
    table, layer, experts = self._table, batch.layer, batch.experts
    held = [(i, table.resident[i]) for i in later]
    if experts:
      table.read(layer, experts)
      held.append((layer, experts))
    for i, bitmap in held:
      table.hold(i, bitmap)
    hops = 1 + len(later)
    self._flying[number] = Flight(
      batch.kind, layer, list(group), experts, batch.finish, hops, held
    )
    self._view.in_flight += 1
    if batch.kind == 'decode':
      self._view.flying += group
      last = batch.finish and layer + hops >= len(table.resident)
      self._view.pace.launch_begun(number, experts.bit_count(), last)
    self._log(
      events.LaunchBegun(
        now,
        number,
        batch.kind,
        layer,
        tuple([p.request.number for p in group]),
        tuple(slot_table.bits(experts, layer * table.experts)),
        batch.finish,
        hops,
        host,
      )
    )

  def end(self, ended: protocols.Ended) -> Flight:
    """A launch has ended: it holds nothing any more."""
    flight = self._flying.pop(ended.launch)
    self._view.in_flight -= 1
    if flight.kind == 'decode':
      del self._view.flying[: len(flight.group)]
    self._log(events.LaunchEnded(ended.time, ended.launch, ended.began))
    for layer, experts in flight.held:
      self._table.release(layer, experts)
    return flight

  def read(self, layer: int, experts: int) -> list[int]:
    """Notes what a launch has read behind its first layer; gives the keys."""
    self._table.read(layer, experts)
    return slot_table.bits(experts, layer * self._table.experts)
