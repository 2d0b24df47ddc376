"""Measured launches and what lies between them, by hand."""

import dataclasses

from absl.testing import absltest, parameterized

from bevy_jax import costs

_TABLE = costs.Table(
  costs.Measured(*m)
  for m in (
    (8, 50, 1, 300.0),
    (8, 10, 1, 100.0),
    (2, 4, 1, 60.0),
    (2, 8, 1, 80.0),
    (4, 8, 1, 90.0),
    (8, 8, 4, 7.0),
  )
)


class TableTest(parameterized.TestCase):
  @parameterized.parameters(
    (8, 10, 100.0),  # as measured
    (8, 30, 200.0),  # between: 5 an expert
    (8, 60, 350.0),  # beyond the last two
    (8, 2, 60.0),  # below the first two
    (2, 5, 65.0),
    (4, 50, 90.0),  # the only one of its rows
    (3, 8, 85.0),  # between rows 2 and 4
    (6, 10, 95.0),
    (1, 8, 80.0),  # fewer rows than measured
    (99, 10, 100.0),  # more
  )
  def test_by_hand(self, rows, distinct, ns):
    self.assertAlmostEqual(_TABLE.ns(rows, distinct), ns)

  def test_hops_are_apart(self):
    self.assertEqual(_TABLE.ns(1, 1, hops=4), 7.0)
    with self.assertRaises(KeyError):
      _TABLE.ns(1, 1, hops=2)


class CostsTest(absltest.TestCase):
  def test_linear(self):
    c = costs.Costs(launch=2, shared=30, expert=400, row=5000, head=10**6)
    self.assertEqual(c.decode(3, 2, on=True, last=False), 15832)
    self.assertEqual(c.decode(3, 2, on=False, last=False), 15802)
    self.assertEqual(c.decode(3, 2, on=True, last=True), 1015832)
    c = costs.Costs(launch=2, shared=30, expert=400, prompt=5)
    self.assertEqual(c.prefill(7, 2, on=True), 867)
    self.assertEqual(c.prefill(7, 2, on=False), 837)

  def test_table_and_other_bytes(self):
    c = costs.Costs(
      launch=50, shared=30, head=9, table=_TABLE, table_expert=-1.5,
      table_shared=4,
    )  # fmt: skip
    self.assertEqual(c.decode(8, 10, on=True, last=False), 100 - 15 + 4)
    self.assertEqual(c.decode(8, 10, on=True, last=True), 100 - 15 + 4 + 9)
    self.assertEqual(c.decode(8, 10, on=False, last=False), 100 - 15 - 30)
    # A line that runs below what a launch takes at least.
    self.assertEqual(c.decode(8, 0, on=False, last=False), 50)

  def test_a_layer_that_nobody_comes_to(self):
    plain = costs.Costs(launch=2, shared=30, expert=400, row=5000, head=10**6)
    self.assertEqual(plain.hop(3, 0, last=True), 1015032)
    kernels = dataclasses.replace(plain, idle=7)
    self.assertEqual(kernels.hop(3, 0, last=True), 7)
    self.assertEqual(kernels.hop(3, 2, last=True), 1015832)


if __name__ == '__main__':
  absltest.main()
