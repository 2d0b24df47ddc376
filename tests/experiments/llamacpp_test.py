"""llama.cpp beside this engine: its output, its failures, its models."""

import json
import os
import pathlib
import stat
import struct
import subprocess
import sys
import tempfile
from typing import Any

import pytest
from absl.testing import absltest, parameterized

from bevy_jax.experiments import gguf, llamacpp, outcome

# As tools/batched-bench prints it, n_kv and times as the program rounds them.
_TABLE = """
main: n_kv_max = 2048, n_batch = 2048, n_ubatch = 512, flash_attn = -1, \
is_pp_shared = 0, n_gpu_layers = -1, n_threads = 2, n_threads_batch = 2

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s \
|      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------\
|----------|----------|
|   128 |    128 |    1 |    256 |    0.108 |  1186.64 |    3.079 |    41.57 \
|    3.187 |    80.32 |
|   128 |    128 |    2 |    512 |    0.198 |  1295.19 |    5.029 |    50.90 \
|    5.227 |    97.95 |

llama_perf_context_print:        load time =     240.11 ms
"""
_LINE = (
  '{"n_kv_max": 2048, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, '
  '"is_pp_shared": 0, "n_gpu_layers": 0, "n_threads": 2, "n_threads_batch": 2, '
  '"pp": %d, "tg": %d, "pl": %d, "n_kv": 512, "t_pp": 0.198000, "speed_pp": '
  '1295.190063, "t_tg": 5.029000, "speed_tg": 50.904823, "t": 5.227000, '
  '"speed": 97.952934}'
)
# Stands for the program: takes its arguments, prints what it prints.
_FAKE = f"""#!{sys.executable}
import os, sys
argv = sys.argv[1:]
def of(name): return int(argv[argv.index(name) + 1])
print('load_tensors: offloading', file=sys.stderr)
how = os.environ.get('FAKE', '')
if how == 'crash':
  print('ggml_cuda_error: out of memory', file=sys.stderr)
  os.abort()
if how == 'refuse':
  print('error: invalid argument: --n-cpu-moe', file=sys.stderr)
  sys.exit(1)
assert argv[argv.index('--output-format') + 1] == 'jsonl', argv
print()
if how != 'silent':
  print({_LINE!r} % (of('-npp'), of('-ntg'), of('-npl')))
print()
"""


def _string(text: str) -> bytes:
  return struct.pack('<Q', len(text)) + text.encode()


def _field(name: str, value: Any) -> bytes:
  if isinstance(value, str):
    return _string(name) + struct.pack('<I', 8) + _string(value)
  if isinstance(value, list):  # Of texts, as a vocabulary is.
    head = struct.pack('<IIQ', 9, 8, len(value))
    return _string(name) + head + b''.join(map(_string, value))
  return _string(name) + struct.pack('<II', 4, value)


def _write(
  path: pathlib.Path, layers: int = 8, kind: str = 'qwen3moe', **changes: Any
) -> None:
  """A GGUF of the demo's shape; experts of layer n take 3 * (n + 1) KiB."""
  fields = {
    'general.architecture': kind,
    'general.name': 'Demo',
    'tokenizer.ggml.tokens': ['a', 'bc'],
    f'{kind}.block_count': layers,
    f'{kind}.expert_count': 32,
    f'{kind}.expert_used_count': 4,
    f'{kind}.embedding_length': 256,
    f'{kind}.expert_feed_forward_length': 64,
  } | {name.replace('__', '.'): value for name, value in changes.items()}
  tensors, offset = [('token_embd.weight', 0)], 4096
  for layer in range(layers):
    for part in ('up', 'down', 'gate'):
      tensors.append((f'blk.{layer}.ffn_{part}_exps.weight', offset))
      offset += 1024 * (layer + 1)
  out = b'GGUF' + struct.pack('<IQQ', 3, len(tensors), len(fields))
  out += b''.join(_field(*item) for item in fields.items())
  for name, start in tensors:
    out += _string(name) + struct.pack('<IQQIQ', 2, 32, 32, 0, start)
  out += bytes(-len(out) % 32) + bytes(offset)
  path.write_bytes(out)


class _Case(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.file = self.folder / 'demo.gguf'
    _write(self.file)
    self.binary = self.folder / 'llama-batched-bench'
    self.binary.write_text(_FAKE)
    self.binary.chmod(self.binary.stat().st_mode | stat.S_IXUSR)

  def asked(self, **changes: Any) -> llamacpp.Asked:
    given = {
      'binary': str(self.binary), 'file': str(self.file), 'model': 'demo',
      'cache_gib': 0.01, 'requests': 2, 'prompt_tokens': 128,
      'new_tokens': 128,
    }  # fmt: skip
    return llamacpp.Asked(**(given | changes))


class GgufTest(_Case):
  def test_a_model_and_its_experts(self):
    """Seen to fail with sizes taken in the order of the names."""
    found = gguf.read(self.file)
    self.assertEqual(found.name, 'Demo')
    self.assertEqual(found.expert_bytes, {n: 3072 * (n + 1) for n in range(8)})
    self.assertEqual(found.bytes, 4096 + 3072 * 36)
    self.assertEqual(found.shape['family'], 'qwen3_moe')

  def test_a_model_in_two_files(self):
    one = self.folder / 'demo-00001-of-00002.gguf'
    two = self.folder / 'demo-00002-of-00002.gguf'
    _write(one, split__count=2)
    with self.assertRaisesRegex(ValueError, '00002-of-00002.gguf does not'):
      gguf.read(one)
    _write(two, layers=2, split__count=2)
    self.assertLen(gguf.read(one).expert_bytes, 8)
    with self.assertRaisesRegex(ValueError, 'give the first'):
      gguf.read(two)

  @parameterized.parameters(
    (lambda whole: b'GGML' + whole[4:], 'does not begin with GGUF'),
    (lambda whole: whole[:4] + b'\x09' + whole[5:], 'its version is 9'),
    (lambda whole: whole[:300], 'it is cut off'),
    (lambda whole: whole[:-9000], 'it ends before its tensors do'),
    (lambda whole: whole[:8] + b'\xff' * 8 + whole[16:], 'it counts'),
    (lambda whole: b'', 'does not begin'),
  )
  def test_broken_files(self, breaks, words):
    self.file.write_bytes(breaks(self.file.read_bytes()))
    with self.assertRaisesRegex(ValueError, words):
      gguf.read(self.file)

  def test_every_cut_is_told(self):
    whole = self.file.read_bytes()
    for size in range(0, 2600, 37):
      self.file.write_bytes(whole[:size])
      with self.assertRaisesRegex(ValueError, 'no whole GGUF'):
        gguf.read(self.file)


class PartsTest(_Case):
  def test_the_same_model_or_none(self):
    self.assertEqual(llamacpp.check(self.asked()).name, 'Demo')
    _write(self.file, qwen3moe__expert_count=64)
    with self.assertRaisesRegex(ValueError, 'num_experts 64, not 32'):
      llamacpp.check(self.asked())
    _write(self.file, layers=7)
    with self.assertRaisesRegex(ValueError, 'num_layers 7, not 8'):
      llamacpp.check(self.asked())
    _write(self.file, kind='llama')
    with self.assertRaisesRegex(ValueError, "family 'mixtral'"):
      llamacpp.check(self.asked())
    _write(self.file, qwen3moe__expert_count=0)
    with self.assertRaisesRegex(ValueError, 'without routed experts'):
      llamacpp.check(self.asked())

  def test_layers_on_the_host(self):
    """Seen to fail with layers on the device counted from the front."""
    experts = {1: 10, 2: 20, 3: 30}  # Layer 0 is dense.
    for budget, layers in ((60, 0), (59, 2), (50, 2), (49, 3), (29, 4), (0, 4)):
      self.assertEqual(llamacpp.on_host(experts, budget), layers, budget)

  def test_the_call(self):
    call = llamacpp.command(self.asked(), 5, True)
    self.assertContainsSubset(['--n-cpu-moe', '5', '-npl', '2'], call)
    self.assertEqual(call[call.index('-c') + 1], '512')
    call = llamacpp.command(self.asked(arguments=('-t', '8')), 5, False)
    self.assertNotIn('--n-cpu-moe', call)
    self.assertEqual(call[-2:], ['-t', '8'])

  def test_both_forms_of_its_output(self):
    asked = self.asked()
    self.assertEqual(llamacpp.speed(_TABLE, asked), 50.90)
    line = _LINE % (128, 128, 2)
    self.assertEqual(llamacpp.speed(f'\n{line}\n\n', asked), 50.904823)
    other = self.asked(requests=4)
    for text in (_TABLE, line, 'llama_model_load: error', ''):
      with self.assertRaisesRegex(ValueError, 'told no speed'):
        llamacpp.speed(text, other)

  @parameterized.parameters(
    ('crash', 'was ended by SIGABRT. Its last words: .*out of memory'),
    ('refuse', 'exit code 1. Its last words: .*invalid argument'),
    ('silent', 'it told of nothing'),
  )
  def test_failures_have_its_own_words(self, how, words):
    call = llamacpp.command(self.asked(), 5, True)
    os.environ['FAKE'] = how
    self.addCleanup(os.environ.pop, 'FAKE')
    with self.assertRaisesRegex(ValueError, words):
      llamacpp.speed(llamacpp._run(call, 60), self.asked())

  def test_what_is_missing_is_told(self):
    with self.assertRaisesRegex(ValueError, 'missing: --gguf=FILE[.]'):
      self.asked(file='')
    with self.assertRaisesRegex(ValueError, 'is no file'):
      self.asked(binary='/no/such/program')
    with self.assertRaisesRegex(ValueError, 'more than 0.01 s'):
      llamacpp._run(['sleep', '5'], 0.01)

  def test_prompts_of_the_asked_length(self):
    texts = llamacpp._prompts(self.asked(requests=3))
    self.assertLen(set(texts), 3)


@pytest.mark.slow
class LauncherTest(_Case):
  def launch(self, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
      [sys.executable, '-m', 'bevy_jax.experiments.vs_llamacpp', *flags],
      capture_output=True, text=True, check=False,
    )  # fmt: skip

  def test_a_pair(self):
    """Seen to fail with the ratio turned over."""
    done = self.launch(
      f'--llama_batched_bench={self.binary}', f'--gguf={self.file}',
      '--cache_gib=0.003', '--requests=2', '--prompt_tokens=16',
      '--new_tokens=16', '--pairs=1', '--json', '--set=warmup=2',
    )  # fmt: skip
    self.assertEqual(done.returncode, outcome.OK, done.stderr)
    told = json.loads(done.stdout)
    (row,) = told['rows']
    self.assertEqual(row['llama_tokens_per_s'], 50.904823)
    self.assertAlmostEqual(
      told['ratio'], row['ours_tokens_per_s'] / 50.904823, places=6
    )
    self.assertLessEqual(told['ours_expert_bytes_on_device'], 0.003 * 2**30)
    self.assertIn('pair 1: ratio', done.stderr)

  def test_without_the_program(self):
    done = self.launch()
    self.assertEqual(done.returncode, outcome.USAGE)
    self.assertIn('nothing is built or downloaded here', done.stderr)
    self.assertLen(done.stderr.splitlines(), 1)


if __name__ == '__main__':
  absltest.main()
