"""Timelines in Perfetto's own trace processor: what it reads is the log's.

The package `perfetto` brings the way to talk to it and not the program, which
it downloads. These tests never do: they run where BEVY_TRACE_PROCESSOR names a
`trace_processor_shell`, or where the package has already fetched its own.
"""

import collections
import importlib.util
import os
import pathlib
import shutil
import tempfile

import pytest
from absl.testing import absltest

from bevy_jax import busy, timeline
from bevy_jax.experiments import simulation


def _shell() -> str:
  """The program, '' where there is none."""
  given = os.environ.get('BEVY_TRACE_PROCESSOR')
  if given or importlib.util.find_spec('perfetto') is None:
    return given or ''
  kept = pathlib.Path.home() / '.local/share/perfetto/prebuilts'
  found = sorted(kept.glob('trace_processor_shell-*[0-9a-f]'))
  return str(found[0]) if found else shutil.which('trace_processor_shell') or ''


@pytest.mark.slow
@pytest.mark.skipif(
  not _shell() or importlib.util.find_spec('perfetto') is None,
  reason='needs the package perfetto and BEVY_TRACE_PROCESSOR=PATH of a '
  'trace_processor_shell',
)
class TraceProcessorTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    from perfetto import trace_processor

    config = simulation.Replay(
      trace='bundled', platform='h200', model_shape='gpt-oss-20b', requests=4,
      count=5, tokens=6, skip=2, bounds=False,
    )  # fmt: skip
    whole = simulation.Simulation(config)
    cls.log = whole.run('runahead', 'lfu_decayed').log
    cls.records = timeline.make(cls.log, whole.trace.num_experts)
    folder = tempfile.mkdtemp()
    cls.addClassCleanup(shutil.rmtree, folder)
    path = f'{folder}/run.json.gz'
    timeline.save(path, cls.log, whole.trace.num_experts)
    cls.processor = trace_processor.TraceProcessor(
      trace=path,
      config=trace_processor.TraceProcessorConfig(bin_path=_shell()),
    )
    cls.addClassCleanup(cls.processor.close)

  def one(self, sql: str) -> int:
    (row,) = self.processor.query(f'select ({sql}) as found')
    return row.found

  def test_nothing_is_refused(self):
    sql = "select count(*) from stats where severity != 'info' and value > 0"
    self.assertEqual(self.one(sql), 0)

  def test_busy_times_are_the_log_s_to_the_microsecond(self):
    for track, spans in (
      (1, busy.launches(self.log)), (2, busy.loads(self.log)),
    ):  # fmt: skip
      where = f"""from slice
        join thread_track on slice.track_id = thread_track.id
        join thread using (utid) join process using (upid)
        where pid = 1 and tid = {track}"""
      self.assertEqual(self.one(f'select count(*) {where}'), len(spans))
      wanted = sum(s.end - s.begin for s in spans)
      found = self.one(f'select sum(dur) {where}')
      # The file has doubles of microseconds, read as whole nanoseconds.
      self.assertAlmostEqual(found, wanted, delta=2 * len(spans))

  def test_a_track_has_the_slices_of_its_name_and_no_more(self):
    """Seen to fail where request 0 had tid 0, which is read as the pid."""
    names = {
      (r['pid'], r['tid']): r['args']['name']
      for r in self.records
      if r['ph'] == 'M' and r['name'] == 'thread_name'
    }
    wanted = collections.Counter(
      (r['pid'], names[r['pid'], r['tid']])
      for r in self.records
      if r['ph'] == 'X'
    )
    found = self.processor.query(
      """select pid, thread.name as name, count(*) as slices from slice
      join thread_track on slice.track_id = thread_track.id
      join thread using (utid) join process using (upid)
      group by pid, thread.name"""
    )
    self.assertEqual({(r.pid, r.name): r.slices for r in found}, wanted)

  def test_arrows_and_counters_are_there(self):
    arrows = sum(record['ph'] == 's' for record in self.records)
    self.assertEqual(self.one('select count(*) from flow'), arrows)
    names = {r['name'] for r in self.records if r['ph'] == 'C'}
    sql = 'select count(distinct name) from counter_track'
    self.assertEqual(self.one(sql), len(names))
    samples = sum(record['ph'] == 'C' for record in self.records)
    self.assertEqual(self.one('select count(*) from counter'), samples)


if __name__ == '__main__':
  absltest.main()
