"""Runs that stop, or are killed, and go on as if they had not been."""

import functools
import json
import lzma
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
import pytest
from absl.testing import absltest
from safetensors import numpy as safetensors_numpy

from bevy_jax.experiments import corpus, demo_model, train_loop, training

# What a killed child runs: the launcher, found as this process finds us.
_CHILD = 'import runpy, sys; sys.path[:0] = sys.argv.pop(1).split("|"); '
_CHILD += 'runpy.run_module("bevy_jax.experiments.train_demo", '
_CHILD += 'run_name="__main__", alter_sys=True)'


def _corpus(folder):
  texts = ('The cat sat on the mat, and so on. ', 'def f(x):\n  return x\n')
  for domain, text in zip(corpus.DOMAINS, texts, strict=True):
    for part, count in (('train', 60), ('valid', 9)):
      documents = [f'{i} {text * 9}' for i in range(count)]
      packed = lzma.compress(corpus.END.join(documents).encode())
      (folder / f'{domain}.{part}.txt.xz').write_bytes(packed)


class TrainLoopTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(tempfile.mkdtemp())
    _corpus(cls.folder)

  @classmethod
  def job(cls, work, **changes):
    settings = {
      'corpus': cls.folder,
      'work': cls.folder / work,
      'target': cls.folder / work / 'model',
      'tokenizer': cls.folder / 'tokenizer.json',
      'model': demo_model.micro(),
      'train': training.TrainConfig(batch=4, window=32, warmup=4),
      'steps': 12,
      'save_every': 4,
      'eval_every': 1000,
      'log_every': 2,
    }
    return train_loop.Job(**(settings | changes))

  @classmethod
  @functools.cache
  def straight(cls):
    """The run that nothing stopped; both tests compare with it."""
    run = train_loop.Run(cls.job('straight'))
    assert run.train()
    return run

  def weights(self, run):
    return jax.tree.leaves(jax.device_get(run.state.weights))

  def assert_same(self, run, other):
    for a, b in zip(self.weights(run), self.weights(other), strict=True):
      np.testing.assert_array_equal(a, b)
    self.assertEqual(run.state.seen.tolist(), other.state.seen.tolist())

  def test_stopped_and_resumed_is_bitwise_the_same(self):
    straight = self.straight()
    stopped = train_loop.Run(self.job('stopped'))
    self.stop_in_step(stopped, 7)
    self.assertFalse(stopped.train())
    self.assertEqual(int(stopped.state.step), 7)
    resumed = train_loop.Run(self.job('stopped'))
    self.assertEqual(int(resumed.state.step), 7)
    self.assertTrue(resumed.train())
    self.assert_same(resumed, straight)
    self.check_finish(resumed)

  def stop_in_step(self, run, last):
    """The deadline passes while that step runs."""
    starts = run.order.starts

    def late(seen, rows):
      if sum(seen) == (last - 1) * sum(rows):
        run._deadline = time.monotonic()
      return starts(seen, rows)

    run.order.starts = late

  def check_finish(self, run):
    metrics = run.finish(True)
    made = run.samples(5)
    self.assertLen(made, 2 * len(train_loop.PROMPTS))
    self.assertStartsWith(made[0]['text'], train_loop.PROMPTS[0])
    said = json.loads((run.job.work / 'metrics.json').read_text())
    self.assertEqual(said['tokens_seen'], 12 * 4 * 32)
    self.assertEqual(said['texts'], metrics['texts'])
    names = {p.name for p in run.job.target.iterdir()}
    self.assertEqual(
      names,
      {
        'config.json',
        'generation_config.json',
        'model.safetensors',
        'tokenizer.json',
        'tokenizer_config.json',
      },
    )
    named = safetensors_numpy.load_file(run.job.target / 'model.safetensors')
    again = demo_model.from_tensors(run.job.model, named)
    for a, b in zip(
      jax.tree.leaves(again),
      jax.tree.leaves(demo_model.rounded(run.state.weights)),
      strict=True,
    ):
      np.testing.assert_array_equal(a, b)

  def test_a_plan_fixes_the_length_and_keeps_it(self):
    job = self.job('planned', steps=0, plan_minutes=0.001, save_every=1000)
    run = train_loop.Run(job)
    self.assertEqual(int(run.state.total), training.UNKNOWN)
    self.assertTrue(run.train())
    total = int(run.state.total)
    self.assertBetween(total, 8, 10_000)
    again = train_loop.Run(job)
    self.assertEqual(int(again.state.total), total)
    self.assertTrue(again.train())
    self.assertEqual(int(again.state.step), total)

  def test_no_end_is_an_error(self):
    with self.assertRaisesRegex(ValueError, 'neither steps nor plan_minutes'):
      train_loop.Run(self.job('endless', steps=0))

  @pytest.mark.slow
  def test_killed_while_saving_resumes_from_a_whole_checkpoint(self):
    straight = self.straight()
    command = [sys.executable, '-c', _CHILD, '|'.join(sys.path)]
    command += [f'--corpus={self.folder}', '--model=micro', '--steps=12']
    command += [f'--tokenizer={self.folder}/tokenizer.json', '--samples=0']
    command += [f'--workdir={self.folder}/killed']
    command += [f'--target={self.folder}/killed/model']
    for change in ('batch=4', 'window=32', 'warmup=4'):
      command.append(f'--set=train.{change}')
    for change in ('save_every=1', 'log_every=1', 'eval_every=1000'):
      command.append(f'--set={change}')
    checkpoints = self.folder / 'killed' / 'checkpoints'
    child = subprocess.Popen(
      command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    self.wait_for_half_a_save(checkpoints, 3, child)
    child.send_signal(signal.SIGKILL)
    child.wait()
    resumed = train_loop.Run(self.job('killed'))
    self.assertBetween(int(resumed.state.step), 2, 11)
    self.assertTrue(resumed.train())
    self.assert_same(resumed, straight)

  def wait_for_half_a_save(self, checkpoints, first, child):
    """Returns once a checkpoint of step `first` or later is being written."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
      self.assertIsNone(child.poll(), 'the run ended before it was killed')
      names = os.listdir(checkpoints) if checkpoints.is_dir() else []
      half = [n for n in names if not n.isdigit()]
      steps = [int(m[0]) for n in half if (m := re.match(r'\d+', n))]
      if any(step >= first for step in steps):
        return
      time.sleep(0.0005)
    self.fail(f'no save of step {first} was seen in {checkpoints}')


if __name__ == '__main__':
  absltest.main()
