"""The tables of cells, and what they replay."""

import itertools

import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax import trace as trace_lib
from bevy_jax.experiments import bench_models, cells


class CellsTest(parameterized.TestCase):
  def test_the_suites_are_as_long_as_they_are_said_to_be(self):
    """Seen to fail with a cell left out."""
    core, wide = cells.SUITES['core'], cells.SUITES['wide']
    self.assertLen(set(core.cells), 12)
    self.assertLen(set(wide.cells), 20)
    self.assertEqual((core.pairs, wide.pairs), (7, 3))
    self.assertEqual({c.requests for c in core.cells}, {8, 16})
    self.assertEqual({c.cache for c in core.cells}, {0.5, 0.75, 1.0})
    self.assertEqual({c.routing for c in core.cells}, {'trace'})
    self.assertEqual({c.routing for c in wide.cells}, {'zipf'})
    self.assertLen(cells.SUITES['facts310'].cells, 3)

  def test_cells_that_share_a_model_follow_each_other(self):
    for name, suite in cells.SUITES.items():
      order = [c[:3] for c in suite.cells]
      changes = sum(a != b for a, b in itertools.pairwise(order))
      self.assertEqual(changes + 1, len(set(order)), name)

  def test_cells_that_load_nothing_have_more_turns(self):
    suite = cells.SUITES['core']
    turns = {cell.cache: suite.turns(cell) for cell in suite.cells}
    self.assertEqual(turns, {1.0: 21, 0.75: 7, 0.5: 7})

  def test_every_cell_is_read_back(self):
    for suite in cells.SUITES.values():
      for cell in suite.cells:
        self.assertEqual(cells.parse(cell.name), cell)

  def test_a_beginning_names_several_cells(self):
    found = cells.suite('facts/bf16/8,tiny/int8/1/0.25').cells
    self.assertEqual(
      [c.name for c in found],
      [f'facts/bf16/8/{c}/trace' for c in ('1.0', '0.75', '0.5')]
      + ['tiny/int8/1/0.25/zipf'],
    )
    self.assertLen(cells.suite('facts/bf16').cells, 6)

  def test_what_replaces_a_suites_own(self):
    found = cells.suite('core', pairs=2, routing='uniform')
    self.assertEqual(found.pairs, 2)
    self.assertEqual({c.routing for c in found.cells}, {'uniform'})

  @parameterized.parameters(
    ('cor', 'not known'),
    ('facts/bf16/x', 'SHAPE/FORM'),
    ('facts/bf16/8/0.5/trace/more', 'SHAPE/FORM'),
    ('facts/bf16/0', 'at least 1'),
    ('facts/bf16/8/1.5', r'\(0, 1\]'),
    ('facts/fp8', 'cannot be stored'),
    ('facts/bf16/8/0.5/random', "routing 'random'"),
  )
  def test_what_is_no_cell(self, name, said):
    with self.assertRaisesRegex(ValueError, said):
      cells.suite(name)

  def test_variants(self):
    self.assertEqual(
      cells.variants(True, True),
      [
        ('lockstep', 'lfu_decayed', 'none'),
        ('runahead', 'lfu_decayed', 'none'),
        ('lockstep', 'lfu_decayed', 'history'),
        ('lockstep', 'lfu_decayed', 'transition:warm=true'),
        ('lockstep', 'lru', 'transition:guarded=false:warm=true'),
      ],
    )
    self.assertLen(cells.variants(False, True), 2)
    own = cells.variants(True, False, 'reuse', gate=True)
    self.assertIn(('lockstep', 'reuse', 'next_gate'), own)
    self.assertIn(('lockstep', 'reuse', 'transition'), own)


class RecordingTest(parameterized.TestCase):
  def test_a_position_is_a_recorded_token(self):
    """Seen to fail with `start` left out."""
    trace = trace_lib.load('bundled')
    table = cells.tables(trace, 5, start=100, positions=300)
    self.assertEqual(table.shape, (16, 300, 5, 4))
    for request in (0, 15):
      length = trace.lengths[request]
      for position in (0, 99, 100, 163, 299):
        token = (position - 100) % length
        np.testing.assert_array_equal(
          table[request, position], trace.experts[request, token, :5]
        )

  @parameterized.parameters(
    ('gpt-oss-20b-shape', True), ('facts', True), ('qwen3-30b-a3b', False)
  )
  def test_whom_the_bundled_trace_fits(self, shape: str, fits: bool):
    c = bench_models.MODELS[shape]
    model = (len(c.moe_ids), c.num_experts, c.top_k)
    if fits:
      found = cells.recording('trace', '', *model, requests=8)
      self.assertGreaterEqual(found.layers, model[0])
      return
    with self.assertRaisesRegex(ValueError, r'24 layers of 32 .* 48 of 128'):
      cells.recording('trace', '', *model, requests=8)

  @parameterized.parameters('uniform', 'zipf')
  def test_synthetic_routing_is_a_recording(self, routing: str):
    found = cells.recording(routing, '', 3, 8, 2, 4)
    trace_lib.check(found)
    self.assertEqual(found.experts.shape, (8, 256, 3, 2))
    spread = found.popularity().reshape(3, 8).max(axis=1) / (8 * 256 * 2 / 8)
    self.assertEqual(bool((spread > 1.3).all()), routing == 'zipf', spread)
    self.assertIsNone(cells.recording('model', '', 3, 8, 2, 4))


if __name__ == '__main__':
  absltest.main()
