"""One owner of residency: states, holds, and the sum over everything."""

import random

import numpy as np
from absl.testing import absltest

from bevy_jax.offload import slot_table


class BitsTest(absltest.TestCase):
  def test_ascending(self):
    self.assertEqual(list(slot_table.bits(0b101001)), [0, 3, 5])
    self.assertEqual(list(slot_table.bits(0)), [])
    self.assertEqual(list(slot_table.bits(1 << 200)), [200])


class SlotTableTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.table = slot_table.SlotTable(layers=2, experts=4, slots=3)

  def _load(self, key: int) -> int:
    slot = self.table.begin_load(key)
    self.assertEqual(self.table.finish_load(key), slot)
    return slot

  def test_a_load_is_seen_only_once_it_has_landed(self):
    slot = self.table.begin_load(6)
    self.assertEqual(self.table.slot_of[6], slot)
    self.assertEqual(self.table.key_of[slot], 6)
    self.assertEqual(
      (self.table.resident, self.table.loading), ([0, 0], [0, 4])
    )
    self.assertFalse(self.table.can_evict(6))
    self.table.finish_load(6)
    self.assertEqual(
      (self.table.resident, self.table.loading), ([0, 4], [0, 0])
    )
    self.assertTrue(self.table.can_evict(6))
    self.assertEqual(self.table.free, 2)
    self.table.check_integrity()

  def test_slots_are_unique_and_no_more_than_there_are(self):
    slots = [self._load(key) for key in (0, 5, 7)]
    self.assertCountEqual(slots, [0, 1, 2])
    with self.assertRaisesRegex(AssertionError, 'may fill no more slots'):
      self.table.begin_load(1)

  def test_evict_says_whether_anybody_read_it(self):
    slots = [self._load(key) for key in (0, 1)]
    self.table.hold(0, 0b11)
    self.table.read(0, 0b10)
    self.table.release(0, 0b11)
    self.assertEqual(self.table.evict(0), (slots[0], False))
    self.assertEqual(self.table.evict(1), (slots[1], True))
    # The next owner of the slot starts unread.
    again = self._load(5)
    self.assertEqual(self.table.evict(5), (again, False))

  def test_what_is_read_may_not_be_evicted(self):
    for key in (0, 1, 2):
      self._load(key)
    self.table.hold(0, 0b011)
    self.table.hold(0, 0b110)
    self.assertEqual(self.table.evictable(0), 0)
    self.table.release(0, 0b011)
    self.assertEqual(self.table.evictable(0), 0b001)
    with self.assertRaisesRegex(AssertionError, 'key 1 may not'):
      self.table.evict(1)
    self.table.release(0, 0b110)
    self.assertEqual(self.table.evictable(0), 0b111)

  def test_equal_holds_are_counted(self):
    self._load(0)
    self.table.hold(0, 1)
    self.table.hold(0, 1)
    self.table.release(0, 1)
    self.assertFalse(self.table.can_evict(0))
    self.table.release(0, 1)
    self.assertTrue(self.table.can_evict(0))

  def test_a_snapshot_has_what_is_resident_now(self):
    table = slot_table.SlotTable(layers=3, experts=3, slots=5)
    at = {}
    for key in (1, 2, 5, 8):
      at[key] = table.begin_load(key)
      if key != 5:
        table.finish_load(key)
    found = table.snapshot(2, 0b100, 1)
    np.testing.assert_array_equal(found, [[-1, -1, at[8]]])
    found = table.snapshot(0, 0b100, 3)
    wanted = [[-1, -1, at[2]], [-1, -1, -1], [-1, -1, at[8]]]
    np.testing.assert_array_equal(found, wanted)
    table.finish_load(5)
    np.testing.assert_array_equal(found, wanted)
    # Behind the last layer comes the first, with all that it has.
    found = table.snapshot(2, 0, 2)
    np.testing.assert_array_equal(found, [[-1] * 3, [-1, at[1], at[2]]])
    table.check_integrity()

  def test_a_launch_that_misses_an_expert_is_refused(self):
    self.table.begin_load(0)
    with self.assertRaisesRegex(AssertionError, 'misses an expert'):
      self.table.hold(0, 1)

  def test_an_expert_is_copied_once(self):
    self.table.begin_load(0)
    with self.assertRaisesRegex(AssertionError, 'already has a slot'):
      self.table.begin_load(0)

  def test_a_layer_fills_no_more_than_its_quota(self):
    table = slot_table.SlotTable(2, 4, 3, quota=(1, 2))
    self.assertEqual([table.room(0), table.room(1)], [1, 2])
    table.begin_load(0)
    table.begin_load(5)
    self.assertEqual([table.room(0), table.room(1)], [0, 1])
    with self.assertRaisesRegex(AssertionError, 'layer 0 may fill no more'):
      table.begin_load(1)
    table.finish_load(0)
    self.assertEqual([table.room(0), table.free], [0, 1])
    table.evict(0)
    self.assertEqual(table.room(0), 1)

  def test_within_bars_the_other_layers(self):
    table = slot_table.SlotTable(2, 4, 4, quota=(2, 2))
    for key in (0, 1, 5):
      table.begin_load(key)
      table.finish_load(key)
    for layer, free in ((0, [0, 1]), (1, [5]), (0, [0, 1])):
      barred = table.within(layer, table.barring([]))
      self.assertEqual(np.flatnonzero(barred == 0).tolist(), free)
    barred = table.within(0, table.barring([(0, 0b10)]))
    self.assertEqual(np.flatnonzero(barred == 0).tolist(), [0])
    shared = slot_table.SlotTable(2, 4, 4)
    same = shared.barring([])
    self.assertIs(shared.within(0, same), same)

  def test_random_walk_keeps_its_sums(self):
    for quota in ((), (2, 2, 2), (1, 4, 1)):
      with self.subTest(quota=quota):
        self._walk(slot_table.SlotTable(3, 5, 6, quota))

  def _walk(self, table: slot_table.SlotTable) -> None:
    rng = random.Random(0)
    loading: list[int] = []
    held: list[tuple[int, int]] = []
    for _ in range(3000):
      key = rng.randrange(15)
      layer, expert = divmod(key, 5)
      if table.slot_of[key] < 0 and table.room(layer):
        table.begin_load(key)
        loading.append(key)
      elif loading and rng.random() < 0.4:
        table.finish_load(loading.pop(0))
      elif table.can_evict(key):
        if rng.random() < 0.5:
          table.evict(key)
        else:
          table.hold(layer, 1 << expert)
          held.append((layer, 1 << expert))
      elif held:
        table.release(*held.pop(rng.randrange(len(held))))
      table.check_integrity()

  def test_barring_adds_what_is_awaited_and_changes_nothing(self):
    table = slot_table.SlotTable(layers=2, experts=5, slots=6)
    for key in (0, 1, 4, 6, 9):
      table.begin_load(key)
      table.finish_load(key)
    table.hold(1, 0b10)
    for wants, free in (
      ([], [0, 1, 4, 9]),
      ([(0, 0b10010), (1, 0b1)], [0, 9]),
      ([(0, 0b10000), (0, 0b00010)], [0, 9]),
      ([(1, 0b10000)], [0, 1, 4]),
      ([], [0, 1, 4, 9]),
    ):
      barred = table.barring(wants)
      self.assertEqual(np.flatnonzero(barred == 0).tolist(), free)
      table.check_integrity()

  def test_the_check_finds_what_does_not_agree(self):
    for name, index, value in (
      ('slot_of', 0, -1),
      ('slot_of', 1, 0),
      ('key_of', 2, 3),
      ('resident', 0, 0b11),
      ('loading', 0, 0b1),
      ('reading', 1, 0b1),
      ('barred', 0, 1.0),
      ('barred', 5, 0.0),
      ('resident_slots', (0, 0), 1),
      ('resident_slots', (0, 0), -1),
      ('resident_slots', (1, 0), 0),
    ):
      table = slot_table.SlotTable(layers=2, experts=4, slots=3)
      table.begin_load(0)
      table.finish_load(0)
      table.check_integrity()
      getattr(table, name)[index] = value
      with self.subTest(name), self.assertRaises(AssertionError):
        table.check_integrity()


if __name__ == '__main__':
  absltest.main()
