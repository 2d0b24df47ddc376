"""Cells from random weights to a row, on small models."""

import dataclasses
import json
import pathlib
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax import events
from bevy_jax import trace as trace_lib
from bevy_jax.experiments import (
  bench_models,
  cell_job,
  cell_run,
  cells,
  overrides,
  suite,
  suite_table,
)

_OPTIONS = cell_run.Options(
  new_tokens=18, warmup=2, context=20, strict=True, threads=2
)
_SUITE = cells.SUITES['tiny']._replace(pairs=1)


def _run(value: dict[str, float]) -> cell_run.Ran:
  return cell_run.Ran(value, [], 0)


class SuiteTest(absltest.TestCase):
  """The tiny suite once, strictly: every token must be the resident run's."""

  @classmethod
  def setUpClass(cls) -> None:
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.path = pathlib.Path(folder.name) / 'rows.json'
    cls.said: list[str] = []
    measured = suite.Suite(_SUITE, _OPTIONS, cls.path, say=cls.said.append)
    assert measured.run()
    cls.rows = measured.rows

  def test_a_row_a_cell_in_the_file(self):
    self.assertEqual(
      [r['cell'] for r in self.rows], [c.name for c in _SUITE.cells]
    )
    self.assertEqual(json.loads(self.path.read_text())['rows'], self.rows)
    for row in self.rows:
      self.assertEqual(row['routing'], 'synthetic: zipf')
      self.assertIn('20 keys and values of each row are random', row['note'])
      self.assertTrue(row['complete'])

  def test_tokens_equal_the_resident_runs(self):
    for row in self.rows:
      self.assertEqual(set(row['same_tokens'].values()), {1.0}, row)

  def test_figures_are_there_and_nothing_was_compiled(self):
    resident, half = self.rows
    self.assertLen(resident['variants'], 2)
    self.assertLen(half['variants'], 4)
    self.assertEqual(
      set(half['ratios']), {'lockstep', 'better', 'prefetcher', 'lru_unguarded'}
    )
    for row in self.rows:
      for found in row['variants'].values():
        self.assertGreater(found['tokens_per_s'], 0)
        self.assertGreater(found['memory_floor_tokens_per_s'], 0)
        self.assertEqual(found['compiled'], 0)
    self.assertEqual(resident['slots'], resident['pool_slots'])
    self.assertEqual(half['slots'] * 2, half['pool_slots'])

  def test_what_is_measured_is_not_measured_again(self):
    """Seen to fail where settings were not compared."""
    again = suite.Suite(_SUITE, _OPTIONS, self.path)
    with mock.patch.object(bench_models, 'make') as made:
      self.assertTrue(again.run())
      made.assert_not_called()
      other = cell_run.Options(new_tokens=19, strict=True)
      made.side_effect = ValueError('it would be measured')
      with self.assertRaisesRegex(ValueError, 'would be measured'):
        suite.Suite(_SUITE, other, self.path).run()

  def test_nothing_begins_when_time_has_run_out(self):
    late = suite.Suite(_SUITE, _OPTIONS, limit_s=1e-9)
    self.assertFalse(late.run())
    self.assertEmpty(late.rows)

  def test_the_job_shows_what_is_there(self):
    options = overrides.apply(_OPTIONS, ['context=20'])
    asked = cell_job.Asked(_SUITE, options)
    found = cell_job.run(asked, str(self.path), limit_s=1e9)
    self.assertEqual(found.report['rows'], suite.load(self.path))
    self.assertLen(found.report['rows'], 2)
    lines = suite_table.lines(self.rows)
    self.assertIn('synthetic: zipf: runahead over lockstep', lines[0])
    self.assertLen(suite_table.table(self.rows).rows, 6)


class ReplayTest(absltest.TestCase):
  """A machine whose routers are told what to choose."""

  def test_every_choice_is_the_recordings(self):
    """Seen to fail with the position of the token before."""
    rng = np.random.default_rng(0)
    ids = rng.permuted(np.tile(np.arange(8), (4, 30, 6, 1)), axis=-1)[..., :2]
    trace = trace_lib.Trace(
      experts=ids.astype(np.int16),
      lengths=np.array([30, 9, 30, 30], np.int32),
      num_experts=8,
    )
    trace.experts[1, 9:] = -1
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'trace.npz'
      trace_lib.save(path, trace)
      # In all else like the suite: its programs need not be compiled again.
      options = dataclasses.replace(_OPTIONS, trace=str(path))
      made = bench_models.make('tiny', 'bf16', 'auto', dtype='float32')
      cell = cells.Cell('tiny', 'bf16', 2, 0.5, 'trace')
      machine = cell_run.Machine(made, [cell], options, lambda what: None)
    engine = machine._engine(('runahead', 'lfu_decayed', 'none'), 16)
    log = cell_run._drive(engine, machine._requests(12))
    routed = [e for e in log if isinstance(e, events.Routed)]
    self.assertLen(routed, 2 * 12 * 4)
    for e in routed:
      token = e.token % trace.lengths[e.request]
      wanted = trace.experts[e.request, token, e.layer]
      np.testing.assert_array_equal(e.experts, wanted)
    machine.close()


class FiguresTest(parameterized.TestCase):
  def test_ratios_are_taken_turn_by_turn(self):
    def runs(*speeds: float) -> list[cell_run.Ran]:
      return [_run({'tokens_per_s': s}) for s in speeds]

    found = suite.ratios({
      ('lockstep', 'lfu_decayed', 'none'): runs(10, 20, 10, 10, 10),
      ('runahead', 'lfu_decayed', 'none'): runs(20, 10, 30, 20, 20),
      ('lockstep', 'lfu_decayed', 'history'): runs(20, 20, 20, 20, 20),
      ('lockstep', 'lru', 'transition'): runs(5, 5, 5),
    })  # fmt: skip
    self.assertEqual(found['lockstep']['each'], [2, 0.5, 3, 2, 2])
    self.assertEqual(found['lockstep']['lower_95'], 0.5)
    self.assertEqual(found['better']['median'], 1)
    self.assertEqual(found['lru_unguarded']['median'], 4)

  @parameterized.parameters(
    ([[[1, 2, 3], [4, 5, 6]]], 1.0), ([[[1, 9, 3], [4, 5, 6]]], 0.75)
  )
  def test_agreement_is_that_of_the_first_tokens(self, runs, share):
    self.assertEqual(suite.agreement(runs, [[1, 2], [4, 5]]), share)
    self.assertIsNone(suite.agreement(runs, None))

  def test_other_files_are_refused(self):
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'x.json'
      path.write_text('[1]')
      with self.assertRaisesRegex(ValueError, 'no rows of this benchmark'):
        suite.load(path)
      with self.assertRaisesRegex(ValueError, 'make it first'):
        suite.load(path / 'deeper' / 'x.json')

  def test_options_are_checked(self):
    with self.assertRaisesRegex(ValueError, 'context is -1'):
      cell_run.Options(context=-1)
    with self.assertRaisesRegex(ValueError, 'belady'):
      cell_run.Options(eviction='belady')


if __name__ == '__main__':
  absltest.main()
