"""The launcher that converts, killed in the middle and run again."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from safetensors import numpy as safetensors_numpy

import bevy_jax
from bevy_jax import loading
from bevy_jax.layers import tensors

CONFIG = {
  'architectures': ['OlmoeForCausalLM'],
  'model_type': 'olmoe',
  'vocab_size': 32,
  'num_hidden_layers': 2,
  'hidden_size': 16,
  'intermediate_size': 8,
  'num_attention_heads': 2,
  'num_experts': 4,
  'num_experts_per_tok': 2,
}
KILLED_AFTER = 3  # of 8 experts

# The launcher itself, killed by the kernel at a known place.
_KILLED = f"""
import os, signal, sys
from bevy_jax import conversion
from bevy_jax.experiments import convert, launcher
real = conversion.convert
def killed(source, target, progress, storage):
  def report(done, total):
    if done == {KILLED_AFTER}:
      os.kill(os.getpid(), signal.SIGKILL)
  return real(source, target, report, storage)
conversion.convert = killed
launcher.run(convert.main, convert.build_config)
"""


class ConvertTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.source, self.target = root / 'source', root / 'target'
    self.source.mkdir()
    (self.source / 'config.json').write_text(json.dumps(CONFIG))
    (self.source / 'tokenizer.json').write_text('{}')
    (self.source / 'notes.pdf').write_text('not copied')
    rng = np.random.default_rng(0)
    pieces = tensors.plan(loading.read_config(self.source), ()).pieces()
    made = {
      p.name: rng.standard_normal(p.tensor).astype(ml_dtypes.bfloat16)
      for p in pieces
    }
    safetensors_numpy.save_file(made, self.source / 'model.safetensors')

  def run_python(self, *args):
    package = pathlib.Path(bevy_jax.__file__).parents[1]
    flags = [f'--source={self.source}', f'--target={self.target}']
    return subprocess.run(
      [sys.executable, *args, *flags],
      env=os.environ | {'PYTHONPATH': str(package)},
      capture_output=True,
      text=True,
      check=False,
    )

  def test_killed_and_run_again_it_ends_with_equal_bytes(self):
    killed = self.run_python('-c', _KILLED)
    self.assertEqual(killed.returncode, -signal.SIGKILL, killed.stderr)
    with self.assertRaisesRegex(ValueError, 'target is half-written'):
      loading.load(self.target)
    done = self.run_python('-m', 'bevy_jax.experiments.convert')
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn(f'({KILLED_AFTER} experts found there)', done.stdout)
    self.assertIn('8/8', done.stdout)
    before, after = loading.load(self.source), loading.load(self.target)
    for key in range(8):
      a, b = before.experts.block(key).view, after.experts.block(key).view
      self.assertEqual(np.asarray(a).tobytes(), np.asarray(b).tobytes())
    names = {path.name for path in self.target.iterdir()}
    self.assertContainsSubset({'config.json', 'tokenizer.json'}, names)
    self.assertNoCommonElements({'notes.pdf', 'model.safetensors'}, names)
    again = self.run_python('-m', 'bevy_jax.experiments.convert')
    self.assertEqual(again.returncode, 0, again.stderr)
    self.assertIn('complete already', again.stdout)

  def test_an_error_is_one_line_and_a_status(self):
    (self.source / 'model.safetensors').unlink()
    done = self.run_python('-m', 'bevy_jax.experiments.convert')
    self.assertEqual(done.returncode, 1)
    self.assertStartsWith(done.stderr, 'convert: ')
    self.assertNotIn('Traceback', done.stderr)
    self.assertFalse(self.target.exists())


if __name__ == '__main__':
  absltest.main()
