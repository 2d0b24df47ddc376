"""Which missing expert is loaded next, and which one makes room for it."""

from collections.abc import Callable, Sequence

from bevy_jax import events, protocols
from bevy_jax.offload import eviction as eviction_lib
from bevy_jax.offload import slot_table


class Loads:
  """The engine's hand on the link; it alone issues and lands loads.

  Attributes:
    in_flight: loads that have not landed.
    uses: what the eviction knows.
  """

  def __init__(
    self,
    table: slot_table.SlotTable,
    executor: protocols.Executor,
    eviction: protocols.Eviction,
    depth: int,
    log: Callable[[events.Event], None],
  ):
    self._table, self._executor, self._log = table, executor, log
    self._eviction, self._depth = eviction, depth
    self.uses = eviction_lib.Uses(len(table.slot_of))
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
    self._log(events.LoadLanded(event.time, event.key, slot))

  def issue(
    self, wants: Sequence[protocols.Want], limit: int, cause: str
  ) -> None:
    """Loads what the first `limit` wants miss, as far as link and room go.

    All wants protect what they await; the later ones lose it where nothing
    else is left, the last one first.
    """
    table = self._table
    cold: list[int] | None = None
    for rank, (layer, experts) in enumerate(wants[:limit]):
      missing = experts & ~table.resident[layer] & ~table.loading[layer]
      for expert in slot_table.bits(missing):
        if self.full:
          return
        if not table.free:
          cold = self._unwanted(wants) if cold is None else cold
          if not self._make_room(wants, rank, cold):
            return
        self._begin(layer * table.experts + expert, cause)

  def _begin(self, key: int, cause: str) -> None:
    slot = self._table.begin_load(key)
    if key in self._robbed:
      self._robbed.discard(key)
      cause = 'reload' if cause == 'demand' else cause
    self._log(events.LoadIssued(self._executor.now(), key, slot, cause))
    self._executor.load(key, slot)
    self.in_flight += 1

  def _make_room(
    self, wants: Sequence[protocols.Want], rank: int, cold: list[int]
  ) -> bool:
    """Frees a slot for the want at `rank`; False where it must wait."""
    if cold:
      key = self._eviction.victim(cold, self.uses)
      cold.remove(key)
    else:
      found = self._to_rob(wants, rank)
      if found is None:
        return False
      key = found
      self._robbed.add(key)
    slot, used = self._table.evict(key)
    self._log(events.Evicted(self._executor.now(), key, slot, used))
    return True

  def _unwanted(self, wants: Sequence[protocols.Want]) -> list[int]:
    """Keys that may be given up and that nobody awaits, ascending."""
    table = self._table
    kept = [0] * len(table.resident)
    for layer, experts in wants:
      kept[layer] |= experts
    free = [table.evictable(layer) & ~mask for layer, mask in enumerate(kept)]
    return table.select(free)

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
