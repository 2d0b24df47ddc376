"""What a run learns of its link and device, added up by hand."""

from absl.testing import absltest

from bevy_jax import pace as pace_lib


def _load(pace: pace_lib.Pace, key: int, issued: int, landed: int) -> None:
  pace.now = issued
  pace.load_issued(key)
  pace.load_ended(landed, key)


def _launch(
  pace: pace_lib.Pace, number: int, begun: int, ended: int, experts: int
) -> None:
  pace.now = begun
  pace.launch_begun(number, experts)
  pace.launch_ended(ended, number, 1)


class PaceTest(absltest.TestCase):
  def test_loads(self):
    pace = pace_lib.Pace()
    _load(pace, 3, 10, 110)
    self.assertEqual(pace.load, 100)
    # It waited until 110 for the one before it. Seen to fail without.
    _load(pace, 4, 50, 220)
    self.assertAlmostEqual(pace.load, 100 + 0.1 * 10)

  def test_what_is_much_too_late_was_something_else(self):
    pace = pace_lib.Pace()
    _load(pace, 3, 10, 110)
    _load(pace, 4, 200, 100_200)
    self.assertAlmostEqual(pace.load, 100 + 0.1 * 300)

  def test_after_a_pause_nothing_is_late(self):
    pace = pace_lib.Pace()
    _load(pace, 3, 10, 110)
    pace.pause()
    pace.load_issued(4)
    pace.load_ended(9_000_000, 4)
    self.assertEqual(pace.load, 100)

  def test_a_launch_is_a_line_in_its_experts(self):
    pace = pace_lib.Pace()
    for number in range(40):
      begun, experts = 10_000 * (number + 1), (2, 8, 5)[number % 3]
      _launch(pace, number, begun, begun + 500 + 30 * experts, experts)
    self.assertAlmostEqual(pace.fixed, 500, delta=1)
    self.assertAlmostEqual(pace.expert, 30, delta=0.2)
    self.assertAlmostEqual(pace.cost(10), 800, delta=2)
    self.assertAlmostEqual(pace.loads, 1)
    self.assertAlmostEqual(pace.clear, 1)

  def test_layers_between_loads(self):
    pace = pace_lib.Pace()
    self.assertEqual(pace.clear, float('inf'))
    pace.loads = 0.25
    self.assertEqual(pace.clear, 4)

  def test_without_variety_all_of_it_is_fixed(self):
    pace = pace_lib.Pace()
    for number in range(9):
      _launch(pace, number, 1000 * (number + 1), 1000 * number + 1300, 4)
    self.assertEqual((pace.fixed, pace.expert), (300, 0))

  def test_the_head_counts_apart(self):
    """Every fourth launch goes through it: 900 beside 500 and 30 an expert.

    Seen to fail with the head in the line (fixed 719), and without it in the
    mean or in when the device is free.
    """
    pace = pace_lib.Pace()
    for number in range(80):
      pace.now, experts = 10_000 * (number + 1), (2, 8, 5)[number % 3]
      last = number % 4 == 3
      took = 500 + 30 * experts + 900 * last
      pace.launch_begun(number, experts, last)
      pace.launch_ended(pace.now + took, number, 1)
    self.assertAlmostEqual(pace.head, 900, delta=5)
    self.assertAlmostEqual(pace.fixed, 500, delta=5)
    self.assertAlmostEqual(pace.expert, 30, delta=1)
    self.assertAlmostEqual(pace.device, 650 + 900 / 4, delta=15)
    pace.now = 900_000
    pace.launch_begun(80, 5, last=True)
    self.assertAlmostEqual(pace.device_free, 901_550, delta=10)

  def test_the_device_that_tells_when_it_turned_to_a_launch_is_believed(self):
    pace = pace_lib.Pace()
    pace.now = 100
    pace.launch_begun(0, 1)
    pace.launch_ended(400, 0, 0, 250)
    self.assertEqual(pace.device, 150)

  def test_depth(self):
    """Seen to fail without `alone`, without `device` and without `late`."""
    pace = pace_lib.Pace()
    self.assertEqual(pace.depth, float('inf'))
    _load(pace, 3, 10, 110)
    self.assertEqual(pace.depth, float('inf'))
    _launch(pace, 0, 10, 60, 1)
    self.assertEqual(pace.depth, 2)
    pace.device = 250.0
    self.assertEqual(pace.depth, 3.5)
    # Four at once, each of which takes as long as one alone.
    for key in range(4):
      pace.now = 1000
      pace.load_issued(key)
    for key in range(4):
      pace.load_ended(1400 + key, key)
    pace.load, pace.device = 100.0, 50.0
    self.assertAlmostEqual(pace.alone, 100 + 0.1 * 300)
    self.assertAlmostEqual(pace.depth, 2)
    pace.alone = 400.0
    self.assertEqual(pace.depth, 4.5)
    pace.late = False
    self.assertEqual(pace.depth, float('inf'))

  def test_a_wave_belongs_to_the_launch_that_finishes_it(self):
    """Seen to fail with waves counted as launches of their own."""
    pace = pace_lib.Pace()
    pace.now = 100
    pace.launch_begun(0, 4)
    pace.wave_ended(140, 0)
    pace.now = 140
    pace.launch_begun(1, 2)
    pace.launch_ended(200, 1, 3)
    self.assertEqual((pace.device, pace.loads), (100, 3))
    self.assertEqual(pace.cost(2), 60)

  def test_balance(self):
    pace = pace_lib.Pace()
    self.assertEqual(pace.balance, float('inf'))
    _load(pace, 3, 10, 110)
    _launch(pace, 0, 10, 60, 1)
    self.assertEqual(pace.balance, 0.5)

  def test_when_link_and_device_are_free(self):
    pace = pace_lib.Pace()
    self.assertEqual((pace.link_free, pace.device_free), (0, 0))
    _load(pace, 3, 10, 110)
    _launch(pace, 0, 10, 60, 1)
    pace.now = 200
    pace.load_issued(4)
    pace.load_issued(5)
    pace.launch_begun(1, 1)
    self.assertEqual((pace.link_free, pace.device_free), (400, 250))
    pace.now = 900
    self.assertEqual((pace.link_free, pace.device_free), (900, 900))


if __name__ == '__main__':
  absltest.main()
