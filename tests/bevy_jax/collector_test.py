"""How often the garbage collector looks while a run goes on.

Seen to fail: without the `finally`; without the look at what was set before.
"""

import gc

from absl.testing import absltest, parameterized

from bevy_jax import collector


class CollectorTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.addCleanup(gc.set_threshold, *gc.get_threshold())

  def test_it_looks_seldom_and_as_before_again(self):
    gc.set_threshold(700, 10, 10)
    with self.assertRaises(KeyError), collector.rare():
      self.assertGreater(gc.get_threshold(), (9_999, 9, 99))
      raise KeyError
    self.assertEqual(gc.get_threshold(), (700, 10, 10))

  @parameterized.parameters(0, 50_000)
  def test_who_has_set_it_off_or_rarer_is_left_alone(self, young):
    gc.set_threshold(young, 10, 10)
    with collector.rare():
      self.assertEqual(gc.get_threshold(), (young, 10, 10))
    self.assertEqual(gc.get_threshold(), (young, 10, 10))


if __name__ == '__main__':
  absltest.main()
