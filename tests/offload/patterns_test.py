"""Counts of two streams by hand."""

import numpy as np
from absl.testing import absltest

from bevy_jax.offload import patterns


def _make(keeps: str, **kwargs) -> patterns.Patterns:
  return patterns.Patterns(3, 4, 2, 2, keeps=keeps, **kwargs)


def _reveal(found, layer, streams, choices, given=()):
  found.reveal(layer, np.array(streams), np.array(choices), given)


class PatternsTest(absltest.TestCase):
  def test_pairs_are_counted_for_each_stream_and_around_the_end(self):
    found = _make('pairs')
    _reveal(found, 0, [0, 1], [[0, 1], [1, 2]])
    _reveal(found, 1, [0], [[3, 0]])
    pairs = found.counts.pairs
    np.testing.assert_array_equal(pairs[0][0], [1, 0, 0, 1])
    np.testing.assert_array_equal(pairs[0][1], [1, 0, 0, 1])
    self.assertEqual(pairs[0].sum(), 4)
    _reveal(found, 1, [1], [[3, 2]])
    np.testing.assert_array_equal(pairs[0][1], [1, 0, 1, 2])
    np.testing.assert_array_equal(found.counts.followed[0], [1, 2, 1, 0])
    _reveal(found, 2, [0], [[0, 1]])
    _reveal(found, 0, [0], [[2, 3]])
    np.testing.assert_array_equal(pairs[2][0], [0, 0, 1, 1])
    np.testing.assert_array_equal(found.counts.popular[0], [1, 2, 2, 1])
    np.testing.assert_array_equal(found.counts.passes, [3, 2, 1])

  def test_a_new_stream_follows_on_nobody(self):
    found = _make('pairs')
    for layer in range(3):
      _reveal(found, layer, [0], [[0, 1]])
    before = found.counts.pairs[2].copy()
    found.leave(0)
    _reveal(found, 0, [0], [[2, 3]])
    np.testing.assert_array_equal(found.counts.pairs[2], before)

  def test_counts_of_before_stay_what_they_are(self):
    start = patterns.nothing(3, 4)
    start.popular[1, 2] = 5
    found = _make('', start=start)
    _reveal(found, 1, [0], [[2, 3]])
    np.testing.assert_array_equal(found.counts.popular[1], [0, 0, 6, 1])
    np.testing.assert_array_equal(start.popular[1], [0, 0, 5, 0])

  def test_what_is_given_is_judged_by_rank_and_layers_ahead(self):
    found = _make('given', depth=2)
    _reveal(found, 0, [0, 1], [[0, 1], [0, 1]], [[[2, 3], [0, 1]]] * 2)
    np.testing.assert_array_equal(found.given[0, 1], [[2, 3], [2, 3]])
    np.testing.assert_array_equal(found.given[1, 2], [[0, 1], [0, 1]])
    _reveal(found, 1, [0, 1], [[2, 0], [2, 3]], [[[0, 2]]] * 2)
    np.testing.assert_array_equal(found.right[0, 1], [2, 1])
    np.testing.assert_array_equal(found.told[0, 1], [2, 2])
    np.testing.assert_array_equal(found.given[0, 1], [[-1, -1], [-1, -1]])
    _reveal(found, 2, [1], [[0, 3]])
    np.testing.assert_array_equal(found.right[:, 2], [[1, 0], [1, 0]])
    found.leave(0)
    self.assertEqual(found.given.max(), -1)

  def test_passes_that_ended_are_compared_from_the_first_layer_on(self):
    found = _make('passes')
    for layer, ids in enumerate(([0, 1], [1, 2], [2, 3])):
      _reveal(found, layer, [0], [ids])
    np.testing.assert_array_equal(found.passes[0], [[0, 1], [1, 2], [2, 3]])
    _reveal(found, 0, [1], [[1, 3]])
    self.assertEqual(found.likeness[1, 0], 1)
    _reveal(found, 1, [1], [[2, 1]])
    self.assertEqual(found.likeness[1, 0], 3)
    _reveal(found, 2, [1], [[2, 3]])
    # Nothing is like itself: its place is compared from the next pass on.
    np.testing.assert_array_equal(found.likeness[1, :3], [5, 0, 0])
    _reveal(found, 0, [1], [[1, 3]])
    np.testing.assert_array_equal(found.likeness[1, :3], [1, 2, 0])

  def test_the_oldest_pass_is_forgotten(self):
    found = _make('passes')
    for number in range(patterns.PASSES + 1):
      ids = [0, 1] if number else [2, 3]
      for layer in range(3):
        _reveal(found, layer, [0], [ids])
    np.testing.assert_array_equal(found.passes[0], [[0, 1]] * 3)
    _reveal(found, 0, [0], [[2, 3]])
    self.assertEqual(found.likeness[0].max(), 0)


if __name__ == '__main__':
  absltest.main()
