"""Pictures of schedules: bars to the nanosecond, nothing on top of another."""

import itertools
import pathlib
import subprocess
import sys
import tempfile
import unittest.mock

from absl.testing import absltest, parameterized

from bevy_jax import busy, events
from bevy_jax import window as window_lib
from bevy_jax.experiments import figures_style, schedule_picture, simulation


def _run(scheduler='runahead'):
  config = simulation.Replay(
    platform='rtx4090', model_shape='gpt-oss-20b:int4', requests=3, cache=0.5,
    tokens=6, skip=2, bounds=False,
  )  # fmt: skip
  whole = simulation.Simulation(config)
  return whole.run(scheduler, 'lru').log, whole.trace.num_experts


class BarsTest(parameterized.TestCase):
  @parameterized.parameters('lockstep', 'runahead')
  def test_bars_are_the_times_of_the_log(self, scheduler):
    """Seen to fail with a launch drawn from when the host had begun it."""
    log, experts = _run(scheduler)
    bars = schedule_picture.bars(log, experts)
    for line, spans in (
      ('device', [(r.begin, r.end) for r in busy.launches(log)]),
      ('link', [tuple(load) for load in busy.loads(log)]),
    ):
      self.assertEqual([b[3:] for b in bars if b.line == line], spans)
    for ran in busy.launches(log):
      for request in ran.event.requests:
        layer = ran.event.layer
        own = (request, 'launch', layer, ran.begin, ran.end)
        self.assertIn(own, bars)

  def test_a_stall_ends_with_its_last_load(self):
    """Seen to fail with stalls until the launch that follows."""
    log, experts = _run()
    landed = {(e.key, e.time) for e in log
              if isinstance(e, events.LoadLanded)}  # fmt: skip
    needs = {(e.request, e.layer, e.time): e for e in log
             if isinstance(e, events.Routed)}  # fmt: skip
    stalls = [b for b in schedule_picture.bars(log, experts)
              if b.kind == 'stall']  # fmt: skip
    self.assertNotEmpty(stalls)
    for bar in stalls:
      routed = needs[bar.line, bar.layer, bar.begin]
      self.assertLess(routed.hits, len(routed.experts))
      keys = {(bar.layer * experts + e, bar.end) for e in routed.experts}
      self.assertTrue(keys & landed, bar)

  def test_waits_of_a_request_do_not_overlap(self):
    log, experts = _run()
    bars = schedule_picture.bars(log, experts)
    for request in range(3):
      own = sorted(
        (b.begin, b.end) for b in bars
        if b.line == request and b.kind != 'launch'
      )  # fmt: skip
      for before, after in itertools.pairwise(own):
        self.assertLessEqual(before[1], after[0])


class DrawTest(absltest.TestCase):
  def test_what_is_drawn_are_the_bars(self):
    """Seen to fail with a panel that begins at the log's own begin."""
    log, experts = _run()
    begin = window_lib.find(log, 3, 2).begin
    made = schedule_picture.draw({'one': log}, experts, skip=2, length_ms=3)
    axes = made.axes[0]
    self.assertEqual(axes.get_xlim(), (0, 3))
    self.assertRegex(axes.get_title(), r'^one: \d+ tokens in 3.0 ms, device')
    drawn = {
      (round(x.min(), 6), round(x.max(), 6))
      for bars in axes.collections
      for x in (path.vertices[:, 0] for path in bars.get_paths())
    }
    wanted = {
      (round((b.begin - begin) / 1e6, 6), round((b.end - begin) / 1e6, 6))
      for b in schedule_picture.bars(log, experts)
      if b.end > begin and b.begin < begin + 3_000_000
    }
    self.assertGreater(len(wanted), 5)
    self.assertEqual(drawn, wanted)

  def test_no_run_and_no_matplotlib(self):
    with self.assertRaisesRegex(ValueError, 'at least one event log'):
      schedule_picture.draw({}, 4)
    with (
      unittest.mock.patch.dict(sys.modules, {'matplotlib.figure': None}),
      self.assertRaisesRegex(ValueError, r'bevy-jax\[plot\]'),
    ):
      figures_style.require()


class LauncherTest(absltest.TestCase):
  def test_an_event_file_becomes_a_picture(self):
    with tempfile.TemporaryDirectory() as folder:
      out = pathlib.Path(folder) / 'picture.png'
      log = pathlib.Path(folder) / 'run.jsonl'
      events.save(log, {}, _run()[0])
      done = subprocess.run(
        [sys.executable, '-m', 'bevy_jax.experiments.schedule_view',
         f'--out={out}', f'--events={log}', '--experts=32'],
        capture_output=True, text=True, check=False,
      )  # fmt: skip
      self.assertEqual(done.returncode, 0, done.stderr)
      self.assertStartsWith(out.read_bytes(), b'\x89PNG')


if __name__ == '__main__':
  absltest.main()
