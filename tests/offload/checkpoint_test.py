"""The native form: written, taken up again, read, and refused."""

import dataclasses
import json
import pathlib
import tempfile
from unittest import mock

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax.offload import checkpoint, checkpoint_writer

BF16 = np.dtype(ml_dtypes.bfloat16)
COUNT = 6


@dataclasses.dataclass
class Fake:
  """Six experts and two shared weights; counts what is read."""

  dtype: np.dtype = BF16
  shape: tuple[int, ...] = (3, 5, 7)
  count: int = COUNT
  dies_at: int = -1
  filled: list[int] = dataclasses.field(default_factory=list)

  def fill(self, key, out):
    if key == self.dies_at:
      raise KeyboardInterrupt
    self.filled.append(key)
    out[...] = np.random.default_rng(key).standard_normal(self.shape)

  def shared(self):
    x = np.random.default_rng(99).standard_normal((4, 6))
    yield 'embed', x.astype(self.dtype)
    yield 'layers.0.wq', x.T.astype(np.float32)


class CheckpointTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.dir = root / 'native'
    self.extra = root / 'config.json'
    self.extra.write_text('{"a": 1}')

  def write(self, source=None, identity='one'):
    source = source or Fake()
    self.assertTrue(checkpoint_writer.can_write(self.dir, identity))
    return checkpoint_writer.write(self.dir, source, identity, [self.extra])

  def check(self, source=None):
    """Reads everything back and compares it with the source."""
    source = source or Fake()
    with checkpoint.Reader.open(self.dir) as reader:
      self.assertEqual((reader.count, reader.shape), (COUNT, source.shape))
      self.assertEqual(reader.dtype, source.dtype)
      got, wanted = (np.empty(source.shape, source.dtype) for _ in range(2))
      for key in reversed(range(COUNT)):
        reader.fill(key, got)
        source.fill(key, wanted)
        self.assertEqual(got.tobytes(), wanted.tobytes())
      shared = dict(reader.shared())
    for name, leaf in source.shared():
      self.assertEqual(shared.pop(name).tobytes(), leaf.tobytes())
    self.assertEmpty(shared)
    self.assertEqual((self.dir / 'config.json').read_text(), '{"a": 1}')

  @parameterized.parameters(BF16, np.float16, np.float32)
  def test_bytes_are_equal_in_each_dtype(self, dtype):
    source = Fake(dtype=np.dtype(dtype))
    self.assertEqual(self.write(source), 0)
    self.check(source)

  def test_blocks_are_aligned_and_listed(self):
    self.write(Fake(shape=(3, 40, 40)))
    index = json.loads((self.dir / 'experts.json').read_text())
    offsets = [block['offset'] for block in index['experts']]
    self.assertEqual(offsets, [key * 12288 for key in range(COUNT)])
    self.assertEqual(index['bytes'], 3 * 40 * 40 * 2)
    self.assertEqual((self.dir / 'experts.bin').stat().st_size, COUNT * 12288)
    self.assertFalse((self.dir / 'experts.journal').exists())

  @parameterized.parameters(0, 1, 4, 5)
  def test_a_run_that_died_is_taken_up_again(self, dies_at):
    with self.assertRaises(KeyboardInterrupt):
      self.write(Fake(dies_at=dies_at))
    self.assertTrue(checkpoint.is_native(self.dir))
    with self.assertRaisesRegex(ValueError, 'native is half-written'):
      checkpoint.Reader.open(self.dir)
    source = Fake()
    self.assertEqual(self.write(source), dies_at)
    self.assertEqual(source.filled, list(range(dies_at, COUNT)))
    self.check()

  @parameterized.parameters(1, 2, 3)
  def test_a_run_that_died_while_it_finished(self, replace):
    """Journal, index and marker are the files replaced, in this order."""
    real, calls = checkpoint_writer._replace, []

    def dies(path, text):
      calls.append(path.name)
      if len(calls) == replace:
        path.with_name(path.name + '.partial').write_text(text[:5])
        raise KeyboardInterrupt
      real(path, text)

    with (
      mock.patch.object(checkpoint_writer, '_replace', dies),
      self.assertRaises(KeyboardInterrupt),
    ):
      checkpoint_writer.write(self.dir, Fake(), 'one', [self.extra])
    if checkpoint.is_native(self.dir):
      with self.assertRaisesRegex(ValueError, 'half-written'):
        checkpoint.Reader.open(self.dir)
    self.write()
    self.assertEmpty(list(self.dir.glob('*.partial')))
    self.check()

  def test_only_intact_blocks_are_taken_over(self):
    with self.assertRaises(KeyboardInterrupt):
      self.write(Fake(dies_at=5))
    with (self.dir / 'experts.bin').open('r+b') as file:
      file.seek(2 * 4096 + 11)
      file.write(b'\xff\x00')
      file.truncate(4 * 4096 + 9)
    with (self.dir / 'experts.journal').open('a') as file:
      file.write('5 12')  # torn
    source = Fake()
    self.assertEqual(self.write(source), 3)
    self.assertEqual(source.filled, [2, 4, 5])
    self.check()

  def test_an_unfinished_run_of_another_source_starts_again(self):
    with self.assertRaises(KeyboardInterrupt):
      self.write(Fake(dies_at=4), identity='another')
    source = Fake()
    self.assertEqual(self.write(source), 0)
    self.assertLen(source.filled, COUNT)
    self.check()

  def test_a_finished_one_is_left_alone(self):
    self.write()
    self.assertFalse(checkpoint_writer.can_write(self.dir, 'one'))
    with self.assertRaisesRegex(ValueError, 'identity one, not two'):
      checkpoint_writer.can_write(self.dir, 'two')

  def test_a_directory_with_something_else_is_left_alone(self):
    self.dir.mkdir()
    (self.dir / 'thesis.txt').touch()
    with self.assertRaisesRegex(ValueError, 'not empty'):
      checkpoint_writer.can_write(self.dir, 'one')

  def test_a_changed_block_is_found(self):
    self.write()
    with (self.dir / 'experts.bin').open('r+b') as file:
      file.seek(3 * 4096 + 5)
      byte = file.read(1)[0]
      file.seek(3 * 4096 + 5)
      file.write(bytes([byte ^ 1]))
    with checkpoint.Reader.open(self.dir) as reader:
      out = np.empty(reader.shape, reader.dtype)
      reader.fill(2, out)
      with self.assertRaisesRegex(ValueError, r'experts\.bin.*of expert 3'):
        reader.fill(3, out)

  def test_a_truncated_file_is_found_before_anything_is_read(self):
    self.write()
    with (self.dir / 'experts.bin').open('r+b') as file:
      file.truncate(COUNT * 4096 - 1)
    with self.assertRaisesRegex(ValueError, 'bin.*24575 instead of 24576'):
      checkpoint.Reader.open(self.dir)

  @parameterized.parameters('experts.bin', 'experts.json', 'dense')
  def test_a_removed_part_is_found(self, name):
    self.write()
    (self.dir / name).rename(self.dir / 'elsewhere')
    with (
      self.assertRaisesRegex(ValueError, f'{name} was changed'),
      checkpoint.Reader.open(self.dir) as reader,
    ):
      dict(reader.shared())

  def test_a_changed_index_is_found(self):
    self.write()
    path = self.dir / 'experts.json'
    path.write_text(path.read_text().replace('4096', '8192'))
    with self.assertRaisesRegex(ValueError, r'experts\.json was changed'):
      checkpoint.Reader.open(self.dir)

  def test_a_changed_shared_weight_is_found(self):
    self.write()
    path = self.dir / 'complete.json'
    marker = json.loads(path.read_text())
    marker['dense']['layers.0.wq']['crc32'] ^= 1
    path.write_text(json.dumps(marker))
    with (
      self.assertRaisesRegex(ValueError, r'checksum of layers\.0\.wq'),
      checkpoint.Reader.open(self.dir) as reader,
    ):
      dict(reader.shared())

  def test_a_broken_marker_is_found(self):
    self.write()
    (self.dir / 'complete.json').write_text('{"version": 1,')
    with self.assertRaisesRegex(ValueError, r'complete\.json was changed'):
      checkpoint.Reader.open(self.dir)

  def test_another_version_is_refused(self):
    self.write()
    path = self.dir / 'complete.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'version': 9}))
    with self.assertRaisesRegex(ValueError, 'is of version 9'):
      checkpoint.Reader.open(self.dir)

  def test_a_disk_that_is_too_small(self):
    with (
      mock.patch.object(
        checkpoint_writer.shutil, 'disk_usage', lambda _: mock.Mock(free=5)
      ),
      self.assertRaisesRegex(ValueError, 'needs 24,576 more bytes'),
    ):
      self.write()


if __name__ == '__main__':
  absltest.main()
