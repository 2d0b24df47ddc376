"""Spans of the link and the device, counted by hand."""

import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax import busy, events, figures


def issued(time, key):
  return events.LoadIssued(time, key, 0, 'demand')


def landed(time, key):
  return events.LoadLanded(time, key, 0)


class SpansTest(parameterized.TestCase):
  def test_the_link_carries_one_load_at_a_time(self):
    log = [
      issued(10, 1),
      issued(12, 2),
      landed(20, 1),
      landed(25, 2),
      issued(40, 1),
      landed(47, 1),
      issued(50, 3),  # never lands
    ]
    self.assertEqual(busy.loads(log), [(10, 20), (20, 25), (40, 47)])

  def test_the_device_runs_one_launch_at_a_time(self):
    begun = [
      events.LaunchBegun(t, n, 'decode', 0, (0,), (1,), True, 1, (0,) * 4)
      for n, t in enumerate((5, 6, 30))
    ]
    log = [
      *begun[:2],
      events.LaunchEnded(10, 0),
      events.LaunchEnded(18, 1),
      begun[2],
      events.LaunchEnded(33, 2),
    ]
    self.assertEqual(
      [ran[:4] for ran in busy.launches(log)],
      [
        (begun[0], 5, 10, False),
        (begun[1], 10, 18, False),
        (begun[2], 30, 33, False),
      ],
    )

  def test_what_a_launch_reads_behind_its_first_layer(self):
    begun = [
      events.LaunchBegun(t, n, 'decode', 0, (0,), (1,), True, 2, (0,) * 4)
      for n, t in enumerate((5, 6))
    ]
    log = [
      *begun,
      events.LaunchEnded(10, 0),
      events.Crossed(10, 0, (2,), (7, 8)),
      events.LaunchEnded(18, 1),
      events.Crossed(18, 1, (1,), ()),
    ]
    self.assertEqual([ran.more for ran in busy.launches(log)], [2, 0])

  @parameterized.parameters(
    ([], 0),
    ([(0, 5)], 0),
    ([(0, 12)], 2),
    ([(30, 45), (12, 20), (14, 16), (18, 25)], 13 + 10),
    ([(0, 99)], 30),
    ([(40, 50)], 0),
  )
  def test_covered(self, spans, total):
    self.assertEqual(busy.covered(spans, 10, 40), total)


class LoadSecondsTest(parameterized.TestCase):
  def test_nothing_loaded(self):
    self.assertEqual(busy.load_seconds([]), 0.0)

  def test_a_single_load(self):
    self.assertAlmostEqual(busy.load_seconds([busy.Load(3, 10)]) * 1e9, 7)

  def test_single_loads_count_only_where_there_are_no_runs(self):
    loads = [busy.Load(0, 90), busy.Load(100, 110), busy.Load(110, 116)]
    self.assertAlmostEqual(busy.load_seconds(loads) * 1e9, 8)

  @parameterized.parameters(0, 300, 1500)
  def test_late_eyes_do_not_slow_the_link(self, late):
    # 200 ns a load, 24 at a time; every third landing or so is seen late,
    # together with those that came meanwhile.
    rng = np.random.default_rng(0)
    loads = []
    for start in range(0, 1_000_000, 10_000):
      before, seen = start, start
      for n in range(24):
        seen = max(seen, start + 200 * (n + 1) + late * (rng.random() < 0.3))
        loads.append(busy.Load(before, int(seen)))
        before = int(seen)
    self.assertBetween(busy.load_seconds(loads) * 1e9, 184, 204)

  def test_reads_from_disk_are_counted_apart(self):
    # Seen to fail where a load begins when it was issued, and where the
    # times of reads that overlap are added up.
    log = [
      issued(0, 1),
      issued(0, 2),
      issued(0, 3),
      events.LoadLanded(20, 3, 0),
      events.LoadLanded(50, 1, 0, (5, 40)),
      events.LoadFailed(55, 4, 0, 'broken'),
      events.LoadLanded(90, 2, 0, (20, 60)),
    ]
    self.assertEqual(busy.loads(log), [(0, 20), (40, 50), (60, 90)])
    found = figures.host(log, 1100)
    self.assertEqual(
      found,
      {
        'host_hits': 1,
        'disk_reads': 2,
        'disk_bytes': 2200,
        'disk_gb_per_s': 40.0,
      },
    )


if __name__ == '__main__':
  absltest.main()
