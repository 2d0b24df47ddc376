"""Timelines: times to the nanosecond, arrows that meet, files that open."""

import gzip
import itertools
import json
import pathlib
import shutil
import tempfile

from absl.testing import absltest, parameterized

from bevy_jax import busy, events, timeline
from bevy_jax.experiments import simulation

_MS = 1_000_000


def _run(**changes):
  config = simulation.Replay(
    trace='bundled',
    platform='h200',
    model_shape='gpt-oss-20b',
    requests=4,
    count=5,
    tokens=6,
    skip=2,
    bounds=False,
    **changes,
  )
  whole = simulation.Simulation(config)
  return whole.run('runahead', 'lfu_decayed').log, whole.trace.num_experts


def _of(records, kind, process=1, track=None):
  return [
    r
    for r in records
    if r['ph'] == kind and r['pid'] == process and track in (None, r['tid'])
  ]


class RunTest(parameterized.TestCase):
  @parameterized.parameters(1, 4)
  def test_busy_times_are_the_log_s(self, hops):
    """Seen to fail with a launch's begin taken from when the host began it."""
    log, experts = _run(hops=hops)
    records = timeline.make(log, experts)
    for track, spans in ((1, busy.launches(log)), (2, busy.loads(log))):
      slices = _of(records, 'X', track=track)
      self.assertLen(slices, len(spans))
      wanted = sum(s.end - s.begin for s in spans)
      got = sum(s['dur'] for s in slices) * 1000
      self.assertAlmostEqual(got, wanted, delta=len(spans))
      start = log[0].time
      for got_one, span in zip(slices, spans, strict=True):
        self.assertAlmostEqual(got_one['ts'] * 1000, span.begin - start, 0)

  def test_no_two_slices_of_a_track_overlap(self):
    log, experts = _run()
    records = timeline.make(log, experts)
    slices = _of(records, 'X') + _of(records, 'X', process=2)
    slices.sort(key=lambda r: (r['pid'], r['tid'], r['ts']))
    self.assertLen({(r['pid'], r['tid']) for r in slices}, 3 + 5)
    # Perfetto takes a 0 for the pid, which is another track's tid.
    self.assertTrue(all(r['tid'] for r in slices))
    for one, two in itertools.pairwise(slices):
      if (one['pid'], one['tid']) == (two['pid'], two['tid']):
        self.assertLessEqual(one['ts'] + one['dur'], two['ts'] + 1e-3)

  def test_arrows_lead_from_loads_to_launches(self):
    log, experts = _run()
    records = timeline.make(log, experts)
    leave, come = (_of(records, kind) for kind in 'sf')
    self.assertGreater(len(leave), 20)
    ids = [[r['id'] for r in some] for some in (leave, come)]
    self.assertCountEqual(*ids)
    self.assertLen(set(ids[0]), len(leave))
    self.assertTrue(all(isinstance(i, int) for i in ids[0]), 'no arrow shows')
    for arrows, track in ((leave, 2), (come, 1)):
      slices = _of(records, 'X', track=track)
      for arrow in arrows:
        at = arrow['ts']
        inside = [s['ts'] <= at <= s['ts'] + s['dur'] for s in slices]
        self.assertTrue(any(inside), arrow)

  def test_a_file_of_each_run(self):
    log, experts = _run()
    folder = tempfile.mkdtemp()
    self.addCleanup(shutil.rmtree, folder)
    paths = timeline.save_all(f'{folder}/a.json.gz', [log, log], experts)
    self.assertEqual(paths, [f'{folder}/a.{i}.json.gz' for i in (0, 1)])
    text = gzip.decompress(pathlib.Path(paths[1]).read_bytes())
    found = json.loads(text)['traceEvents']
    self.assertEqual(found, timeline.make(log, experts))
    only = timeline.save_all(f'{folder}/b.json', [log], experts)
    self.assertEqual(
      json.loads(pathlib.Path(only[0]).read_text())['traceEvents'], found
    )


class HandTest(absltest.TestCase):
  def test_one_load_one_launch(self):
    log = [
      events.Admitted(7 * _MS, 3, 0, 1, 7 * _MS),
      events.Routed(8 * _MS, 3, 0, 1, (0, 2), 1, 5),
      events.LoadIssued(8 * _MS, 6, 9, 'demand'),
      events.LoadLanded(10 * _MS, 6, 9),
      events.LaunchBegun(
        11 * _MS, 0, 'decode', 1, (3,), (4, 6), True, 1, (100_000, 200_000)
      ),
      events.LaunchEnded(13 * _MS, 0),
      # It says more than there was time for: what is drawn stays in order.
      events.LaunchBegun(
        13 * _MS, 1, 'decode', 0, (3,), (), True, 1, (100_000, 3_200_000)
      ),
      events.LaunchEnded(14 * _MS, 1),
      events.Evicted(14 * _MS, 6, 9, True),
      events.Finished(15 * _MS, 3, 'length'),
    ]
    records = timeline.make(log, 4)
    shown = [
      (r['tid'], r['name'], r['ts'], r['dur'])
      for r in (*_of(records, 'X'), *_of(records, 'X', process=2))
    ]
    self.assertEqual(
      shown,
      [
        (2, 'layer 1, expert 2', 1000, 2000),
        (3, 'schedule', 3700, 100),
        (3, 'launch', 3800, 200),
        (1, 'layer 1, 1 rows', 4000, 2000),
        (3, 'launch', 4000, 2000),
        (1, 'layer 0, 1 rows', 6000, 1000),
        (5, 'waits for 1 experts, layer 1', 1000, 3000),
        (5, 'layer 1, 1 rows', 4000, 2000),
        (5, 'layer 0, 1 rows', 6000, 1000),
      ],
    )
    arrows = [(r['ph'], r['ts']) for r in records if r['ph'] in 'sf']
    self.assertEqual(arrows, [('s', 2999.999), ('f', 4000)])
    values = [
      (r['name'], r['ts'], r['args']['value']) for r in _of(records, 'C')
    ]
    self.assertEqual(
      values,
      [
        ('lag in layers', 1000, 0),
        ('resident experts', 3000, 1),
        ('rows of a launch', 4000, 1),
        ('rows of a launch', 6000, 1),
        ('resident experts', 7000, 0),
      ],
    )


if __name__ == '__main__':
  absltest.main()
