"""The parts of the default, each off in turn, on one small cell."""

import csv
import pathlib
import tempfile

from absl.testing import absltest

from bevy_jax.experiments import default_parts, sweep


class DefaultPartsTest(absltest.TestCase):
  def test_every_part_in_one_table(self):
    """Seen to fail with the first part as it comes in all rows."""
    heard: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'rows.csv'
      how = sweep.How(path=str(path), resume=True, say=heard.append)
      found = default_parts.main(default_parts.Parts(quick=True), how)
      rows = found.report['rows']
      again = default_parts.main(default_parts.Parts(quick=True), how)
      self.assertEqual(again.report['rows'], rows)
      with path.open(encoding='utf-8', newline='') as file:
        self.assertLen(list(csv.DictReader(file)), len(rows))
    by = {row['part']: row for row in rows}
    self.assertEqual(list(by), list(default_parts.PARTS))
    self.assertEqual(by['whole']['of_whole'], 1)
    self.assertLess(by['lockstep']['of_whole'], 1)
    self.assertEqual(by['lockstep']['max_lag'], 0)
    self.assertGreater(by['lag unbounded']['max_lag'], 1)
    self.assertNotEqual(by['no prefetch']['of_whole'], 1)
    for name in default_parts.PARTS:
      self.assertIn(name, found.shown[0])
    self.assertLen(heard, 1)  # The second time nothing ran.

  def test_a_folder_that_is_not_there(self):
    with self.assertRaisesRegex(ValueError, 'make its folder'):
      how = sweep.How(path='/nowhere/at/all.csv')
      default_parts.main(default_parts.Parts(quick=True), how)


if __name__ == '__main__':
  absltest.main()
