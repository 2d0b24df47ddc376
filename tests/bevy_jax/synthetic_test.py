"""Routing that no model made."""

import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax import synthetic, trace


def _zipf(**changes):
  sizes = {
    'layers': 3, 'experts': 16, 'top_k': 4, 'requests': 20, 'tokens': 50
  }  # fmt: skip
  return synthetic.zipf(**(sizes | changes))


class ZipfTest(parameterized.TestCase):
  def test_it_is_a_trace_that_says_what_it_is(self):
    found = _zipf()
    trace.check(found)
    self.assertEqual(found.experts.shape, (20, 50, 3, 4))
    self.assertTrue(found.meta['synthetic'])
    self.assertIn('zipf', found.meta['source'])

  def test_a_seed_says_all(self):
    same = _zipf(seed=1).experts
    np.testing.assert_array_equal(same, _zipf(seed=1).experts)
    self.assertFalse((same == _zipf(seed=2).experts).all())

  def test_popularity_follows_the_exponent(self):
    flat = _zipf(exponent=0.0, reuse=0.0, tokens=400).popularity()
    steep = _zipf(exponent=1.0, reuse=0.0, tokens=400).popularity()
    self.assertLess(flat.max() / flat.min(), 1.15)
    self.assertGreater(steep.max() / steep.min(), 4)

  def test_reuse(self):
    for reuse in (0.0, 0.5):
      ids = _zipf(exponent=0.0, reuse=reuse, tokens=300).experts
      again = [
        len(set(a) & set(b)) / 4
        for a, b in zip(
          ids[:, 1:].reshape(-1, 4).tolist(),
          ids[:, :-1].reshape(-1, 4).tolist(),
          strict=True,
        )
      ]
      # What is not taken over is drawn from the others, by chance the same.
      self.assertAlmostEqual(
        np.mean(again), reuse + (1 - reuse) * 0.25, delta=0.08
      )

  @parameterized.parameters(
    ({'top_k': 17}, 'top_k at most'),
    ({'layers': 0}, '0 layers'),
    ({'reuse': 1.0}, 'reuse'),
    ({'exponent': float('nan')}, 'exponent is nan'),
  )
  def test_refuses(self, wrong, words):
    with self.assertRaisesRegex(ValueError, words):
      _zipf(**wrong)


class HashTest(absltest.TestCase):
  def test_choices(self):
    found = synthetic.Hash(12, 3, 5)
    drawn = [found.choices(w, 2 * p, 1) for w in range(20) for p in range(20)]
    for ids in drawn:
      self.assertLen(set(ids), 3)
    counts = np.bincount(np.ravel(drawn), minlength=12)
    # Expert 9 is the hottest of layer 1, expert 8 the coldest.
    self.assertEqual(counts.argmax(), 9)
    self.assertLess(counts[8], counts[9] / 3)
    self.assertEqual(found.choices(3, 4, 1), found.choices(3, 5, 1))
    self.assertEqual(found.prompt(3, 4, 1), found.choices(3, 4, 1))
    self.assertIn(found.token(1, 2), range(20))


if __name__ == '__main__':
  absltest.main()
