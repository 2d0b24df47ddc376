"""Which expert lies in which slot, and who may not be disturbed."""

from collections.abc import Iterator


def bits(bitmap: int) -> Iterator[int]:
  """The numbers of a bitmap's set bits, ascending."""
  while bitmap:
    low = bitmap & -bitmap
    yield low.bit_length() - 1
    bitmap ^= low


class SlotTable:
  """The one owner of residency; the engine alone calls what changes it.

  A key (layer * experts + expert) is absent, loading or resident. A slot is
  free, or belongs to one key that is loading or resident. Bitmaps have one
  integer a layer, bit e for expert e.

  Attributes:
    experts: experts of one layer.
    slot_of: slot of each key, -1 where it is absent.
    key_of: key of each slot, -1 where it is free.
    resident: experts that launches may read.
    loading: experts on their way into a slot.
    reading: experts that launches in flight may read.
  """

  def __init__(self, layers: int, experts: int, slots: int):
    self.experts = experts
    self.slot_of = [-1] * (layers * experts)
    self.key_of = [-1] * slots
    self.resident = [0] * layers
    self.loading = [0] * layers
    self.reading = [0] * layers
    keys = range(layers * experts)
    self._layer = [key // experts for key in keys]
    self._bit = [1 << key % experts for key in keys]
    self._free = list(range(slots - 1, -1, -1))
    self._used = [False] * slots
    self._holds: list[tuple[int, int]] = []

  @property
  def free(self) -> int:
    """How many slots belong to nobody."""
    return len(self._free)

  def begin_load(self, key: int) -> int:
    """Gives a free slot to an absent key, now loading; returns the slot."""
    assert self.slot_of[key] < 0, f'key {key} already has a slot'
    slot = self._free.pop()
    self.slot_of[key], self.key_of[slot] = slot, key
    self._used[slot] = False
    layer, expert = divmod(key, self.experts)
    self.loading[layer] |= 1 << expert
    return slot

  def finish_load(self, key: int) -> int:
    """A loading key becomes resident; returns its slot."""
    layer, expert = divmod(key, self.experts)
    assert self.loading[layer] >> expert & 1, f'key {key} is not loading'
    self.loading[layer] &= ~(1 << expert)
    self.resident[layer] |= 1 << expert
    return self.slot_of[key]

  def can_evict(self, key: int) -> bool:
    """Whether a key is resident and no launch in flight may read it."""
    layer, expert = divmod(key, self.experts)
    return bool((self.resident[layer] & ~self.reading[layer]) >> expert & 1)

  def evict(self, key: int) -> tuple[int, bool]:
    """Frees the slot of a key that `can_evict`; returns it and `used`."""
    assert self.can_evict(key), f'key {key} may not be given up'
    layer, expert = divmod(key, self.experts)
    self.resident[layer] &= ~(1 << expert)
    slot = self.slot_of[key]
    self.slot_of[key], self.key_of[slot] = -1, -1
    self._free.append(slot)
    return slot, self._used[slot]

  def hold(self, layer: int, experts: int) -> list[int]:
    """Marks resident experts as read by a launch; returns their slots."""
    assert experts & ~self.resident[layer] == 0, 'a launch misses an expert'
    self._holds.append((layer, experts))
    self.reading[layer] |= experts
    base = layer * self.experts
    slots = [self.slot_of[base + e] for e in bits(experts)]
    for slot in slots:
      self._used[slot] = True
    return slots

  def release(self, layer: int, experts: int) -> None:
    """Undoes one `hold`."""
    self._holds.remove((layer, experts))
    self.reading[layer] = 0
    for held, mask in self._holds:
      if held == layer:
        self.reading[layer] |= mask

  def evictable(self, layer: int) -> int:
    """Bitmap of a layer's experts that `can_evict`."""
    return self.resident[layer] & ~self.reading[layer]

  def select(self, bitmaps: list[int]) -> list[int]:
    """Keys with a slot whose bit is set in their layer's, ascending."""
    layer, bit = self._layer, self._bit
    return sorted(
      key for key in self.key_of if key >= 0 and bitmaps[layer[key]] & bit[key]
    )

  def check_integrity(self) -> None:
    """Adds everything up; AssertionError says what does not agree."""
    for slot, key in enumerate(self.key_of):
      assert key < 0 or self.slot_of[key] == slot, f'slot {slot}, key {key}'
      assert (key < 0) == (slot in self._free), f'slot {slot} is lost'
    for key, slot in enumerate(self.slot_of):
      layer, expert = divmod(key, self.experts)
      resident = self.resident[layer] >> expert & 1
      loading = self.loading[layer] >> expert & 1
      assert slot < 0 or self.key_of[slot] == key, f'key {key}, slot {slot}'
      assert resident + loading == (slot >= 0), f'key {key} is in two states'
    assert len(set(self._free)) == len(self._free), 'a slot is free twice'
    for layer, reading in enumerate(self.reading):
      held = 0
      for other, mask in self._holds:
        held |= mask if other == layer else 0
      assert held == reading, f'layer {layer}: holds and reading differ'
      assert reading & ~self.resident[layer] == 0, f'layer {layer}: read, gone'
