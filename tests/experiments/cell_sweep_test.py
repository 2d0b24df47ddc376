"""Sweeps: every cell once, in any order, gone on with where they stopped."""

import functools
import pathlib
import tempfile

from absl.testing import absltest

from bevy_jax.experiments import cell_sweep

_COLUMNS = ('name', 'share', 'square', 'note')


def _square(key, ran=None, stop=''):
  """The other columns of a cell; told to whoever asks that it ran."""
  if ran is not None:
    ran.append(key['name'])
  if key['name'] == stop:
    raise KeyboardInterrupt
  return {'square': key['share'] ** 2}


def _plan(folder, names, work, **options):
  tasks = [
    cell_sweep.Task({'name': name, 'share': n / 4}, work, **options)
    for n, name in enumerate(names)
  ]
  path = pathlib.Path(folder) / 'rows.csv'
  return cell_sweep.Plan('squares', path, _COLUMNS, tasks)


class SweepTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._folder = self.enter_context(tempfile.TemporaryDirectory())

  def test_goes_on_where_it_was_stopped(self):
    """Seen to fail with a file that is begun anew."""
    ran: list[str] = []
    stopped = functools.partial(_square, ran=ran, stop='c')
    with self.assertRaises(KeyboardInterrupt):
      cell_sweep.run([_plan(self._folder, 'abcd', stopped)], 1, ran.append)
    work, again = functools.partial(_square, ran=ran), list[str]()
    ran.clear()
    plan = _plan(self._folder, 'abcd', work)
    (rows,) = cell_sweep.run([plan], 1, again.append)
    self.assertEqual(ran, ['c', 'd'])
    self.assertEqual([row['name'] for row in rows], list('abcd'))
    squares = [row['square'] for row in rows]
    self.assertEqual(squares, [0, 1 / 16, 1 / 4, 9 / 16])
    self.assertStartsWith(again[-1], '2/2 squares: d 0.75;')
    self.assertIn('left', again[-1])

  def test_a_line_that_was_cut_off_runs_again(self):
    """Seen to fail with the last line taken as it is."""
    work = _square
    cell_sweep.run([_plan(self._folder, 'ab', work)], 1, print)
    path = pathlib.Path(self._folder) / 'rows.csv'
    whole = path.read_text()
    for lost in (1, 2, 4, 12):
      path.write_text(whole[:-lost])
      (rows,) = cell_sweep.run([_plan(self._folder, 'ab', work)], 1, print)
      self.assertEqual(rows[1]['square'], 1 / 16)
      self.assertEqual(path.read_text(), whole)

  def test_another_table_is_refused(self):
    cell_sweep.run([_plan(self._folder, 'ab', _square)], 1, print)
    other = _plan(self._folder, 'ab', _square)._replace(columns=_COLUMNS[:3])
    with self.assertRaisesRegex(ValueError, 'columns of another table'):
      cell_sweep.run([other], 1, print)

  def test_what_measures_comes_last_and_here(self):
    """Seen to fail with all tasks in one list."""
    ran: list[str] = []
    alone = _plan(
      self._folder, 'ab', functools.partial(_square, ran=ran), alone=True,
      seconds=9,
    )  # fmt: skip
    shared = _plan(self._folder, 'cd', functools.partial(_square, ran=ran))
    both = alone._replace(tasks=[*alone.tasks, *shared.tasks])
    (rows,) = cell_sweep.run([both], 1, lambda text: None)
    self.assertEqual(ran, ['c', 'd', 'a', 'b'])
    self.assertEqual([row['name'] for row in rows], list('abcd'))


if __name__ == '__main__':
  absltest.main()
