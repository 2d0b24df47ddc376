"""Experts stored in other ways: converted, loaded, taken up, refused."""

import json
import pathlib
import tempfile
import zlib
from unittest import mock

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from safetensors import numpy as safetensors_numpy

from bevy_jax import conversion, loading, storage
from bevy_jax.layers import quant, tensors

_CONFIG = {
  'architectures': ['OlmoeForCausalLM'],
  'model_type': 'olmoe',
  'vocab_size': 32,
  'num_hidden_layers': 2,
  'hidden_size': 64,
  'intermediate_size': 32,
  'num_attention_heads': 2,
  'num_experts': 4,
  'num_experts_per_tok': 2,
}
_SHAPE = (3, 32, 64)
_INT4 = {'kind': 'int4', 'group': 32, 'zero_point': False, 'order': 2}


class StorageTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.source, self.target = root / 'source', root / 'target'
    self.source.mkdir()
    self.write()

  def write(self, scale: float = 1, **changes: int) -> None:
    config = _CONFIG | changes
    (self.source / 'config.json').write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    made = {
      p.name: (rng.standard_normal(p.tensor) * scale).astype(ml_dtypes.bfloat16)
      for p in tensors.plan(loading.read_config(self.source), ()).pieces()
    }
    safetensors_numpy.save_file(made, self.source / 'model.safetensors')

  def convert(self, name: str, dies_at: int = -1) -> int | None:
    def progress(done: int, total: int) -> None:
      if done == dies_at:
        raise KeyboardInterrupt

    return conversion.convert(
      self.source, self.target, progress, storage.parse(name)
    )

  @parameterized.parameters('int8', 'int8:64', 'int4', 'int4:32:zero')
  def test_packed(self, name: str):
    if name == 'int8:64':
      self.write(intermediate_size=64)
    self.assertEqual(self.convert(name), 0)
    before, after = loading.load(self.source), loading.load(self.target)
    form, shape = quant.parse(name), before.config.expert_shape
    self.assertIsNone(before.format)
    self.assertEqual(after.format, form)
    how = quant.layout(form, shape)
    self.assertEqual(after.experts.block_bytes, how.nbytes)
    wide = storage.experts(before.experts, None, shape)
    for weights, block, got in zip(
      wide,
      after.experts.blocks,
      storage.experts(after.experts, after.format, shape),
      strict=True,
    ):
      np.testing.assert_array_equal(block.view, quant.pack(how, weights))
      error = np.abs(got - weights).max() / np.abs(weights).max()
      self.assertLess(error, 0.005 if form.kind == 'int8' else 0.08)

  @parameterized.parameters('bf16', 'f16', 'f32')
  def test_floats(self, name: str):
    self.convert(name)
    before, after = loading.load(self.source), loading.load(self.target)
    self.assertIsNone(after.format)
    self.assertEqual(storage.name(after.experts.dtype), name)
    for a, b in zip(before.experts.blocks, after.experts.blocks, strict=True):
      # Numbers of this size fit all three.
      np.testing.assert_allclose(
        a.view.astype(np.float32), b.view.astype(np.float32), atol=1e-6
      )

  def test_a_killed_run_goes_on(self):
    with self.assertRaises(KeyboardInterrupt):
      self.convert('int4', dies_at=3)
    with self.assertRaisesRegex(ValueError, 'half-written'):
      loading.load(self.target)
    self.assertEqual(self.convert('int4'), 3)
    self.assertEqual(loading.load(self.target).format, quant.parse('int4'))
    self.assertIsNone(self.convert('int4'))

  @parameterized.parameters(
    ('int8', 'int4'), ('int4', 'int8'), ('f32', 'int4'), ('int4', 'bf16'),
    ('int4', 'int4:32:zero'),
  )  # fmt: skip
  def test_a_half_written_one_of_another_kind_starts_clean(
    self, first: str, second: str
  ):
    with self.assertRaises(KeyboardInterrupt):
      self.convert(first, dies_at=6)
    self.assertEqual(self.convert(second), 0)
    mixed = loading.load(self.target)
    size = (self.target / 'experts.bin').stat().st_size
    self.target = self.target.with_name('alone')
    self.convert(second)
    self.assertEqual((self.target / 'experts.bin').stat().st_size, size)
    alone = loading.load(self.target)
    self.assertEqual(mixed.format, alone.format)
    for a, b in zip(mixed.experts.blocks, alone.experts.blocks, strict=True):
      np.testing.assert_array_equal(a.view, b.view)

  def test_a_finished_one_of_another_kind_is_left_alone(self):
    self.convert('int8')
    words = 'in another way .*int8:32 in order 2, not'
    with self.assertRaisesRegex(ValueError, words):
      self.convert('int4')
    self.assertEqual(loading.load(self.target).format, quant.parse('int8'))

  @parameterized.parameters('values', 'scales', 'zeros')
  def test_a_changed_part_of_a_block_is_found(self, part: str):
    self.convert('int4:32:zero')
    how = quant.layout(quant.parse('int4:32:zero'), _SHAPE)
    stride = -(-how.nbytes // 4096) * 4096
    with (self.target / 'experts.bin').open('r+b') as file:
      file.seek(5 * stride + getattr(how, part).offset)
      byte = file.read(1)[0]
      file.seek(-1, 1)
      file.write(bytes([byte ^ 16]))
    with self.assertRaisesRegex(ValueError, 'checksum of expert 5'):
      loading.load(self.target)

  def test_a_truncated_file_is_found(self):
    self.convert('int4')
    with (self.target / 'experts.bin').open('r+b') as file:
      file.truncate(8 * 4096 - 1)
    with self.assertRaisesRegex(ValueError, r'experts\.bin was changed'):
      loading.load(self.target)

  @parameterized.parameters(
    (_INT4 | {'kind': 'int8'}, 'asks for 8 of'),
    (_INT4 | {'group': 48}, 'group of int4 is 48'),
    (_INT4 | {'group': 64}, 'that 64 divides'),
    ({'kind': 'int4', 'rows': 1, 'order': 2}, 'cannot be read'),
    (None, 'cannot be read'),
    (_INT4 | {'order': 3}, 'in order 3, and 2 is read. Convert the model'),
    # What was written before there was an order.
    ({k: _INT4[k] for k in _INT4 if k != 'order'}, 'in order 1, and 2 is'),
  )
  def test_an_index_that_lies_is_refused(self, meta: object, message: str):
    self.convert('int4')
    path, marker = self.target / 'experts.json', self.target / 'complete.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'meta': meta}))
    whole = json.loads(marker.read_text())
    whole['index_crc32'] = zlib.crc32(path.read_bytes())
    marker.write_text(json.dumps(whole))
    with self.assertRaisesRegex(ValueError, message):
      loading.load(self.target)

  def test_one_in_an_order_of_before_is_not_taken_for_done(self):
    with mock.patch.object(quant, 'ORDER', 1):
      self.convert('int4')
    with self.assertRaisesRegex(ValueError, 'in order 1, and 2 is read'):
      loading.load(self.target)
    with self.assertRaisesRegex(ValueError, 'stored in another way'):
      self.convert('int4')

  def test_wrong_sides_are_refused_before_anything_is_written(self):
    self.write(intermediate_size=48)
    with self.assertRaisesRegex(ValueError, 'F that 32 divides, and it is 48'):
      self.convert('int8')
    self.assertFalse(self.target.exists())

  @parameterized.parameters(
    (1e6, 'f16', 'expert 0 .* out of the range of f16; .*bf16 or f32'),
    (np.inf, 'int4', 'expert 0 .* not finite'),
  )
  def test_what_cannot_be_stored(self, scale: float, name: str, message: str):
    self.write(scale)
    with self.assertRaisesRegex(ValueError, message):
      self.convert(name)

  @parameterized.parameters('fp8', 'bfloat16', 'int4:7')
  def test_unknown_kinds(self, name: str):
    with self.assertRaisesRegex(ValueError, 'bf16|32, 64 or 128'):
      storage.parse(name)

  @parameterized.parameters('bf16', 'f16', 'f32', 'int8:32', 'int4:128:zero')
  def test_names_are_read_back(self, name: str):
    self.assertEqual(storage.name(storage.parse(name)), name)


if __name__ == '__main__':
  absltest.main()
