"""Ratios, lines and maps of a grid, on rows made by hand."""

import pathlib
import tempfile

import numpy as np
import pytest
from absl.testing import absltest

from bevy_jax.experiments import grid_plots, grid_tables, grids


def _row(variant: tuple[str, ...], speed: float, **more: object):
  names = ('scheduler', 'eviction', 'prefetch')
  return {
    'trace': 'some.npz', 'first': 0, 'platform': 'h200', 'form': 'int4',
    'requests': 8, 'cache': 0.5, 'synthetic': 0, 'tokens_per_s': speed,
    'gpu_busy': 0.2, 'headroom_tokens_per_s': 125.0, 'useful_efficiency': 0.9,
    **dict(zip(names, variant, strict=True)), **more,
  }  # fmt: skip


def _cell(ours: float = 120.0, **more: object):
  return [
    _row(grids.LOCKSTEP, 100.0, **more),
    _row(grids.OURS, ours, **more),
    _row(('lockstep', 'reuse', 'history'), 110.0, **more),
    _row(('lockstep', 'reuse', 'transition:warm=true'), 96.0, **more),
    # Neither is a real prefetcher with our eviction and guard.
    _row(('lockstep', 'reuse', 'transition:guarded=false'), 500.0, **more),
    _row(('lockstep', 'reuse', grids.GATE), 115.0, **more),
    _row(('runahead', 'reuse', grids.GATE), 138.0, **more),
    _row(('lockstep', 'lru', 'transition:guarded=false'), 60.0, **more),
    _row(('lockstep', 'lfu_decayed', 'transition:guarded=false'), 80.0, **more),
  ]


class TablesTest(absltest.TestCase):
  def test_ratios_of_a_cell(self):
    (cell,) = grid_tables.cells(_cell())
    self.assertEqual((cell.group, cell.s), (1, 0.2))
    wanted = {
      'lockstep': 1.2, 'overlap': 1.2 * 0.8, 'real': 120 / 110, 'gate': 1.2,
      'lru': 2.0, 'lfu': 1.5, 'headroom': 0.96, 'useful': 0.9,
    }  # fmt: skip
    self.assertEqual(list(cell.ratios), list(wanted))
    for name, value in wanted.items():
      self.assertAlmostEqual(cell.ratios[name], value, msg=name)

  def test_a_prefetcher_that_slows_down_is_turned_off(self):
    rows = [r for r in _cell() if r['prefetch'] != 'history']
    (cell,) = grid_tables.cells(rows)
    self.assertAlmostEqual(cell.ratios['real'], 1.2)

  def test_what_did_not_run_has_no_ratio(self):
    (cell,) = grid_tables.cells(_cell()[:2])
    self.assertEqual(
      list(cell.ratios), ['lockstep', 'overlap', 'headroom', 'useful']
    )
    self.assertEmpty(grid_tables.cells(_cell()[1:]))

  def test_classes(self):
    for s, group in ((0.0, 0), (0.15, 1), (0.35, 2), (0.65, 3), (1.0, 3)):
      (cell,) = grid_tables.cells(_cell(gpu_busy=s))
      self.assertEqual(cell.group, group)

  def test_least_mean_and_most_by_class(self):
    rows = (
      _cell(110.0) + _cell(140.0, cache=0.25) + _cell(gpu_busy=0.1, cache=1)
    )
    lines = grid_tables.ratios(grid_tables.cells(rows)).splitlines()
    mean = (1.1 * 1.4) ** 0.5
    self.assertEqual(
      ' '.join(lines[2].split()),
      f'0.15 <= s < 0.35 2 cells least 1.100 mean {mean:.3f} most 1.400',
    )
    self.assertStartsWith(
      lines[1], '  s < 0.15            1 cells  least 1.200'
    )

  def test_misses(self):
    rows = _cell(109.0) + _cell(150.0, cache=0.25)
    text = grid_tables.misses(grid_tables.cells(rows))
    self.assertIn(
      'lockstep, 0.15 <= s < 0.35: mean 1.279 of 2 cells, line 1.25: met', text
    )
    self.assertIn('1 of 2 cells below 1.1', text)
    self.assertIn('  some.npz+0 h200 int4 R=8 0.5: 1.090 (s 0.20)', text)
    # 109 / 110 is above .99.
    self.assertIn('real, all s: 0 of 2 cells below 0.99', text)
    self.assertIn('useful, 0.15 <= s < 0.35: mean 0.900 of 2 cells', text)
    self.assertIn('line 0.95: MISSED', text)
    self.assertIn('overlap, s < 0.15: no cells', text)
    self.assertEndsWith(
      text, '1 of 2 cells (50.0%) miss a line of their own; 5% may: MISSED'
    )

  def test_schedulers_where_all_of_them_ran(self):
    rows = [
      _row((name, 'lru', 'none'), 100.0 + 10 * i)
      for i, name in enumerate(grid_tables.config_lib.SCHEDULERS)
    ]
    text = grid_tables.schedulers(rows)
    self.assertStartsWith(text, 'over lockstep, both with lru')
    self.assertRegex(text, r'runahead +1 cells +least 1\.100')
    self.assertEqual(grid_tables.schedulers(rows[1:]), '')


class PlotsTest(absltest.TestCase):
  def test_tables(self):
    rows = _cell() + _cell(150.0, cache=0.25, requests=4)
    rows += _cell(90.0, form='bf16')
    found = grid_plots.tables(rows, 'lockstep')
    self.assertEqual(list(found), [('h200', 'bf16'), ('h200', 'int4')])
    table = found['h200', 'int4']
    self.assertEqual((table.requests, table.caches), ([4, 8], [0.25, 0.5]))
    np.testing.assert_allclose(table.values, [[1.5, np.nan], [np.nan, 1.2]])

  def test_maps(self):
    with tempfile.TemporaryDirectory() as name:
      folder = pathlib.Path(name)
      try:
        import matplotlib  # noqa: F401
      except ImportError:
        self.assertEmpty(grid_plots.save(_cell(), folder))
        pytest.skip('matplotlib is not installed: the extra plot')
      found = grid_plots.save(_cell() + _cell(150.0, cache=0.25), folder)
      self.assertEqual(
        [path.name for path in found],
        ['some_lockstep.png', 'some_real.png', 'some_gate.png'],
      )
      for path in found:
        self.assertStartsWith(path.read_bytes(), b'\x89PNG')


if __name__ == '__main__':
  absltest.main()
