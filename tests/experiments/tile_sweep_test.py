"""The search for tiles, on made-up times; a sweep of a small shape."""

from absl.testing import absltest

from bevy_jax.experiments import tile_sweep
from bevy_jax.layers import kernel_tiles


class SearchTest(absltest.TestCase):
  def test_it_goes_where_it_is_faster_step_by_step(self):
    start, goal = kernel_tiles.Tile(64, 128, 4, 3), (128, 64, 4, 5)
    tried = []

    def measure(tile):
      tried.append(tile)
      return 100 + 10 * sum(a != b for a, b in zip(tile, goal, strict=True))

    found = tile_sweep.search(start, measure)
    # Stages 5 is two steps away, and the first of them helps nobody.
    self.assertEqual(found.tile, (128, 64, 4, 3))
    self.assertEqual((found.us, found.before_us), (110, 130))
    self.assertLen(set(tried), len(tried))

  def test_noise_changes_nothing(self):
    start = kernel_tiles.Tile(64, 128, 4, 3)
    found = tile_sweep.search(start, lambda tile: 100 - (tile != start))
    self.assertEqual(found.tile, start)

  def test_what_cannot_run_is_left(self):
    start = kernel_tiles.Tile(64, 128, 4, 3)
    found = tile_sweep.search(
      start, lambda tile: 5.0 if tile == start else float('inf')
    )
    self.assertEqual(found, (start, 5.0, 5.0))

  def test_what_is_fixed_stays(self):
    start = kernel_tiles.Tile(64, 128, 4, 3)
    found = tile_sweep.search(
      start, lambda tile: tile.outer + tile.inner, ['inner']
    )
    self.assertEqual(found.tile, start._replace(outer=16))


class SweepTest(absltest.TestCase):
  def test_both_kernels_run(self):
    sweep = tile_sweep.Sweep(tile_sweep.Case('tiny', 'int8', 2))
    for part in range(2):
      tile = kernel_tiles.expert(sweep.form, sweep.shape, 2)[part]
      self.assertTrue(0 < sweep.time(part, tile) < float('inf'))

  def test_a_profile_is_read_for_the_kernel_alone(self):
    events = [
      {'ph': 'M', 'pid': 1, 'name': 'process_name', 'args': {'name': '/GPU:0'}},
      {'ph': 'M', 'pid': 2, 'name': 'process_name', 'args': {'name': '/CPU'}},
      {'ph': 'X', 'pid': 1, 'name': 'down_int4', 'dur': 31.5},
      {'ph': 'X', 'pid': 1, 'name': 'gate_up_int4', 'dur': 60.0},
      {'ph': 'X', 'pid': 2, 'name': 'down_int4', 'dur': 900.0},
      {'ph': 'X', 'pid': 1, 'name': 'down_int4', 'dur': 32.0},
    ]
    self.assertEqual(tile_sweep.on_device(events, 'down'), [31.5, 32.0])


class TableTest(absltest.TestCase):
  def test_steps_of_a_sum_are_the_same_for_all_rows(self):
    """Seen to fail with the table of before: 256 for two rows, 64 for more."""
    tables = kernel_tiles._DEFAULT | kernel_tiles._MEASURED
    self.assertGreater(len(tables), 4)
    for kind, by_rows in tables.items():
      for kernel in zip(*by_rows.values(), strict=True):
        self.assertLen({tile.inner for tile in kernel}, 1, kind)

  def test_unknown_shapes_get_the_default(self):
    for form in ('float', 'int8:32', 'int4:64:zero'):
      for rows in (1, 2, 3, 64, 65, 1000):
        for tile in kernel_tiles.expert(form, (3, 17, 19), rows):
          self.assertIsInstance(tile, kernel_tiles.Tile)
    few = kernel_tiles.expert('float', (3, 17, 19), 4)
    many = kernel_tiles.expert('float', (3, 17, 19), 5)
    self.assertNotEqual(few, many)


if __name__ == '__main__':
  absltest.main()
