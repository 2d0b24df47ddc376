"""Which missing expert is loaded next, and which one makes room for it."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from bevy_jax import events, protocols
from bevy_jax import guesses as guesses_lib
from bevy_jax import pace as pace_lib
from bevy_jax import request as request_lib
from bevy_jax.offload import prefetch, slot_table
from bevy_jax.offload import uses as uses_lib

# A prefetch begins only where fewer loads than this are in flight. Two keep
# the link busy between two looks of the engine; a demand then waits for the
# rest of two loads at most.
PREFETCHED = 2
_SURE = 0.75  # What is less likely begins on an idle link alone.


def check_room(slots: int, quota: Sequence[int], top_k: int) -> None:
  """ValueError where one token's experts of a layer would never all fit."""
  if min(quota, default=slots) < top_k:
    parts = f', {min(quota)} for some of {len(quota)} layers' if quota else ''
    raise ValueError(
      f'the cache has {slots} slots{parts}, but one token uses {top_k} experts '
      f'of a layer at once; give at least {top_k * max(1, len(quota))} slots.'
    )


class Loads:
  """The engine's hand on the link; it alone issues and lands loads.

  Attributes:
    in_flight: loads that have neither landed nor failed.
    uses: what the eviction knows.
    guesses: what the prefetcher expects.
  """

  def __init__(
    self,
    table: slot_table.SlotTable,
    executor: protocols.Executor,
    eviction: protocols.Eviction,
    depth: int,
    rows: int,
    log: Callable[[events.Event], None],
    prefetcher: protocols.Prefetcher = prefetch.PREFETCHERS['none'],
    top_k: int = 1,
    pace: pace_lib.Pace | None = None,
  ):
    self._table, self._executor, self._log = table, executor, log
    self._eviction, self._depth = eviction, depth
    self._top_k = top_k
    self.guesses = guesses_lib.Guesses(prefetcher, table, rows, top_k, log)
    self.uses = uses_lib.Uses(
      len(table.resident), table.experts, rows, eviction.estimates
    )
    self.in_flight = 0
    self._pace = pace or pace_lib.Pace()
    self._robbed: set[int] = set()

  @property
  def full(self) -> bool:
    """Whether the link has as many loads as it may, or as are of any use.

    What is chosen late is chosen well: no more are begun than keep the link
    busy.
    """
    if not self.in_flight:
      return False
    return self.in_flight >= min(self._depth, self._pace.depth)

  def landed(self, event: protocols.Landed) -> None:
    """A load has landed: its expert is resident."""
    slot = self._table.finish_load(event.key)
    self.in_flight -= 1
    read = tuple(event.read) if event.read else ()
    self._pace.load_ended(event.time, event.key)
    self._log(events.LoadLanded(event.time, event.key, slot, read, event.began))

  def failed(self, event: protocols.Failed) -> None:
    """A load has failed: its slot is free; its expert may be tried again."""
    slot = self._table.abort_load(event.key)
    self.in_flight -= 1
    self.guesses.failed(event.key)
    self._pace.load_ended(event.time, event.key)
    self._log(events.LoadFailed(event.time, event.key, slot, event.reason))

  def revealed(
    self,
    time: int,
    layer: int,
    group: Sequence[request_lib.Progress],
    needs: Sequence[int],
    hop: protocols.Hop,
  ) -> None:
    """A router has said what requests use; see `Guesses.reveal`.

    Args:
      time: ns, when it was seen.
      layer: where.
      group: who came there.
      needs: what each of them uses, as bitmaps.
      hop: the same as the router said it, of the same requests.
    """
    if not group:
      return
    choices = hop.choices
    if self.guesses.on:
      came = [
        guesses_lib.Came(p.request, p.row, ids, need)
        for p, ids, need in zip(group, choices, needs, strict=True)
      ]
      self.guesses.reveal(time, layer, came, hop.guesses)
    if self.uses.estimate is not None:
      self.uses.reveal(layer, [p.row for p in group], choices)
    self.uses.touch_all(layer, [*itertools.chain.from_iterable(choices)])

  def due(self, waiting: Sequence[request_lib.Progress]) -> bool:
    """Whether there may be something to load for these, or to prefetch."""
    if self.guesses.on and self.in_flight < min(PREFETCHED, self._depth):
      return True
    here, coming = self._table.resident, self._table.loading
    return any([p.need & ~(here[p.layer] | coming[p.layer]) for p in waiting])

  def issue(
    self, wants: Sequence[protocols.Want], limit: int, cause: str
  ) -> None:
    """Loads what the first `limit` wants miss, as far as link and room go.

    All wants protect what they await; the later ones lose it where nothing
    else is left, the last one first. What a prefetch loaded and a standing
    guess expects goes after what nobody wants, before what a want awaits.
    """
    table = self._table
    spared: Sequence[tuple[int, int]] | None = None
    for rank, (layer, experts) in enumerate(wants[:limit]):
      missing = experts & ~table.resident[layer] & ~table.loading[layer]
      for expert in slot_table.bits(missing):
        if self.full:
          return
        if not table.room(layer):
          if spared is None:
            kept = self.guesses.kept() if self.guesses.on else ()
            spared = [*wants, *kept] if kept else wants
            table.barring(spared)
          if not self._make_room(wants, rank, spared):
            if not table.quota:
              return  # Who comes later may take no more than this one.
            break  # Another layer's slots are another matter.
        self._begin(layer * table.experts + expert, cause)

  def prefetch(
    self,
    wants: Sequence[protocols.Want],
    most: int = PREFETCHED,
    free: bool = False,
  ) -> None:
    """Loads what is guessed where the link has no other work.

    Only where none of the wants misses anything that is not on its way, and
    with fewer than `most` loads in flight. Never gives up what the
    wants await, nor an earlier prefetch that is still expected; guarded, it
    gives up nothing that is expected and only what is less likely to be used
    in a pass than the guess is to be right.

    Args:
      wants: everything that anybody awaits.
      most: see `PREFETCHED`.
      free: whether loads are there at once, so that none delays another.
    """
    table, guesses = self._table, self.guesses
    for layer, experts in wants:
      if experts & ~table.resident[layer] & ~table.loading[layer]:
        return
    if self.in_flight >= min(most, self._depth):
      return
    barred: npt.NDArray[np.float64] | None = None
    coldest: dict[int, int] = {}  # One victim serves until it is taken.
    for key, chance in guesses.missing():
      bound = most if free or chance >= _SURE else 1
      if self.in_flight >= min(bound, self._depth):
        return
      if not free and not self._pays(chance):
        continue
      layer = key // table.experts
      if not table.room(layer):
        if barred is None:
          spared = guesses.expected() if guesses.guarded else guesses.kept()
          barred = table.barring([*wants, *spared])
        part = layer if table.quota else 0
        if part not in coldest:
          within = table.within(layer, barred)
          found = self._eviction.victim(within, self.uses)
          coldest[part] = -1 if within[found] else found
        victim = coldest[part]
        if victim < 0:
          continue
        if guesses.guarded and self._warmth(victim) >= chance:
          continue
        del coldest[part]
        self._evict(victim)
      self._begin(key, 'prefetch')

  def _pays(self, chance: float) -> bool:
    """Whether a prefetch saves more than it delays others, as is expected.

    A launch's answer comes while it is on the link: right, it saves what is
    done of it by then; wrong, the answer's own loads wait for the rest.
    """
    pace = self._pace
    done = min(pace.load, pace.device)
    delay = (pace.load - done) * min(1.0, pace.loads)
    return chance * done >= (1 - chance) * delay

  def _warmth(self, key: int) -> float:
    """How likely any row uses a key in its next pass, by its past."""
    return self.uses.chance(key, self._top_k, self.guesses.rows)

  def _begin(self, key: int, cause: str) -> None:
    slot = self._table.begin_load(key)
    if cause == 'prefetch':
      self.guesses.loaded(key)
    self.uses.load(key)
    if key in self._robbed:
      self._robbed.discard(key)
      cause = 'reload' if cause == 'demand' else cause
    self._log(events.LoadIssued(self._executor.now(), key, slot, cause))
    self._pace.load_issued(key)
    self._executor.load(key, slot)
    self.in_flight += 1

  def _make_room(
    self,
    wants: Sequence[protocols.Want],
    rank: int,
    spared: Sequence[tuple[int, int]],
  ) -> bool:
    """Frees a slot for the want at `rank`; False where it must wait.

    `spared` is what goes last of all but the wants, and the wants; the table
    bars it.
    """
    table, layer = self._table, wants[rank].layer
    within = table.within(layer, table.barred)
    key = self._eviction.victim(within, self.uses)
    barred = within[key] > 0
    if barred and self.guesses.kept():
      within = table.within(layer, table.barring(wants))
      key = self._eviction.victim(within, self.uses)
      barred = within[key] > 0
      table.barring(spared)
    if barred:
      found = self._to_rob(wants, rank)
      if found is None:
        return False
      key = found
      self._robbed.add(key)
    self._evict(key)
    return True

  def _evict(self, key: int) -> None:
    slot, used = self._table.evict(key)
    if self.guesses.on:
      self.guesses.evicted(key)
    self._log(events.Evicted(self._executor.now(), key, slot, used))

  def _to_rob(self, wants: Sequence[protocols.Want], rank: int) -> int | None:
    """A key that only wants behind `rank` await, from the last one."""
    for last in range(len(wants) - 1, rank, -1):
      layer, experts = wants[last]
      if self._table.quota and layer != wants[rank].layer:
        continue
      for want in wants[:last]:
        if want.layer == layer:
          experts &= ~want.experts
      experts &= self._table.evictable(layer)
      if experts:
        lowest = (experts & -experts).bit_length() - 1
        return layer * self._table.experts + lowest
    return None
