"""Which expert lies in which slot, and who may not be disturbed."""

import array
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# Somebody who looks on.
Watcher = Callable[[int], None]
# Of each byte: its set bits.
_BITS = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]


def bits(bitmap: int, first: int = 0) -> list[int]:
  """The numbers of a bitmap's set bits, ascending, counted from `first`."""
  found: list[int] = []
  for byte in bitmap.to_bytes((bitmap.bit_length() + 7) // 8, 'little'):
    if byte:
      for bit in _BITS[byte]:
        found.append(first + bit)
    first += 8
  return found


def split(slots: int, layers: int) -> tuple[int, ...]:
  """Slots of each layer where every layer has its own, as even as may be."""
  each, more = divmod(slots, layers)
  return tuple(each + (layer < more) for layer in range(layers))


class SlotTable:
  """The one owner of residency; the engine alone calls what changes it.

  A key (layer * experts + expert) is absent, loading or resident. A slot is
  free, or belongs to one key that is loading or resident. Bitmaps have one
  integer a layer, bit e for expert e.

  Attributes:
    experts: experts of one layer.
    quota: slots that each layer may fill; empty where all share one pool.
    slot_of: slot of each key, -1 where it is absent.
    key_of: key of each slot, -1 where it is free.
    resident: experts that launches may read.
    loading: experts on their way into a slot.
    resident_slots: int32 `[layers, experts]`, slots of `resident`, else -1.
    reading: experts that launches in flight may read.
    barred: one float a key: 0 where it may give way, infinity elsewhere. Away
      is what is not resident, what a launch in flight may read, and what
      somebody awaits, as of the last `barring`.
    before_load: called with a key before it is given a slot; None for nobody.
    before_evict: likewise before it loses its slot.
  """

  def __init__(
    self, layers: int, experts: int, slots: int, quota: Sequence[int] = ()
  ):
    assert not quota or (len(quota), sum(quota)) == (layers, slots), quota
    self.experts, self.quota = experts, tuple(quota)
    self.slot_of = [-1] * (layers * experts)
    self.key_of = [-1] * slots
    self.resident = [0] * layers
    self.loading = [0] * layers
    # No NumPy where few values are had or set: its code is seldom in the
    # processor's cache when it is called now and then.
    self._slots = array.array('i', [-1]) * (layers * experts)
    self._none = array.array('i', [-1]) * experts
    self.resident_slots = np.frombuffer(self._slots, np.int32).reshape(
      layers, experts
    )
    self.reading = [0] * layers
    self.barred = np.full(layers * experts, np.inf)
    self._bars: Any = self.barred.data  # One value of it in half the time.
    self._awaited: dict[int, int] = {}  # By layer, at the last `barring`.
    self.before_load: Watcher | None = None
    self.before_evict: Watcher | None = None
    self._free = list(range(slots - 1, -1, -1))
    self._used = [0] * layers
    # The last `within`: infinity but for one layer's own.
    self._apart, self._own = self.barred.copy(), slice(0)
    self._holds: dict[int, list[int]] = {}

  @property
  def free(self) -> int:
    """How many slots belong to nobody."""
    return len(self._free)

  def room(self, layer: int) -> int:
    """How many of the free slots a layer may take."""
    if not self.quota:
      return len(self._free)
    held = self.resident[layer] | self.loading[layer]
    return self.quota[layer] - held.bit_count()

  def begin_load(self, key: int) -> int:
    """Gives a free slot to an absent key, now loading; returns the slot."""
    if self.before_load is not None:
      self.before_load(key)
    assert self.slot_of[key] < 0, f'key {key} already has a slot'
    layer, expert = divmod(key, self.experts)
    left = self.room(layer) > 0 if self.quota else self._free
    assert left, f'layer {layer} may fill no more slots'
    slot = self._free.pop()
    self.slot_of[key], self.key_of[slot] = slot, key
    self._used[layer] &= ~(1 << expert)
    self.loading[layer] |= 1 << expert
    return slot

  def finish_load(self, key: int) -> int:
    """A loading key becomes resident; returns its slot."""
    layer, expert = divmod(key, self.experts)
    assert self.loading[layer] >> expert & 1, f'key {key} is not loading'
    self.loading[layer] &= ~(1 << expert)
    self.resident[layer] |= 1 << expert
    if not self._awaited.get(layer, 0) >> expert & 1:
      self._bars[key] = 0.0
    slot = self.slot_of[key]
    self._slots[key] = slot
    return slot

  def abort_load(self, key: int) -> int:
    """A loading key is absent again, its slot free; returns the slot."""
    layer, expert = divmod(key, self.experts)
    assert self.loading[layer] >> expert & 1, f'key {key} is not loading'
    self.loading[layer] &= ~(1 << expert)
    slot = self.slot_of[key]
    self.slot_of[key], self.key_of[slot] = -1, -1
    self._free.append(slot)
    return slot

  def can_evict(self, key: int) -> bool:
    """Whether a key is resident and no launch in flight may read it."""
    layer, expert = divmod(key, self.experts)
    return bool((self.resident[layer] & ~self.reading[layer]) >> expert & 1)

  def evict(self, key: int) -> tuple[int, bool]:
    """Frees the slot of a key that `can_evict`; returns it and `used`."""
    if self.before_evict is not None:
      self.before_evict(key)
    assert self.can_evict(key), f'key {key} may not be given up'
    layer, expert = divmod(key, self.experts)
    self.resident[layer] &= ~(1 << expert)
    self._bars[key] = math.inf
    self._slots[key] = -1
    slot = self.slot_of[key]
    self.slot_of[key], self.key_of[slot] = -1, -1
    self._free.append(slot)
    return slot, bool(self._used[layer] >> expert & 1)

  def hold(self, layer: int, experts: int) -> None:
    """Keeps resident experts, which a launch may read, from giving way."""
    assert experts & ~self.resident[layer] == 0, 'a launch misses an expert'
    self._holds.setdefault(layer, []).append(experts)
    self.reading[layer] |= experts

  def release(self, layer: int, experts: int) -> None:
    """Undoes one `hold`."""
    held = self._holds[layer]
    held.remove(experts)
    reading = 0
    for mask in held:
      reading |= mask
    self.reading[layer] = reading
    if not held:
      del self._holds[layer]

  def read(self, layer: int, experts: int) -> None:
    """Notes that a launch reads experts; `evict` tells of it."""
    self._used[layer] |= experts

  def snapshot(
    self, layer: int, experts: int, hops: int
  ) -> npt.NDArray[np.int32]:
    """Slots as they are now: int32 `[hops, experts]`, -1 where not here.

    Of a first layer some experts alone, of the layers behind it all that are
    resident; behind the last layer comes the first one.
    """
    first, slots = layer * self.experts, self._slots
    found = self._none[:]
    for expert in bits(experts):
      found[expert] = slots[first + expert]
    if hops > 1:
      behind, end = first + self.experts, first + hops * self.experts
      found += slots[behind:end]
      if end > len(slots):
        found += slots[: end - max(behind, len(slots))]
    return np.frombuffer(found, np.int32).reshape(hops, self.experts)

  def evictable(self, layer: int) -> int:
    """Bitmap of a layer's experts that `can_evict`."""
    return self.resident[layer] & ~self.reading[layer]

  def barring(
    self, bitmaps: Sequence[tuple[int, int]]
  ) -> npt.NDArray[np.float64]:
    """`barred` for these (layer, bitmap) that somebody awaits.

    The array is kept from call to call, and only what has changed since the
    last one is changed in it: a fresh one costs 10 us. So it is good until
    the next call, and nobody else writes to it.
    """
    awaited = {layer: self.reading[layer] for layer in self._holds}
    for layer, bitmap in bitmaps:
      awaited[layer] = awaited.get(layer, 0) | bitmap
    before, self._awaited = self._awaited, awaited
    if awaited != before:
      for layer in before.keys() | awaited.keys():
        now = awaited.get(layer, 0)
        changed = (before.get(layer, 0) ^ now) & self.resident[layer]
        first = layer * self.experts
        for expert in bits(changed):
          self._bars[first + expert] = math.inf if now >> expert & 1 else 0.0
    return self.barred

  def within(
    self, layer: int, barred: npt.NDArray[np.float64]
  ) -> npt.NDArray[np.float64]:
    """`barred`, and what can make no room for this layer barred too.

    The array is good until the next call: a fresh one costs 6 us.
    """
    if not self.quota:
      return barred
    self._apart[self._own] = np.inf
    self._own = slice(layer * self.experts, (layer + 1) * self.experts)
    self._apart[self._own] = barred[self._own]
    return self._apart

  def check_integrity(self) -> None:
    """Adds everything up; AssertionError says what does not agree."""
    layers = len(self.resident)
    owned = [0] * layers
    free = set(self._free)
    assert len(free) == len(self._free), 'a slot is free twice'
    for slot, key in enumerate(self.key_of):
      assert (key < 0) == (slot in free), f'slot {slot} is lost'
      if key >= 0:
        assert self.slot_of[key] == slot, f'slot {slot}, key {key}'
        owned[key // self.experts] |= 1 << key % self.experts
    absent = self.slot_of.count(-1)
    slots = len(self.key_of) - len(free)
    assert len(self.slot_of) - absent == slots, 'a key has a slot of another'
    for layer, quota in enumerate(self.quota):
      filled = owned[layer].bit_count()
      assert filled <= quota, f'layer {layer} exceeds its {quota}'
    held = [0] * layers
    for layer, masks in self._holds.items():
      for mask in masks:
        held[layer] |= mask
    here = free_to_go = 0
    for layer, reading in enumerate(self.reading):
      resident, loading = self.resident[layer], self.loading[layer]
      two = resident & loading | (resident | loading) ^ owned[layer]
      assert not two, f'layer {layer}, experts {[*bits(two)]} in two states'
      assert held[layer] == reading, f'layer {layer}: holds, reading differ'
      assert reading & ~resident == 0, f'layer {layer}: read, gone'
      here |= resident << layer * self.experts
      kept = self._awaited.get(layer, 0)
      free_to_go |= (resident & ~kept) << layer * self.experts
    told, truly = self.resident_slots.ravel(), np.array(self.slot_of)
    wrong = _joined(self.barred == 0) ^ free_to_go
    wrong |= _joined(told >= 0) ^ here
    wrong |= _joined((told >= 0) & (told != truly))
    assert not wrong, f'keys {[*bits(wrong)]} are not told rightly'


def _joined(flags: npt.NDArray[np.bool_]) -> int:
  """One long bitmap: a walk over all keys costs ten times as much."""
  packed = np.packbits(flags, bitorder='little').tobytes()
  return int.from_bytes(packed, 'little')
