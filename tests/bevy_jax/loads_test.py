"""Which load is next and who makes room for it."""

from absl.testing import absltest

from bevy_jax import events, loads, protocols
from bevy_jax.offload import eviction, slot_table

_EXPERTS = 4  # of each of two layers


class _Executor:
  def __init__(self):
    self.loaded: list[tuple[int, int]] = []

  def now(self) -> int:
    return 7

  def load(self, key: int, slot: int) -> None:
    self.loaded.append((key, slot))


def _want(layer: int, *experts: int) -> protocols.Want:
  return protocols.Want(layer, sum(1 << e for e in experts))


class LoadsTest(absltest.TestCase):
  def _make(
    self, slots: int, depth: int = 8, quota: tuple[int, ...] = ()
  ) -> None:
    self.table = slot_table.SlotTable(2, _EXPERTS, slots, quota)
    self.executor, self.log = _Executor(), []
    self.loads = loads.Loads(
      self.table, self.executor, eviction.Lru(), depth, 1, self.log.append
    )

  def _land(self) -> None:
    for layer, mask in enumerate(self.table.loading):
      for expert in list(slot_table.bits(mask)):
        self.loads.landed(protocols.Landed(8, layer * _EXPERTS + expert))

  def _fill(self, *keys: int) -> None:
    for key in keys:
      self.loads.issue([_want(key // _EXPERTS, key % _EXPERTS)], 1, 'demand')
      self._land()
      self.loads.uses.touch(key)
    self.log.clear()
    self.executor.loaded.clear()

  def _story(self) -> list[tuple[str, int]]:
    kinds = {events.LoadIssued: 'load', events.Evicted: 'evict'}
    return [(kinds[type(e)], e.key) for e in self.log if type(e) in kinds]

  def test_in_order_of_wants_ascending_ids_as_far_as_the_link_goes(self):
    self._make(slots=8, depth=3)
    self.loads.issue([_want(1, 3, 0), _want(0, 2, 1)], 2, 'demand')
    self.assertEqual(self._story(), [('load', 4), ('load', 7), ('load', 1)])
    self.assertTrue(self.loads.full)
    self._land()
    self.assertEqual(self.loads.in_flight, 0)
    self.assertFalse(self.loads.full)

  def test_what_is_on_its_way_is_not_loaded_twice(self):
    self._make(slots=8)
    self.loads.issue([_want(0, 1)], 1, 'prefill')
    self.loads.issue([_want(0, 1, 2), _want(0, 1)], 2, 'demand')
    self.assertEqual(self._story(), [('load', 1), ('load', 2)])

  def test_the_unwanted_give_way_by_the_policy(self):
    self._make(slots=3)
    self._fill(2, 0, 5)
    self.loads.issue([_want(0, 1), _want(0, 2)], 2, 'demand')
    self.assertEqual(self._story(), [('evict', 0), ('load', 1)])

  def test_a_later_want_is_robbed_where_all_is_wanted(self):
    self._make(slots=3)
    self._fill(0, 5, 6)
    wants = [_want(0, 0, 1), _want(1, 1), _want(1, 1, 2)]
    self.loads.issue(wants, 3, 'demand')
    # Not key 5: an earlier want awaits it as well.
    self.assertEqual(self._story(), [('evict', 6), ('load', 1)])
    self._land()
    self.log.clear()
    self.loads.issue([_want(1, 2)], 1, 'demand')
    causes = [e.cause for e in self.log if isinstance(e, events.LoadIssued)]
    self.assertEqual(causes, ['reload'])

  def test_earlier_wants_and_the_want_itself_are_never_robbed(self):
    self._make(slots=2)
    self._fill(0, 1)
    self.loads.issue([_want(0, 0, 1), _want(0, 1, 2)], 2, 'demand')
    self.assertEqual(self._story(), [])
    self.loads.issue([_want(0, 0, 1, 2)], 1, 'demand')
    self.assertEqual(self._story(), [])

  def test_what_a_launch_reads_is_kept(self):
    self._make(slots=2)
    self._fill(0, 5)
    self.table.hold(0, 0b1)
    self.loads.issue([_want(0, 2)], 1, 'demand')
    self.assertEqual(self._story(), [('evict', 5), ('load', 2)])
    self.loads.issue([_want(0, 3)], 1, 'demand')
    self.assertLen(self.log, 2)  # 0 is read and 2 is on its way: wait.

  def test_a_quota_takes_room_from_its_own_layer_alone(self):
    self._make(slots=4, quota=(2, 2))
    self._fill(5, 0, 1)
    # Free slots are left, but they are the other layer's; 0 is older than 1.
    self.loads.issue([_want(0, 2)], 1, 'demand')
    self.assertEqual(self._story(), [('evict', 0), ('load', 2)])
    self.loads.issue([_want(1, 2)], 1, 'demand')
    self.assertEqual(self._story()[2:], [('load', 6)])

  def test_a_quota_robs_its_own_layer_alone(self):
    self._make(slots=4, quota=(2, 2))
    self._fill(0, 1, 5, 6)
    wants = [_want(0, 0, 2), _want(0, 1), _want(1, 1, 2)]
    self.loads.issue(wants, 3, 'demand')
    self.assertEqual(self._story(), [('evict', 1), ('load', 2)])

  def test_a_layer_that_must_wait_holds_up_no_other(self):
    self._make(slots=4, quota=(2, 2))
    self._fill(0, 1, 5)
    self.table.hold(0, 0b11)
    self.loads.issue([_want(0, 2), _want(1, 2)], 2, 'demand')
    self.assertEqual(self._story(), [('load', 6)])

  def test_wants_behind_the_limit_protect_and_load_nothing(self):
    self._make(slots=3)
    self._fill(0, 5, 6)
    self.loads.issue([_want(0, 1), _want(0, 0), _want(1, 3)], 1, 'prefill')
    self.assertEqual(self._story(), [('evict', 5), ('load', 1)])


if __name__ == '__main__':
  absltest.main()
