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


if __name__ == '__main__':
  absltest.main()
