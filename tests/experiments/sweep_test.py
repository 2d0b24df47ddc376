"""Sweeps: rows as they come, going on, Ctrl-C, and who runs them."""

import csv
import importlib.util
import operator
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from unittest import mock

import pytest
from absl.testing import absltest

from bevy_jax.experiments import executors, sweep

_FORM = sweep.Form(('name', 'size', 'twice'), ('name', 'size'), ('name',))


def _double(name: str, size: int, known: list[sweep.Row]) -> list[sweep.Row]:
  if size < 0:
    raise ValueError(f'{name} is too small')
  if known:
    return []
  return [{'name': name, 'size': size, 'twice': 2 * size}]


def _tasks(*sizes: int) -> list[sweep.Task]:
  return [
    sweep.Task(('a', n), _FORM.where({'name': 'a', 'size': n}), f'a {n}')
    for n in sizes
  ]


class SweepTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory())
    self.path = pathlib.Path(folder) / 'rows.csv'
    self.said: list[str] = []
    self.how = sweep.How(path=str(self.path), resume=True, say=self.said.append)

  def run_it(self, *sizes: int) -> list[int]:
    rows = sweep.run(_tasks(*sizes), _double, _FORM, self.how)
    return [row['twice'] for row in rows]

  def test_it_goes_on_and_keeps_the_order(self):
    """Seen to fail with rows in the order in which they came."""
    self.assertEqual(self.run_it(3, 5), [6, 10])
    self.assertEqual(self.run_it(1, 5, 3, 7), [2, 10, 6, 14])
    self.assertLen(self.said, 4)
    self.assertIn('4/4 a 7: 1 runs', self.said[-1])
    self.assertIn('about 0.0 left', self.said[-1])
    rows = _FORM.load(self.path)
    self.assertEqual([row['size'] for row in rows], [1, 5, 3, 7])
    # Rows of others stay, a line that was cut off goes, whatever was cut.
    self.path.write_text(self.path.read_text()[:-2])
    self.assertEqual(self.run_it(7), [14])
    self.assertEqual([r['size'] for r in _FORM.load(self.path)], [1, 5, 3, 7])

  def test_what_a_task_raises_keeps_the_rows_before_it(self):
    with self.assertRaisesRegex(ValueError, 'a is too small'):
      self.run_it(2, -1, 4)
    self.assertEqual([r['size'] for r in _FORM.load(self.path)], [2])

  def test_time_left_goes_by_weight(self):
    """Seen to fail with weights of one."""
    clock = sweep.Clock([2, 4], self.said.append)
    clock._begun -= 60
    clock.done('x', 2, 5)
    self.assertIn('1/2 x: 5 runs, 1.0 min, about 2.0 left', self.said[0])


class ExecutorTest(absltest.TestCase):
  def test_names(self):
    self.assertEqual(executors.make('local', 3), executors.Local(3))
    with self.assertRaisesRegex(ValueError, 'add --executor=ray'):
      executors.make('local', 2, 'auto')

  @mock.patch.dict(os.environ, {'RAY_ADDRESS': ''})
  def test_which_ray_is_asked(self):
    """Seen to fail with processors asked of a cluster that is there."""
    ray = mock.Mock(spec=['init', 'remote', 'wait', 'shutdown'])
    with (
      mock.patch.object(executors, '_ray', return_value=ray),
      socket.create_server(('127.0.0.1', 0)) as server,
    ):
      here = f'127.0.0.1:{server.getsockname()[1]}'
      quiet = {'log_to_driver': False, 'logging_level': 'ERROR'}
      for given, told in ((here, ''), ('', here), ('auto', here)):
        with mock.patch.dict(os.environ, {'RAY_ADDRESS': told}):
          self.assertEmpty(list(executors.Ray(given, 3).each(_double, [])))
        ray.init.assert_called_with(given or told, **quiet)
      self.assertEmpty(list(executors.Ray('', 3).each(_double, [])))
      ray.init.assert_called_with(
        'local', num_cpus=3, include_dashboard=False, **quiet
      )
      ray.init.side_effect = ConnectionError('refused')
      with self.assertRaisesRegex(ValueError, 'does not let us in: refused'):
        list(executors.Ray(here).each(_double, []))
      with self.assertRaisesRegex(ValueError, 'no Ray cluster answers at 127'):
        list(executors.Ray('127.0.0.1:9').each(_double, []))

  def test_errors_and_results_of_processes(self):
    # Of the library: processes of the wheel's run cannot import this file.
    calls = [(2, n) for n in (1, 2, 3)]
    found = dict(executors.Local(2).each(operator.mul, calls))
    self.assertEqual([found[n] for n in range(3)], [2, 4, 6])
    with self.assertRaisesRegex(ValueError, 'invalid literal'):
      list(executors.Local(2).each(int, [('x',)]))


@pytest.mark.slow
class InterruptTest(absltest.TestCase):
  def _wait_until_gone(self, group: int) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
      try:
        os.killpg(group, 0)
      except ProcessLookupError:
        return
      time.sleep(0.05)
    self.fail('workers outlive the sweep')

  def test_ctrl_c_ends_workers_that_run_and_that_wait(self):
    """Seen to fail with workers that nobody ends."""
    script = (
      'import sys, time\n'
      'from bevy_jax.experiments import executors\n'
      'try:\n'
      '  for _ in executors.Local(2).each(time.sleep, [(0,), (60,)]):\n'
      '    print("one", flush=True)\n'
      'except KeyboardInterrupt:\n'
      '  sys.exit(130)'
    )
    with subprocess.Popen(
      [sys.executable, '-c', script],
      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
      start_new_session=True,
    ) as child:  # fmt: skip
      assert child.stdout is not None
      self.assertEqual(child.stdout.readline(), 'one\n')
      time.sleep(0.5)
      os.killpg(child.pid, signal.SIGINT)
      _, said = child.communicate(timeout=30)
    self.assertEqual((child.returncode, said), (130, ''))
    self._wait_until_gone(child.pid)

  def test_ctrl_c_leaves_rows_and_a_sweep_goes_on(self):
    """Seen to fail with 0.0 read as 0."""
    folder = self.enterContext(tempfile.TemporaryDirectory())
    path = pathlib.Path(folder) / 'rows.csv'
    command = [
      sys.executable, '-u', '-m', 'bevy_jax.experiments.ablate',
      '--trace=bundled', '--requests=1,8', '--axes=cache,requests',
      '--caches=0.25,0.5', '--tokens=0:80', '--evictions=reuse',
      f'--workdir={folder}',
    ]  # fmt: skip
    with subprocess.Popen(
      command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
      start_new_session=True,
    ) as child:  # fmt: skip
      assert child.stdout is not None
      while '1/4' not in child.stdout.readline():
        pass
      begun = time.monotonic()
      os.killpg(child.pid, signal.SIGINT)  # As a terminal does it.
      _, said = child.communicate(timeout=30)
    self.assertEqual(child.returncode, 130, said)
    self.assertLess(time.monotonic() - begun, 10)
    self.assertEqual(said.count('\n'), 1, said)
    self._wait_until_gone(child.pid)
    with path.open(encoding='utf-8') as file:
      first = list(csv.DictReader(file))
    self.assertNotEmpty(first)
    # Who runs it does not tell one sweep from another.
    again = subprocess.run(
      [*command, '--jobs=1'], capture_output=True, text=True, check=False
    )
    self.assertEqual(again.returncode, 0, again.stderr)
    self.assertIn('it goes on there', again.stdout)
    with path.open(encoding='utf-8') as file:
      rows = list(csv.DictReader(file))
    self.assertLen(rows, 4)
    for row in first:
      self.assertIn(row, rows)


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec('ray') is None,
  reason='ray is not installed; it comes with the extra `ray`',
)
class RayTest(absltest.TestCase):
  """Starting a Ray of our own takes most of the time."""

  def test_the_same_rows_as_local(self):
    """Seen to fail with one task left out by `Ray.each`."""
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    found = {}
    for name in executors.NAMES:
      path = folder / f'{name}.csv'
      done = subprocess.run(
        [
          sys.executable, '-m', 'bevy_jax.experiments.ablate',
          '--trace=bundled', '--requests=1,2', '--axes=eviction,requests',
          '--evictions=reuse,lru', '--tokens=0:24', '--warmup=4',
          f'--executor={name}', f'--csv={path}', '--quiet',
        ],
        capture_output=True, text=True, check=False,
      )  # fmt: skip
      self.assertEqual(done.returncode, 0, done.stderr)
      with path.open(encoding='utf-8', newline='') as file:
        found[name] = list(csv.DictReader(file))
    self.assertLen(found['local'], 4)
    self.assertEqual(found['ray'], found['local'])

  def test_an_error_is_the_task_s_own(self):
    script = (
      'from bevy_jax.experiments import executors\n'
      'try:\n'
      '  list(executors.Ray(jobs=1).each(int, [("x",)]))\n'
      'except ValueError as error:\n'
      '  print(type(error).__name__, error)'
    )
    done = subprocess.run(
      [sys.executable, '-c', script],
      capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = "ValueError invalid literal for int() with base 10: 'x'\n"
    self.assertEqual(done.stdout, told, done.stderr)


if __name__ == '__main__':
  absltest.main()
