"""The whole report, tiny: stopped once, gone on with, and read again."""

import json
import pathlib
import re
import tempfile

from absl.testing import absltest

from bevy_jax.experiments import cell_sweep, reproduction

_QUICK = reproduction.Choice(quick=True)


def _stop_at(start):
  """Somebody who presses Ctrl-C when told of a cell."""

  def say(text):
    if text.startswith(start):
      raise KeyboardInterrupt

  return say


class ReproductionTest(absltest.TestCase):
  def test_stopped_and_gone_on_with(self):
    """Seen to fail without rows of the first run in those of the second."""
    cells = sum(len(made.tasks) for made in reproduction.studies(_QUICK))
    heard: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
      with self.assertRaises(KeyboardInterrupt):
        reproduction.main(folder, _QUICK, 1, _stop_at('5/'))
      path = reproduction.main(folder, _QUICK, 1, heard.append)
      rest = [text for text in heard if re.match(r'\d+/\d+ ', text)]
      self.assertLen(rest, cells - 5)
      self.assertStartsWith(rest[-1], f'{cells - 5}/{cells - 5} ')
      for made in reproduction.studies(_QUICK):
        self._check_folder(path.parent / made.name, made)
      self._check_report(path, heard)

  def _check_folder(self, folder, made):
    """Its files, and that all of them tell of the same rows."""
    names = {path.suffix: path.name for path in folder.iterdir()}
    self.assertEqual(set(names), {'.csv', '.json', '.png', '.svg'})
    result = json.loads((folder / 'result.json').read_text())
    for name in ('versions', 'hardware', 'seed', 'command', 'config'):
      self.assertIn(name, result)
    self.assertEqual(result['config']['base']['tokens'], 4)
    self.assertLen(result['rows'], len(made.tasks))
    rows = cell_sweep.load(folder / 'rows.csv', made.columns)
    self.assertLen(rows, len(made.tasks))
    for row, task in zip(result['rows'], made.tasks, strict=True):
      self.assertEqual({name: row[name] for name in task.key}, task.key)

  def _check_report(self, path, heard):
    """It links nowhere, has every figure, and the sentences that were said.

    Seen to fail with figures as links to their files.
    """
    text = path.read_text()
    self.assertEmpty(re.findall(r'https?://|<script|<link|url\(', text))
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', text)
    self.assertLen(sources, 7)
    for source in sources:
      self.assertStartsWith(source, 'data:image/svg+xml;base64,')
    for made in reproduction.studies(_QUICK):
      self.assertIn(f'<h2 id="{made.name}">', text)
    self.assertGreater(sum(line.startswith('  ') for line in heard), 15)

  def test_another_configuration_is_refused(self):
    """Seen to fail with folders that are taken as they are."""
    with tempfile.TemporaryDirectory() as folder:
      one = _QUICK._replace(only=('scheduler_ablation',))
      with self.assertRaises(KeyboardInterrupt):
        reproduction.main(folder, one, 1, _stop_at('1/'))
      kept = pathlib.Path(folder) / 'scheduler_ablation' / 'config.json'
      before = kept.read_text()
      with self.assertRaisesRegex(ValueError, "'first': 0.* there and .*2"):
        reproduction.main(folder, one._replace(first=2), 1, print)
      self.assertEqual(kept.read_text(), before)

  def test_a_name_that_is_unknown(self):
    choice = _QUICK._replace(only=('thruput',))
    with self.assertRaisesRegex(ValueError, "did you mean 'throughput'"):
      reproduction.studies(choice)

  def test_the_choice_reaches_every_configuration(self):
    """Seen to fail with the demo left in."""
    choice = reproduction.Choice(first=3, seed=7, demo=False)
    for made in reproduction.studies(choice):
      self.assertEqual(made.config.base.first, 3)
      self.assertEqual(made.config.seed, 7)
      self.assertFalse(any(task.alone for task in made.tasks))
    measured = reproduction.studies(choice._replace(demo=True))
    self.assertEqual(
      [any(task.alone for task in made.tasks) for made in measured],
      [True, False, True, False, True],
    )


if __name__ == '__main__':
  absltest.main()
