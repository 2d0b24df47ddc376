"""Answers of launches, taken apart."""

import numpy as np
from absl.testing import absltest

from bevy_jax import hop_table


class ReadTest(absltest.TestCase):
  def test_answers_hop_by_hop(self):
    """Top-1; the first hop guesses one layer, the others none."""
    table = np.array([
      [-1, 1, 4, 6, 9, 1, 3, -1, -1, -1],
      [-1, 0, 5, 7, -1, -1, -1, -1, -1, -1],
      [-1, 1, 6, 8, 8, 0, 2, -1, -1, -1],
    ])  # fmt: skip
    gates = 1, 0, 0
    told = hop_table.hop_by_hop(1, table, gates)
    first, second = hop_table.read(1, told, gates)
    self.assertEqual(first.tokens, [-1, -1, -1])
    self.assertEqual(first.sound, [True, False, True])
    self.assertEqual(first.choices, [(4,), (5,), (6,)])
    self.assertEqual(first.guesses, [[(6,)], [(7,)], [(8,)]])
    self.assertEqual((second.tokens, second.sound), ([9, 8], [True, False]))
    self.assertEqual((second.choices, second.places), ([(3,), (2,)], [0, 2]))
    self.assertEqual(second.guesses, [])


class PassedTest(absltest.TestCase):
  """Seen to fail: the last hop's experts counted too, any head's tokens."""

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    ids = np.array([[rng.permutation(9)[:3] for _ in 'ab'] for _ in range(5)])
    told = np.full((5, 2, 2), [-1, 1])
    told[2, :, 0] = 41, 43  # The hop behind the head.
    self.table = np.concatenate([told, ids], axis=2).astype(np.int32)

  def test_as_hop_by_hop(self):
    hops = hop_table.read(3, self.table.tolist(), (0,) * 5)
    passed = hop_table.passed(self.table, 9)
    self.assertEqual(passed.last, hops[-1]._replace(places=(), guesses=()))
    self.assertEqual(passed.tokens, hops[2].tokens)
    read = [set().union(*hop.choices) for hop in hops[:-1]]
    self.assertEqual(passed.read, sum(map(len, read)))

  def test_without_a_head(self):
    self.assertEqual(hop_table.passed(self.table[:2], 9).tokens, ())

  def test_one_who_stops_or_is_not_sound(self):
    for place, flag in ((4, -1), (2, 0)):
      table = self.table.copy()
      table[place, 1, 1] = flag
      self.assertIsNone(hop_table.passed(table, 9))


if __name__ == '__main__':
  absltest.main()
