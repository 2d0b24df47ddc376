"""Sizes of launches: what is compiled is what is launched."""

from absl.testing import absltest, parameterized

from bevy_jax import baselines, hops, runahead


class SizesTest(parameterized.TestCase):
  @parameterized.parameters(
    (1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (9, (1, 2, 4, 8, 9))
  )
  def test_powers_and_the_most(self, most: int, sizes: tuple[int, ...]):
    self.assertEqual(hops.sizes(most), sizes)

  @parameterized.parameters(
    ((1, 0, 24, 8), 1),
    ((3, 0, 24, 8), 2),
    ((8, 0, 24, 8), 8),
    ((8, 16, 24, 8), 8),  # The head comes last.
    ((8, 17, 24, 8), 4),  # No long launch goes on behind it,
    ((4, 23, 24, 8), 4),  # but a short one does.
    ((24, 0, 24, 24), 24),
    ((24, 1, 24, 24), 16),
    ((4, 1, 3, 8), 2),  # Nobody comes to a layer twice.
    ((0, 1, 3, 8), 1),
  )
  def test_cut(self, asked: tuple[int, int, int, int], wanted: int):
    self.assertEqual(hops.cut(*asked), wanted)

  def test_what_is_asked_for(self):
    self.assertEqual([hops.most(n, 6) for n in (1, 4, 8, 'pass')], [1, 4, 6, 6])
    for wrong in (0, -1, True, 1.5, 'all'):
      with self.assertRaisesRegex(ValueError, "or 8, 'pass'"):
        hops.check(wrong)

  def test_auto_is_many_through_the_kernels_alone(self):
    hops.check('auto')
    self.assertEqual(hops.resolve('auto', kernels=True), 8)
    self.assertEqual(hops.resolve('auto', kernels=False), 1)
    for asked in (1, 4, 'pass'):
      self.assertEqual(hops.resolve(asked, kernels=True), asked)

  def test_who_never_crosses_is_left_alone(self):
    self.assertEqual(hops.give(baselines.Solo(), 4, 6), baselines.Solo())
    found = hops.give(runahead.Runahead(depth=3), 'pass', 6)
    self.assertEqual(found, runahead.Runahead(depth=3, hops=6))


if __name__ == '__main__':
  absltest.main()
