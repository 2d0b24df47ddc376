"""Launches that are on the device: begun, written down, and ended here."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bevy_jax import events, protocols
from bevy_jax import request as request_lib
from bevy_jax.offload import slot_table


class Flight(NamedTuple):
  """A launch that has not ended.

  Attributes:
    kind: see `Batch`.
    layer: see `Batch`.
    group: whom it carries.
    experts: bitmap of those that it holds.
    finish: see `Batch`.
  """

  kind: str
  layer: int
  group: list[request_lib.Progress]
  experts: int
  finish: bool


class Flights:
  """The engine's hand on the device; it alone begins launches.

  Attributes:
    host: host time so far, which every launch writes down.
  """

  def __init__(
    self,
    executor: protocols.Executor,
    table: slot_table.SlotTable,
    view: protocols.View,
    log: Callable[[events.Event], None],
  ):
    self.host = events.HostTime()
    self._executor, self._table, self._view = executor, table, view
    self._log = log
    self._flying: dict[int, Flight] = {}
    self._count = 0

  def decode(self, launch: protocols.Launch) -> None:
    """Begins what a scheduler has decided; its requests wait no longer."""
    if launch.hops != 1:
      raise ValueError(
        f'the scheduler asks for {launch.hops} hops, but this executor '
        'crosses one layer a launch; launch with hops=1.'
      )
    table, experts = self._table, launch.experts
    base = launch.layer * table.experts
    distinct = table.hold(launch.layer, experts)
    slots = [
      [table.slot_of[base + e] if experts >> e & 1 else -1 for e in p.choices]
      for p in launch.group
    ]
    for p in launch.group:
      p.in_flight = True
      self._view.waiting.remove(p)
    batch = protocols.Batch(
      'decode',
      launch.layer,
      [p.row for p in launch.group],
      slots,
      distinct,
      launch.finish,
    )
    self.begin(batch, launch.group, experts)

  def begin(
    self,
    batch: protocols.Batch,
    group: Sequence[request_lib.Progress],
    experts: int,
  ) -> None:
    """Begins a launch that carries a group and holds some experts."""
    number, self._count = self._count, self._count + 1
    base = batch.layer * self._table.experts
    self._flying[number] = Flight(
      batch.kind, batch.layer, list(group), experts, batch.finish
    )
    self._view.in_flight += 1
    self._log(
      events.LaunchBegun(
        self._executor.now(),
        number,
        batch.kind,
        batch.layer,
        tuple(p.request.number for p in group),
        tuple(base + e for e in slot_table.bits(experts)),
        batch.finish,
        1,
        tuple(self.host),
      )
    )
    self._executor.launch(number, batch)

  def end(self, ended: protocols.Ended) -> Flight:
    """A launch has ended: it holds nothing any more."""
    flight = self._flying.pop(ended.launch)
    self._view.in_flight -= 1
    self._log(events.LaunchEnded(ended.time, ended.launch, ended.began))
    if flight.experts:
      self._table.release(flight.layer, flight.experts)
    return flight
