"""Directories of safetensors: what is read and what is refused."""

import json
import pathlib
import tempfile

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from safetensors import numpy as safetensors_numpy

from bevy_jax.offload import hf_checkpoint

BF16 = np.dtype(ml_dtypes.bfloat16)


class HfCheckpointTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    rng = np.random.default_rng(0)
    self.a = rng.standard_normal((4, 6)).astype(BF16)
    self.b = rng.standard_normal((3, 2, 5)).astype(np.float32)

  def write_sharded(self):
    """`a` in the first shard, `b` in the second, and their index."""
    shards = {
      'one.safetensors': {'a': self.a},
      'two.safetensors': {'b': self.b},
    }
    for name, tensors in shards.items():
      safetensors_numpy.save_file(tensors, self.dir / name)
    index = {'a': 'one.safetensors', 'b': 'two.safetensors'}
    self.write_index(index)

  def write_index(self, weight_map):
    path = self.dir / 'model.safetensors.index.json'
    path.write_text(json.dumps({'metadata': {}, 'weight_map': weight_map}))

  def open(self):
    opened = hf_checkpoint.HfCheckpoint.open(self.dir)
    self.addCleanup(opened.close)
    return opened

  def test_reads_whole_tensors_and_parts_from_two_shards(self):
    self.write_sharded()
    files = self.open()
    files.require({'a': (4, 6), 'b': (3, 2, 5)})
    whole, part = np.empty((4, 6), BF16), np.empty((2, 5), np.float32)
    files.read('a', 0, whole)
    files.read('b', 10, part)
    np.testing.assert_array_equal(whole, self.a)
    np.testing.assert_array_equal(part, self.b[1])

  @parameterized.parameters(BF16, np.float16, np.float32)
  def test_a_single_file_in_each_dtype(self, dtype):
    x = np.arange(12).reshape(3, 4).astype(dtype)
    safetensors_numpy.save_file({'x': x}, self.dir / 'model.safetensors')
    files = self.open()
    out = np.empty((3, 4), files.dtype('x'))
    files.read('x', 0, out)
    self.assertEqual(out.dtype, x.dtype)
    np.testing.assert_array_equal(out, x)

  def test_a_missing_shard_is_named_with_a_tensor_of_it(self):
    self.write_sharded()
    (self.dir / 'two.safetensors').unlink()
    with self.assertRaisesRegex(ValueError, r'two\.safetensors.*hold b\)'):
      self.open()

  def test_a_tensor_of_the_index_that_its_shard_lacks(self):
    self.write_sharded()
    self.write_index({'a': 'one.safetensors', 'b': 'one.safetensors'})
    with self.assertRaisesRegex(ValueError, r'one\.safetensors holds b,'):
      self.open()

  def test_an_index_that_leads_out_of_the_directory(self):
    self.write_index({'a': '../one.safetensors'})
    with self.assertRaisesRegex(ValueError, 'index.json is not an index'):
      self.open()

  def test_a_truncated_shard_names_the_tensor(self):
    self.write_sharded()
    path = self.dir / 'two.safetensors'
    path.write_bytes(path.read_bytes()[:-1])
    with self.assertRaisesRegex(ValueError, r'two\.safetensors is trunc.*: b '):
      self.open()

  @parameterized.parameters(b'', b'abc', b'version https://git-lfs.github.com')
  def test_no_header(self, content):
    (self.dir / 'model.safetensors').write_bytes(content)
    with self.assertRaisesRegex(ValueError, r'model\.safetensors is truncated'):
      self.open()

  def test_a_header_that_is_not_json(self):
    raw = (4).to_bytes(8, 'little') + b'nope'
    (self.dir / 'model.safetensors').write_bytes(raw)
    with self.assertRaisesRegex(ValueError, 'broken safetensors header'):
      self.open()

  def test_a_header_whose_lengths_do_not_match_its_shapes(self):
    entry = {'dtype': 'F32', 'shape': [3], 'data_offsets': [0, 8]}
    header = json.dumps({'x': entry}).encode()
    raw = len(header).to_bytes(8, 'little') + header + bytes(8)
    (self.dir / 'model.safetensors').write_bytes(raw)
    with self.assertRaisesRegex(ValueError, 'x of shape.*needs 12 bytes'):
      self.open()

  def test_a_missing_tensor(self):
    self.write_sharded()
    with self.assertRaisesRegex(ValueError, r'index\.json has no tensor c '):
      self.open().require({'a': (4, 6), 'c': (1,)})

  def test_a_wrong_shape(self):
    self.write_sharded()
    with self.assertRaisesRegex(
      ValueError, r'one\.safetensors: a has shape \[4, 6\].*\[6, 4\]'
    ):
      self.open().require({'a': (6, 4)})

  def test_a_dtype_that_is_not_supported(self):
    x = {'x': np.zeros(3, np.int8)}
    safetensors_numpy.save_file(x, self.dir / 'model.safetensors')
    with self.assertRaisesRegex(ValueError, r'model\.safet.*: x .* as I8'):
      self.open().require({'x': (3,)})

  def test_an_unused_tensor(self):
    self.write_sharded()
    files = self.open()
    files.refuse_unused({'a'}, lambda name: name == 'b')
    with self.assertRaisesRegex(ValueError, r'two\.safetensors: .* uses b '):
      files.refuse_unused({'a'}, lambda name: False)

  def test_pickled_weights_are_refused(self):
    (self.dir / 'pytorch_model.bin').write_bytes(b'x')
    with self.assertRaisesRegex(ValueError, r'pytorch_model\.bin.*run code'):
      self.open()

  def test_nothing_there(self):
    with self.assertRaisesRegex(ValueError, 'holds neither'):
      self.open()

  def test_a_file_that_shrinks_while_it_is_read(self):
    self.write_sharded()
    files = self.open()
    path = self.dir / 'two.safetensors'
    with path.open('r+b') as file:
      file.truncate(path.stat().st_size - 4)
    with self.assertRaisesRegex(ValueError, r'two\.safetensors ended inside b'):
      files.read('b', 0, np.empty((3, 2, 5), np.float32))

  def test_the_identity_follows_the_files(self):
    self.write_sharded()
    before = self.open().identity
    self.assertEqual(self.open().identity, before)
    self.b = self.b[:1]
    self.write_sharded()
    self.assertNotEqual(self.open().identity, before)


if __name__ == '__main__':
  absltest.main()
