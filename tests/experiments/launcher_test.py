"""What all launchers share: help, typos, exit codes, streams, the folder."""

import ast
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from absl import flags
from absl.testing import absltest, parameterized

from bevy_jax import experiments
from bevy_jax.experiments import flag_help, outcome

_FOLDER = pathlib.Path(experiments.__path__[0])
# Calls of launchers, or of code in their place, each in a fork of a process
# that has imported all modules that launchers need. A fork ends at once: what
# it would take down is not its own.
_FORKS = """
import importlib, json, os, runpy, sys, tempfile
modules, calls = json.loads(sys.argv[1])
for name in modules:
  try:
    importlib.import_module('bevy_jax.experiments.' + name)
  except ImportError:
    pass  # It needs an extra, and so would a launcher that imports it.
told = []
for name, arguments, code in calls:
  with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
    child = os.fork()
    if not child:
      os.dup2(out.fileno(), 1)
      os.dup2(err.fileno(), 2)
      sys.argv[:] = [name + '.py', *arguments]
      try:
        if code:
          exec(code)
        runpy.run_module(
          'bevy_jax.experiments.' + name, run_name='__main__', alter_sys=True
        )
      except SystemExit as end:
        sys.stdout.flush()
        os._exit(end.code)
      os._exit(99)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = []
    for file in (out, err):
      file.seek(0)
      said.append(file.read().decode())
    told.append([ended, *said])
print(json.dumps(told))
"""
_REPLAY = (
  '--trace=bundled', '--model_shape=gpt-oss-20b:int4', '--requests=2',
  '--skip=1', '--tokens=4', '--nobounds',
)  # fmt: skip
_NOWHERE = '--timeline=/no/such/folder/x.json.gz'
_MINE = 'from bevy_jax.experiments import launcher, outcome\n'
_MINE += 'main = lambda *_: {}\nlauncher.run(main, dict)'
# Name -> launcher, arguments, code in its place.
_CALLS = {
  'word': ('decode', ['jsn=1'], ''),
  'needed': ('convert', [], ''),
  'shape': ('replay', ['--model_shape=gpt-oss-20b:int3'], ''),
  'folder': ('replay', [*_REPLAY, '--workdir=/dev/null/x'], ''),
  'failed': ('replay', [*_REPLAY, _NOWHERE], ''),
  'debug': ('replay', [*_REPLAY, _NOWHERE, '--debug'], ''),
  'missed': (
    'mine', [], _MINE.format('outcome.Outcome({}, ("no",), outcome.FAILED)')
  ),
  'fault': ('mine', [], _MINE.format('dict()["x"]')),
}  # fmt: skip
Told = tuple[int, str, str]  # Exit code, stdout, stderr.


def _launchers() -> list[str]:
  """Every file that is there to be run."""
  return [
    path.stem
    for path in sorted(_FOLDER.glob('*.py'))
    if any(
      isinstance(node, ast.If) and '__main__' in ast.dump(node.test)
      for node in ast.parse(path.read_text('utf-8')).body
    )
  ]


@functools.cache
def _told() -> dict[str, Told]:
  """What came of `_CALLS`, and of --help and a typo for every launcher."""
  calls = dict(_CALLS)
  for name in _launchers():
    calls[f'{name} help'] = name, ['--help'], ''
    calls[f'{name} typo'] = name, ['--workdr=x'], ''
  others = {path.stem for path in _FOLDER.glob('*.py')} - set(_launchers())
  others -= {'__init__', 'sweep_flags'}  # Its flags are for who asks for them.
  asked = json.dumps([sorted(others), list(calls.values())])
  done = subprocess.run(
    [sys.executable, '-c', _FORKS, asked],
    capture_output=True, text=True, check=True,
  )  # fmt: skip
  told = [(code, out, err) for code, out, err in json.loads(done.stdout)]
  return dict(zip(calls, told, strict=True))


def _launch(
  module: str, *arguments: str, **settings: str
) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, '-m', f'bevy_jax.experiments.{module}', *arguments],
    env=os.environ | settings, capture_output=True, text=True, check=False,
  )  # fmt: skip


class EveryLauncherTest(parameterized.TestCase):
  def test_they_are_all_found(self):
    self.assertContainsSubset({'decode', 'ablate', 'replay'}, _launchers())
    self.assertGreater(len(_launchers()), 15)

  @parameterized.parameters(*_launchers())
  def test_help_is_short_and_grouped(self, name):
    """Seen to fail with a topic taken out of `flag_help.TOPICS`."""
    code, out, err = _told()[f'{name} help']
    self.assertEqual(code, outcome.OK, err)
    lines = out.splitlines()
    self.assertLessEqual(len(lines), 60)
    self.assertLessEqual(max(map(len, lines)), 80)
    for flag in ('--workdir=', '--report=', '--[no]quiet', '--[no]json'):
      self.assertIn(flag, out)
    self.assertNotIn('Else:', out)  # A flag that no topic has.
    self.assertNotIn('--pdb', out)
    self.assertIn(f'experiments.{name}', out)  # How it is called.

  @parameterized.parameters(*_launchers())
  def test_a_typo_offers_the_nearest(self, name):
    code, out, err = _told()[f'{name} typo']
    self.assertEqual((code, out), (outcome.USAGE, ''))
    self.assertEqual(
      err, f'{name}: --workdr is no flag; did you mean --workdir?\n'
    )


class ExitCodesTest(parameterized.TestCase):
  @parameterized.parameters(
    ('word', outcome.USAGE, "decode: 'jsn=1' is no flag; did you mean --json?"),
    ('needed', outcome.USAGE, 'not given, but needed: --source=, --target='),
    ('shape', outcome.USAGE, "replay: experts cannot be stored as 'int3'"),
    ('folder', outcome.USAGE, '/dev/null/x'),
    ('failed', outcome.FAILED, 'replay: /no/such/folder'),
    ('debug', outcome.FAILED, 'replay: /no/such/folder'),
    ('missed', outcome.FAILED, ''),
    ('fault', outcome.FAULT, "mine: a fault of this program: KeyError('x')"),
  )
  def test_one_paragraph_on_stderr(self, name, wanted, words):
    """Seen to fail with build errors as failures, and with no `except`."""
    code, out, err = _told()[name]
    self.assertEqual(code, wanted, err)
    self.assertIn(words, err)
    self.assertEqual('Traceback' in err, name == 'debug')
    if name == 'missed':
      self.assertEndsWith(out, 'no\n')
    elif name != 'debug':
      self.assertLen(err.splitlines(), 1)


class FlagHelpTest(absltest.TestCase):
  def test_names_and_values(self):
    values = flags.FlagValues()
    flags.DEFINE_enum('scope', 'lines', ['lines', 'all'], 'Which.', values)
    flags.DEFINE_bool('bounds', True, 'Whether.', values)
    flags.DEFINE_integer('count', 3, 'How many.', flag_values=values)
    own = [values[name] for name in values]

    def said(*argv: str) -> str:
      try:
        values(['x', *argv])
      except flags.Error as error:
        return flag_help.explain(error, own)
      raise AssertionError(argv)

    self.assertEqual(
      said('--scope=line'),
      "--scope cannot be 'line'; did you mean lines? Known: lines, all.",
    )
    self.assertIn('did you mean --bounds?', said('--bonds'))
    self.assertIn('--help lists them', said('--zzz'))
    self.assertIn('count', said('--count=many'))
    shown = flag_help.text('Words.', own)
    self.assertIn('--scope=lines           Which. One of: lines, all.', shown)
    self.assertIn('On unless told otherwise', shown)
    self.assertNotIn('<lines|all>', shown)


@pytest.mark.slow
class StreamsTest(absltest.TestCase):
  """Real processes: what comes out where, and with which exit code."""

  def test_config_first_table_last_and_the_folder(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    place = folder / 'new' / 'run'
    ran = _launch('replay', *_REPLAY, f'--workdir={place}')
    self.assertEqual(ran.returncode, outcome.OK, ran.stderr)
    lines = ran.stdout.splitlines()
    first = json.loads(lines[0])
    self.assertEqual((first['launcher'], first['requests']), ('replay', 2))
    self.assertIn('jax', first['versions'])
    self.assertIn('no device ran', lines[-1])
    self.assertNotIn('\x1b', ran.stdout)  # No colours in a pipe.
    config = json.loads((place / 'config.json').read_text('utf-8'))
    self.assertIn('replay --trace=bundled', config['command'])
    self.assertNotEmpty(config['hardware'])
    self.assertEqual(config['runs'][0]['exit_code'], 0)
    report = (place / 'report.json').read_text('utf-8')
    self.assertGreater(json.loads(report)['tokens_per_s'], 0)
    # Again, and otherwise: nothing is lost, both are told.
    other = _launch(
      'replay', *_REPLAY, f'--workdir={place}', '--cache=0.75', '--json'
    )
    self.assertEqual(other.returncode, outcome.OK, other.stderr)
    self.assertIn('its files are now in earlier/1', other.stderr)
    self.assertEqual((place / 'earlier/1/report.json').read_text(), report)
    config = json.loads((place / 'config.json').read_text('utf-8'))
    self.assertLen(config['runs'], 2)
    rows = (place / 'metrics.jsonl').read_text('utf-8').splitlines()
    self.assertEqual([json.loads(row)['run'] for row in rows], [1, 2])
    # With --json stdout is the report and nothing else.
    told = json.loads(other.stdout)
    self.assertEqual(told, json.loads((place / 'report.json').read_text()))
    self.assertGreater(told['slots'], json.loads(report)['slots'])

  def test_quiet_is_the_result_alone(self):
    ran = _launch('replay', *_REPLAY, '--quiet')
    self.assertEqual((ran.returncode, ran.stderr), (outcome.OK, ''))
    self.assertIn('tokens/s', ran.stdout)
    self.assertNotIn('{', ran.stdout)

  def test_ctrl_c(self):
    script = (
      'from bevy_jax.experiments import launcher\n'
      'import time\n'
      'def main(asked, place):\n'
      '  print("here", flush=True)\n'
      '  time.sleep(60)\n'
      'launcher.run(main, dict, resumable=True)'
    )
    with subprocess.Popen(
      [sys.executable, '-c', script],
      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
      assert child.stdout is not None
      while 'here' not in child.stdout.readline():
        pass
      time.sleep(0.1)
      child.send_signal(signal.SIGINT)
      _, said = child.communicate(timeout=30)
    self.assertEqual(child.returncode, outcome.INTERRUPTED)
    self.assertIn('interrupted; the same command goes on', said)


if __name__ == '__main__':
  absltest.main()
