"""Which missing expert is loaded next, and which one makes room for it."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from bevy_jax import events, protocols
from bevy_jax.offload import slot_table
from bevy_jax.offload import uses as uses_lib


class Loads:
  """The engine's hand on the link; it alone issues and lands loads.

  Attributes:
    in_flight: loads that have neither landed nor failed.
    uses: what the eviction knows.
  """

  def __init__(
    self,
    table: slot_table.SlotTable,
    executor: protocols.Executor,
    eviction: protocols.Eviction,
    depth: int,
    rows: int,
    log: Callable[[events.Event], None],
  ):
    self._table, self._executor, self._log = table, executor, log
    self._eviction, self._depth = eviction, depth
    self.uses = uses_lib.Uses(
      len(table.resident), table.experts, rows, eviction.estimates
    )
    self.in_flight = 0
    self._robbed: set[int] = set()

  @property
  def full(self) -> bool:
    """Whether the link has as many loads as it may."""
    return self.in_flight >= self._depth

  def landed(self, event: protocols.Landed) -> None:
    """A load has landed: its expert is resident."""
    slot = self._table.finish_load(event.key)
    self.in_flight -= 1
    read = tuple(event.read)
    self._log(events.LoadLanded(event.time, event.key, slot, read))

  def failed(self, event: protocols.Failed) -> None:
    """A load has failed: its slot is free; its expert may be tried again."""
    slot = self._table.abort_load(event.key)
    self.in_flight -= 1
    self._log(events.LoadFailed(event.time, event.key, slot, event.reason))

  def issue(
    self, wants: Sequence[protocols.Want], limit: int, cause: str
  ) -> None:
    """Loads what the first `limit` wants miss, as far as link and room go.

    All wants protect what they await; the later ones lose it where nothing
    else is left, the last one first.
    """
    table = self._table
    barred: npt.NDArray[np.float64] | None = None
    for rank, (layer, experts) in enumerate(wants[:limit]):
      missing = experts & ~table.resident[layer] & ~table.loading[layer]
      for expert in slot_table.bits(missing):
        if self.full:
          return
        if not table.free:
          barred = table.barring(wants) if barred is None else barred
          if not self._make_room(wants, rank, barred):
            return
        self._begin(layer * table.experts + expert, cause)

  def _begin(self, key: int, cause: str) -> None:
    slot = self._table.begin_load(key)
    self.uses.load(key)
    if key in self._robbed:
      self._robbed.discard(key)
      cause = 'reload' if cause == 'demand' else cause
    self._log(events.LoadIssued(self._executor.now(), key, slot, cause))
    self._executor.load(key, slot)
    self.in_flight += 1

  def _make_room(
    self,
    wants: Sequence[protocols.Want],
    rank: int,
    barred: npt.NDArray[np.float64],
  ) -> bool:
    """Frees a slot for the want at `rank`; False where it must wait."""
    key = self._eviction.victim(barred, self.uses)
    if barred[key]:
      found = self._to_rob(wants, rank)
      if found is None:
        return False
      key = found
      self._robbed.add(key)
    barred[key] = np.inf
    slot, used = self._table.evict(key)
    self._log(events.Evicted(self._executor.now(), key, slot, used))
    return True

  def _to_rob(self, wants: Sequence[protocols.Want], rank: int) -> int | None:
    """A key that only wants behind `rank` await, from the last one."""
    for last in range(len(wants) - 1, rank, -1):
      layer, experts = wants[last]
      for want in wants[:last]:
        if want.layer == layer:
          experts &= ~want.experts
      experts &= self._table.evictable(layer)
      if experts:
        lowest = (experts & -experts).bit_length() - 1
        return layer * self._table.experts + lowest
    return None
