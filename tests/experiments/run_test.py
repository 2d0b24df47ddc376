"""The main job on the demo model, as its user runs it, and its parts."""

import functools
import json
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from absl.testing import absltest, parameterized

from bevy_jax import config as config_lib
from bevy_jax import events, trace
from bevy_jax.experiments import configs, outcome

_REFUSED = (
  ('--cache=2', 'at least 4 slots'),
  ('--scheduler=lokstep', "did you mean 'lockstep'"),
  ('--compare=runahead:lr', "did you mean 'lru'"),
  ('--compare=runahead:lru:nextgate', "did you mean 'next_gate'"),
  ('--prefetch=oracle', 'no running engine can know'),
  ('--prompts=nowhere.jsonl', 'does not exist'),
  ('--config=dmo', "did you mean 'demo'"),
  ('--link=throttled:fast', 'throttled:GB_PER_S'),
  ('--link=balanced:2', 'between 0 and 1'),
  ('--set=engine.chunk=x', 'expected a value of type int'),
  ('--model=/no/such/model', 'no/such/model'),
  ('--count=-1', 'at least 0'),
  ('--report=/no/such/folder/r.json', 'make it first'),
  ('--record=/no/such/folder/r.npz', 'make it first'),
  ('--temperature=-1', 'temperature is -1'),
)
# The launcher once a flag, each in a fork: importing takes 1.6 s, refusing .03.
_FORKS = """
import json, os, runpy, sys, tempfile
from bevy_jax.experiments import job
module, flags, seen = sys.argv[1], sys.argv[2:], []
for flag in flags:
  with tempfile.TemporaryFile() as said:
    child = os.fork()
    if not child:
      os.dup2(said.fileno(), 2)
      sys.argv[1:] = ['--new_tokens=4', '--count=1', flag]
      runpy.run_module(module, run_name='__main__', alter_sys=True)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said.seek(0)
    seen.append([code, said.read().decode()])
print(json.dumps(seen))
"""


def _launch(module: str, *flags: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, '-m', f'bevy_jax.experiments.{module}', *flags],
    capture_output=True,
    text=True,
    check=False,
  )


@functools.cache
def _refusals() -> dict[str, tuple[int, str]]:
  """Exit status and stderr of the launcher for every flag of `_REFUSED`."""
  flags = [flag for flag, _ in _REFUSED]
  done = subprocess.run(
    [sys.executable, '-c', _FORKS, 'bevy_jax.experiments.decode', *flags],
    capture_output=True,
    text=True,
    check=True,
  )
  seen = json.loads(done.stdout.splitlines()[-1])
  return {f: (code, text) for f, (code, text) in zip(flags, seen, strict=True)}


class DecodeTest(parameterized.TestCase):
  """Equal rows, caches and contexts: the children share compiled programs."""

  def test_compares_and_writes_report_and_events(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    done = _launch(
      'decode',
      '--config=demo',
      '--requests=2',
      '--count=3',
      '--new_tokens=6',
      '--link=throttled:0.5',
      '--cache=0.25',
      '--compare=lockstep,runahead:lru',
      f'--report={folder / "report.json"}',
      f'--events={folder / "events.jsonl"}',
      f'--record={folder / "run.npz"}',
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn(
      'runahead / lru gave the same tokens as lockstep / lfu_decayed',
      done.stdout,
    )
    first = json.loads(done.stdout.splitlines()[0])
    self.assertEqual(first['engine']['cache'], 0.25)
    runs = json.loads((folder / 'report.json').read_text('utf-8'))['runs']
    names = [r['config']['engine']['scheduler'] for r in runs]
    self.assertEqual(names, ['lockstep', 'runahead'])
    for number, run in enumerate(runs):
      self.assertIn('throttled to 0.5 GB/s', run['note'])
      self.assertEqual(run['new_tokens'], 18)
      self.assertEqual(run['slots'], 64)
      header, log = events.load(folder / f'events.jsonl.{number}')
      self.assertEqual(header['version'], events.VERSION)
      loads = sum(isinstance(e, events.LoadIssued) for e in log)
      self.assertEqual(loads, run['total']['loads'] + run['prefill_loads'])
    self.assertIn('trace of lockstep / lfu_decayed', done.stdout)
    found = trace.load(folder / 'run.npz')
    _, log = events.load(folder / 'events.jsonl.0')
    routed = [e for e in log if isinstance(e, events.Routed)]
    self.assertEqual(found.lengths.tolist(), [6, 6, 6])
    for e in routed:
      ids = found.experts[e.request, e.token, e.layer]
      self.assertEqual(ids.tolist(), list(e.experts))
    self.assertEqual(found.meta['model'], 'demo')
    self.assertEqual(found.meta['licence'], 'apache-2.0')
    self.assertIn('experiments.decode --config=demo', found.meta['source'])

  @parameterized.parameters(*_REFUSED)
  def test_refuses_in_one_paragraph(self, flag, message):
    code, said = _refusals()[flag]
    # Told from flags alone it is asked wrongly, else a failure.
    self.assertIn(code, (outcome.USAGE, outcome.FAILED))
    self.assertIn(message, said)
    self.assertNotIn('Traceback', said)

  def test_ctrl_c_prints_what_there_is_and_writes_the_report(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    report = folder / 'report.json'
    with subprocess.Popen(
      [
        sys.executable,
        '-u',
        '-m',
        'bevy_jax.experiments.decode',
        '--count=2',
        '--requests=2',
        '--new_tokens=30',
        '--cache=0.25',
        '--set=ignore_eos=true',
        '--link=throttled:0.01',
        f'--report={report}',
      ],
      stdout=subprocess.PIPE,
      text=True,
    ) as process:
      assert process.stdout is not None
      for line in process.stdout:
        if 'runahead / lfu_decayed' in line:
          break
      time.sleep(3)
      process.send_signal(signal.SIGINT)
      rest, _ = process.communicate(timeout=60)
    self.assertEqual(process.returncode, 130)
    self.assertIn('request 1 (interrupted)', rest)
    self.assertIn('The captain looked out', rest)
    self.assertGreater(json.loads(report.read_text())['tokens_per_s'], 0)

  def test_bench_measures_pairs(self):
    done = _launch(
      'bench', '--pairs=1', '--new_tokens=20', '--requests=2', '--cache=0.25'
    )
    # One pair of a few tokens need not reach the bar.
    met = re.search(r'met: (True|False)', done.stdout)
    assert met is not None, done.stderr
    code = outcome.judged(met[1] == 'True')
    self.assertEqual(done.returncode, code, done.stderr)
    for word in ('share_s', 'bar', 'ratio', 'host_us_a_launch'):
      self.assertIn(word, done.stdout)


class ConfigsTest(parameterized.TestCase):
  def test_every_named_config_is_sound(self):
    for name, make in configs.CONFIGS.items():
      config = make()
      self.assertNotEmpty(config.texts(), name)
      self.assertNotEmpty(config.variants(), name)
    compare = ('lockstep', 'runahead:lru', 'runahead:lru:history:depth=2')
    engine = config_lib.EngineConfig(eviction='lfu', prefetch='transition')
    self.assertEqual(
      configs.Decode(engine=engine, compare=compare).variants(),
      [
        ('lockstep', 'lfu', 'transition'),
        ('runahead', 'lru', 'transition'),
        ('runahead', 'lru', 'history:depth=2'),
      ],
    )
    self.assertEqual(
      configs.title(('lockstep', 'lru', 'none')), 'lockstep / lru'
    )

  def test_bad_prompts_name_the_line(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    path = folder / 'p.jsonl'
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n', encoding='utf-8')
    with pytest.raises(ValueError, match='line 2'):
      configs.Decode(prompts=str(path)).texts()


if __name__ == '__main__':
  absltest.main()
