"""Standing guesses: judged, kept, put in order."""

import numpy as np
from absl.testing import absltest

from bevy_jax import events, guesses
from bevy_jax import request as request_lib
from bevy_jax.offload import prefetch, slot_table


class _Told:
  """Guesses what the test says, two layers ahead."""

  depth, confidence, guarded = 2, 0.3, True
  keeps, gates, start = '', 0, None

  def __init__(self):
    self.says = {}

  def guess(self, patterns, layer, streams):
    del patterns
    rows = [self.says.get((layer, row), ([(), ()])) for row in streams]
    ids, chance = np.full((2, len(rows), 2), -1), np.zeros((2, len(rows), 2))
    for n, ahead in enumerate(rows):
      for a, some in enumerate(ahead):
        for i, (expert, likely) in enumerate(some):
          ids[a, n, i], chance[a, n, i] = expert, likely
    return prefetch.Guess(ids, chance)


def _at(row: int, *experts: int) -> guesses.Came:
  request = request_lib.Request(number=10 + row, prompt=(0,), new_tokens=1)
  need = sum(1 << e for e in experts)
  return guesses.Came(request, row, experts, need)


class GuessesTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.told, self.log = _Told(), []
    self.table = slot_table.SlotTable(3, 4, 6)
    self.guesses = guesses.Guesses(self.told, self.table, 2, 2, self.log.append)

  def _load(self, key: int, prefetched: bool = False) -> None:
    self.table.begin_load(key)
    if prefetched:
      self.guesses.loaded(key)
    self.table.finish_load(key)

  def test_nearest_first_then_likeliest_of_any_row(self):
    self.told.says = {
      (0, 0): [[(0, 0.4), (1, 0.9)], [(2, 0.95), (3, 0.1)]],
      (0, 1): [[(0, 0.5), (3, 0.6)], []],
    }
    self.guesses.reveal(0, 0, [_at(0, 0, 1), _at(1, 2, 3)])
    self._load(4 + 3)
    found = self.guesses.missing()
    # 1 - .6 * .5 = .7 for expert 0; expert 3 of the third layer is too
    # unlikely, expert 3 of the second is there.
    self.assertEqual([key for key, _ in found], [5, 4, 10])
    np.testing.assert_allclose([c for _, c in found], [0.9, 0.7, 0.95])
    self.table.begin_load(5)
    self.assertEqual([key for key, _ in self.guesses.missing()], [4, 10])
    self.assertEqual(self.guesses.rows, 2)
    self.guesses.leave(1)
    self.assertEqual(self.guesses.rows, 1)
    self.assertEqual([key for key, _ in self.guesses.missing()], [4, 10])

  def test_judged_when_the_row_comes(self):
    self.told.says = {(0, 0): [[(0, 0.4), (1, 0.9)], [(2, 0.9)]]}
    self.guesses.reveal(0, 0, [_at(0, 0, 1)])
    self.assertEqual(self.log, [])  # Nothing had been guessed of it.
    self._load(4, prefetched=True)
    self._load(4 + 2)
    self.guesses.reveal(7, 1, [_at(0, 0, 2)])
    # 0 and 1 were guessed; 0 and 2 are used. 2 is there, 0 only since it was
    # prefetched: away are both guesses, useful is 0, missing is 0.
    self.assertEqual(self.log, [events.Judged(7, 10, 1, 2, 1, 2, 1, 1)])
    self.guesses.reveal(8, 2, [_at(0, 2, 3)])
    self.assertEqual(self.log[1], events.Judged(8, 10, 2, 1, 1, 1, 1, 2))

  def test_kept_while_it_is_expected(self):
    self.told.says = {
      (0, 0): [[(0, 1.0), (1, 1.0)], []],
      (0, 1): [[(0, 1)], []],
    }
    self.guesses.reveal(0, 0, [_at(0, 0, 1), _at(1, 0, 1)])
    self._load(4, prefetched=True)
    self._load(5)
    self.assertEqual(self.guesses.kept(), [(1, 0b1), (1, 0b1)])
    self.guesses.reveal(0, 1, [_at(0, 2, 3)])  # It was wrong.
    self.assertEqual(self.guesses.kept(), [(1, 0b1)])
    self.guesses.leave(1)
    self.assertEqual(self.guesses.kept(), [])
    self.assertEqual(self.guesses.fresh, [0, 1, 0])
    self.table.evict(4)
    self.guesses.evicted(4)
    self.assertEqual(self.guesses.fresh, [0, 0, 0])

  def test_none(self):
    off = guesses.Guesses(prefetch.Nothing(), self.table, 2, 2, self.log.append)
    off.reveal(0, 0, [_at(0, 0, 1)])
    off.leave(0)
    self.assertFalse(off.on)
    self.assertEqual((off.missing(), off.kept(), self.log), ([], [], []))


if __name__ == '__main__':
  absltest.main()
