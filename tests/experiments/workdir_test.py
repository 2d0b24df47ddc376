"""The folder of a launcher: nothing is lost, one run at a time."""

import json
import pathlib
import tempfile

from absl.testing import absltest

from bevy_jax.experiments import workdir


class WorkdirTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.said: list[str] = []

  def opened(self, config, **how):
    config = {'launcher': 'x', **config}
    facts = {'command': 'x --y', 'seed': 7}
    return workdir.opened(
      str(self.folder), config, facts, self.said.append, **how
    )

  def config(self):
    return json.loads((self.folder / 'config.json').read_text('utf-8'))

  def test_no_folder_writes_nothing(self):
    with workdir.opened('', {'launcher': 'x'}, {}, self.said.append) as place:
      self.assertEqual(place.path('', 'a.csv'), '')
      self.assertEqual(place.path('b.csv', 'a.csv'), 'b.csv')
      place.note({'a': 1})
      place.end(0)
    self.assertEmpty(list(self.folder.iterdir()))

  def test_another_run_puts_the_files_aside(self):
    """Seen to fail without `_put_aside`."""
    for value in (1, 2):
      with self.opened({'value': value}, resumable=True) as place:
        path = pathlib.Path(place.path('', 'rows.csv'))
        self.assertFalse(path.exists())
        path.write_text(str(value))
        (self.folder / 'figure.png').write_text(str(value))
        place.note({'value': value})
        place.end(0)
    self.assertIn('another run; its files are now in earlier/1', self.said[0])
    for name in ('rows.csv', 'figure.png'):
      self.assertEqual((self.folder / name).read_text(), '2')
      self.assertEqual((self.folder / 'earlier/1' / name).read_text(), '1')
    self.assertEqual(self.config()['seed'], 7)
    self.assertLen(self.config()['runs'], 2)
    lines = (self.folder / 'metrics.jsonl').read_text().splitlines()
    notes = [json.loads(line) for line in lines]
    self.assertEqual([(n['run'], n['value']) for n in notes], [(1, 1), (2, 2)])

  def test_a_sweep_goes_on_and_a_run_begins_again(self):
    """Seen to fail with every launcher resumable."""
    with self.opened({}, resumable=True) as place:
      pathlib.Path(place.path('', 'rows.csv')).write_text('half')
    with self.opened({}, resumable=True) as place:
      self.assertTrue(place.goes_on)
      self.assertIn('it goes on there', self.said[-1])
      self.assertEqual((self.folder / 'rows.csv').read_text(), 'half')
    with self.opened({}) as place:
      self.assertFalse(place.goes_on)
    self.assertEqual((self.folder / 'earlier/1/rows.csv').read_text(), 'half')
    self.assertNotIn('ended', self.config()['runs'][0])

  def test_rows_of_the_report_are_noted_where_nobody_did(self):
    with self.opened({}) as place:
      place.note_all({'rows': [{'a': 1}, {'a': 2}]})
      place.note_all({'rows': [{'a': 3}]})
    lines = (self.folder / 'metrics.jsonl').read_text().splitlines()
    self.assertEqual([json.loads(line)['a'] for line in lines], [1, 2])

  def test_one_run_at_a_time(self):
    """Seen to fail without the lock."""
    with (
      self.opened({}),
      self.assertRaisesRegex(ValueError, 'another run writes into'),
      self.opened({}),
    ):
      pass
    with self.opened({}):
      pass  # The lock is given back.

  def test_a_config_of_others_is_left_alone(self):
    path = self.folder / 'config.json'
    path.write_text('{"model_type": "olmoe"}')
    with (
      self.assertRaisesRegex(ValueError, 'not written by a launcher'),
      self.opened({}),
    ):
      pass
    self.assertEqual(path.read_text(), '{"model_type": "olmoe"}')


if __name__ == '__main__':
  absltest.main()
