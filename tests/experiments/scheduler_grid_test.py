"""The grid of schedulers: what runs where, its rows, and going on."""

import csv
import functools
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized

from bevy_jax import config as config_lib
from bevy_jax.experiments import grids, scheduler_grid, simulation, sweep

_CELL = grids.Cell('bundled', 'rtx5090', 'int4', 3, 0.5)


def _grid(**changes: object) -> grids.Grid:
  settings = {'cells': (_CELL,), 'skip': 2, 'tokens': 6, 'first': 4}
  return grids.Grid(**(settings | changes))


class GridsTest(parameterized.TestCase):
  def test_cells(self):
    cells = grids.scheduler_grid('bundled', 'all')
    self.assertLen(set(cells), 2 * 4 * 5 * 3 * 2)
    cells = grids.scheduler_grid('bundled', 'lines')
    self.assertLen([c for c in cells if c.trace == 'bundled'], 120)
    self.assertLen([c for c in cells if c.trace == 'zipf'], 10)
    self.assertEqual(cells[0].requests, 32)
    grid = grids.make('quick_grid', '', 3, 'all')
    self.assertEqual((len(grid.cells), grid.first), (2, 3))
    with self.assertRaisesRegex(ValueError, "did you mean 'scheduler_grid'"):
      grids.make('schedulers_grid', '', 0, 'lines')

  @parameterized.parameters(
    ({'scope': 'line'}, "did you mean 'lines'"),
    ({'first': -1}, 'first is -1'),
    ({'skip': 6}, 'skip 6'),
  )
  def test_refuses(self, wrong, words):
    with self.assertRaisesRegex(ValueError, words):
      _grid(**wrong)

  def test_all_has_every_pair_and_no_variant_twice(self):
    found = grids.variants(_CELL, 0.05, 'all', others=True)
    self.assertLen(set(found), len(found))
    for scheduler in config_lib.SCHEDULERS:
      for eviction in ('lru', 'reuse'):
        if (scheduler, eviction) != grids.LOCKSTEP[:2]:
          self.assertIn((scheduler, eviction, 'none'), found)
    # What others are told beside must have run before them.
    firsts = [v.scheduler == 'lockstep' for v in found]
    self.assertEqual(firsts, sorted(firsts, reverse=True))

  def test_lines_runs_what_its_class_asks_for(self):
    def runs(s: float, **changes: object) -> set[grids.Variant]:
      cell = _CELL._replace(**changes)
      return set(grids.variants(cell, s, 'lines', others=False))

    cold = grids.OURS._replace(prefetch='mixture')
    ours = {cold}
    few = {('lockstep', 'reuse', p) for p in ('history', 'mixture')} | ours
    gate = {grids.OURS._replace(prefetch=grids.GATE)}
    gate |= {grids.LOCKSTEP._replace(prefetch=grids.GATE)}
    self.assertEqual(runs(0.1, requests=16), few)
    self.assertEqual(runs(0.1, form='bf16'), ours)
    self.assertEqual(runs(0.1), few | gate)
    more = few | gate | {('lockstep', 'reuse', 'transition')}
    self.assertEqual(runs(0.7), more)
    published = {
      ('lockstep', eviction, 'transition:guarded=false')
      for eviction in ('lru', 'lfu_decayed')
    }
    self.assertEqual(runs(0.3), more | published)
    plain = runs(0.3, platform='rtx4090', requests=8)
    self.assertLessEqual({('solo', 'lru', 'none'), grids.PLAIN}, plain)


@functools.cache
def _long() -> list[scheduler_grid.Row]:
  """A window long enough for its ends to matter little."""
  return scheduler_grid.run_cell(_grid(skip=8, tokens=40), _CELL)


class RowsTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.rows = _long()
    self.by = {(r['scheduler'], r['eviction'], r['prefetch']): r
               for r in self.rows}  # fmt: skip

  def test_a_row_is_what_a_replay_reports(self):
    """`useful_efficiency` by the report's bounds agrees within 3 %."""
    config = simulation.Replay(
      platform='rtx5090', model_shape='gpt-oss-20b:int4', requests=3,
      cache=0.5, first=4, skip=8, tokens=40,
    )  # fmt: skip
    sim = simulation.Simulation(config)
    self.assertEqual(self.rows[0]['scheduler'], 'lockstep')
    s = sim.run(*grids.LOCKSTEP).report['gpu_busy']
    for variant in (grids.LOCKSTEP, grids.OURS):
      report = sim.run(*variant).report
      row = self.by[variant]
      self.assertEqual(row['tokens_per_s'], round(report['tokens_per_s'], 4))
      self.assertEqual(row['s'], round(s, 5))
      for name in ('loads', 'launches', 'max_lag'):
        self.assertEqual(row[name], report[name])
      self.assertEqual(row['tpot_p99_ms'], round(report['tpot_ms']['p99'], 4))
      useful = report['useful_efficiency']
      self.assertBetween(row['useful_efficiency'], useful * 0.97, useful * 1.03)
    self.assertEqual(self.rows[0]['platform'], 'rtx5090')
    self.assertEqual(self.rows[0]['synthetic'], 0)

  def test_headroom_is_above_every_prefetcher_in_lockstep(self):
    """Seen to fail, either way, with half or twice the loads' time."""
    most = self.rows[0]['headroom_tokens_per_s']
    # Link and device, each all the time at work, are faster still.
    link = self.rows[0]['link_busy'] / self.rows[0]['tokens_per_s']
    device = self.rows[0]['gpu_busy'] / self.rows[0]['tokens_per_s']
    self.assertLess(most, 1 / max(link, device))
    self.assertGreater(most, self.rows[0]['tokens_per_s'])
    for row in self.rows:
      if (row['scheduler'], row['eviction']) == grids.LOCKSTEP[:2]:
        # A guess may keep what the eviction would have given up: 1 %.
        self.assertLess(row['tokens_per_s'], 1.01 * most)
        self.assertEqual(row['headroom_tokens_per_s'], most)

  def test_useful_efficiency_by_hand(self):
    """Seen to fail without the min and with wasted loads left in."""
    base = {'gpu_busy': 0.4, 'tokens_per_s': 100.0, 'loads_per_token': 3.0,
            'headroom_tokens_per_s': 200.0}  # fmt: skip
    done = {grids.LOCKSTEP: base}
    row = {'tokens_per_s': 150.0, 'loads': 50, 'wasted_prefetches': 0,
           'loads_per_token': 5.0}  # fmt: skip

    def useful(load: int, **changes: float) -> float:
      found = row | changes
      scheduler_grid._compare(found, grids.OURS, done, load)
      self.assertEqual(found['s'], 0.4)
      self.assertEqual(found['headroom_tokens_per_s'], 200.0)
      return found['useful_efficiency']

    # 3 loads of 2 ms each a token, no more than lockstep; 4 ms of device.
    self.assertAlmostEqual(useful(2_000_000), 3 * 2e-3 * 150)
    self.assertAlmostEqual(useful(1_000_000), 4e-3 * 150)
    # 40 of 50 were for nothing: 1 a token.
    self.assertAlmostEqual(useful(5_000_000, wasted_prefetches=40), 5e-3 * 150)
    done = {grids.LOCKSTEP: base}
    other = dict(row)
    lru = grids.OURS._replace(eviction='lru')
    scheduler_grid._compare(other, lru, done, 1)
    self.assertEqual(other['useful_efficiency'], 0.0)

  def test_synthetic_routing_says_so(self):
    cell = _CELL._replace(trace='zipf', requests=2)
    rows = scheduler_grid.run_cell(_grid(), cell)
    self.assertEqual({row['synthetic'] for row in rows}, {1})
    self.assertEqual({row['trace'] for row in rows}, {'zipf'})


class RunTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.TemporaryDirectory()
    self.addCleanup(self.folder.cleanup)
    self.path = pathlib.Path(self.folder.name) / 'rows.csv'
    self.heard: list[str] = []

  def _run(self, **how: object) -> list[scheduler_grid.Row]:
    cells = (_CELL, _CELL._replace(cache=0.25))
    return scheduler_grid.run(_grid(cells=cells), self._how(**how))

  def _how(self, **how: object) -> sweep.How:
    return sweep.How(path=str(self.path), say=self.heard.append, **how)

  def test_it_goes_on_where_it_was_stopped(self):
    """Seen to fail, all run again, with the place of a row as text."""
    whole = self._run()
    first = self.path.read_bytes()
    self.assertLen(self.heard, 2)
    # Cut in the middle of a line, as by a power cut.
    lines = first.splitlines(keepends=True)
    self.path.write_bytes(b''.join(lines[:-2]) + lines[-2][:40])
    again = self._run()
    self.assertLen(self.heard, 3)
    self.assertIn(': 2 runs', self.heard[-1])
    for row, same in zip(again, whole, strict=True):
      for name in set(scheduler_grid.COLUMNS) - {'cpu_seconds'}:
        self.assertEqual(row[name], same[name], name)
    self.assertEqual(self._run(), again)
    self.assertLen(self.heard, 3)

  def test_redo(self):
    whole = self._run()
    again = self._run(redo=['runahead'])
    self.assertLen(again, len(whole))
    ours = sum(row['scheduler'] == 'runahead' for row in whole)
    self.assertIn(f': {ours // 2} runs', self.heard[-1])
    with self.assertRaisesRegex(ValueError, "did you mean 'runahead'"):
      scheduler_grid.main(_grid(), self._how(redo=['runaheat']))

  def test_a_trace_that_is_too_short_leaves_cells_out(self):
    cells = (_CELL._replace(requests=13),)
    grid = _grid(cells=cells)
    self.assertEmpty(scheduler_grid.run(grid, self._how()))
    self.assertIn('16 requests, 17 are needed', self.heard[0])
    missing = _grid(cells=(_CELL._replace(trace='nowhere.npz'),))
    with self.assertRaisesRegex(ValueError, 'nowhere.npz'):
      scheduler_grid.run(missing, self._how())

  def test_another_file_is_not_written_over(self):
    self.path.write_text('a,b\n1,2\n')
    with self.assertRaisesRegex(ValueError, 'not the columns'):
      self._run()
    self.assertEqual(self.path.read_text(), 'a,b\n1,2\n')


class LauncherTest(absltest.TestCase):
  def test_two_processes_and_the_tables(self):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'rows.csv'
      ran = subprocess.run(
        [
          sys.executable, '-m', 'bevy_jax.experiments.ablate',
          '--config=scheduler_grid', '--quick', '--jobs=2', f'--csv={path}',
        ],
        capture_output=True, text=True, check=False,
      )  # fmt: skip
      self.assertEqual(ran.returncode, 0, ran.stderr)
      with path.open(encoding='utf-8', newline='') as file:
        rows = list(csv.DictReader(file))
    self.assertIn('2/2 bundled rtx4090 int4 2 x', ran.stdout)
    self.assertIn('runahead as it comes / lockstep', ran.stdout)
    self.assertIn('recorded routing, simulated machines', ran.stdout)
    self.assertEqual({row['cache'] for row in rows}, {'0.25', '0.75'})


if __name__ == '__main__':
  absltest.main()
