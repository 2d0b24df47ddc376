import json
import lzma
import pathlib
import tempfile

import numpy as np
import tokenizers
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from bevy_jax.experiments import corpus

TEXTS = ('the cat sat on the mat. ' * 20, 'def f(x):\n    return x + 1\n' * 20)


def _write(folder, name, documents):
  path = folder / f'{name}.txt.xz'
  path.write_bytes(lzma.compress(corpus.END.join(documents).encode()))
  return path


class TokenizerTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.tokenizer = corpus.train_tokenizer(TEXTS, 300)

  def test_end_is_token_zero(self):
    self.assertEqual(corpus.end_id(self.tokenizer), 0)
    self.assertEqual(self.tokenizer.encode(corpus.END).ids, [0])

  def test_no_end_is_an_error(self):
    bare = tokenizers.Tokenizer(tokenizers.models.BPE())
    with self.assertRaisesRegex(ValueError, 'no token <.endoftext.>'):
      corpus.end_id(bare)

  @settings(max_examples=100, deadline=None)
  @given(st.text())
  def test_lossless(self, text):
    ids = self.tokenizer.encode(text).ids
    again = self.tokenizer.decode(ids, skip_special_tokens=False)
    self.assertEqual(again, text)

  @parameterized.parameters(
    ' leading',
    'e\u0301 is not \u00e9',
    '\r\n\t ',
    '\ufb01 \U0001f600',
    '  \n\n ',
  )
  def test_nothing_is_normalised(self, text):
    self.assertEqual(
      self.tokenizer.decode(self.tokenizer.encode(text).ids), text
    )

  def test_encode_is_one_array_a_document(self):
    arrays = corpus.encode(self.tokenizer, TEXTS)
    self.assertEqual([a.dtype for a in arrays], [np.uint16] * 2)
    self.assertEqual(
      [self.tokenizer.decode(a.tolist()) for a in arrays], list(TEXTS)
    )

  def test_files_for_other_readers(self):
    folder = pathlib.Path(tempfile.mkdtemp())
    corpus.write_tokenizer(self.tokenizer, folder, 64)
    config = json.loads((folder / 'tokenizer_config.json').read_text())
    self.assertEqual(config['eos_token'], corpus.END)
    self.assertEqual(config['model_max_length'], 64)
    self.assertFalse(config['clean_up_tokenization_spaces'])
    again = corpus.made_tokenizer(folder / 'tokenizer.json', folder, 300)
    self.assertEqual(
      again.encode('the mat').ids, self.tokenizer.encode('the mat').ids
    )

  def test_too_many_entries_is_an_error(self):
    folder = pathlib.Path(tempfile.mkdtemp())
    corpus.write_tokenizer(self.tokenizer, folder, 64)
    size = self.tokenizer.get_vocab_size() - 1
    with self.assertRaisesRegex(ValueError, f'but the model has {size}'):
      corpus.made_tokenizer(folder / 'tokenizer.json', folder, size)


class StreamTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp())
    for domain, text in zip(corpus.DOMAINS, TEXTS, strict=True):
      _write(self.folder, f'{domain}.train', [text, text + '!'])
    self.path = self.folder / 'tokenizer.json'
    self.cache = self.folder / 'cache'

  def test_documents_are_bytes_between_ends(self):
    path = _write(self.folder, 'x', ['a\r\nb', '', '\u00e9 '])
    self.assertEqual(corpus.read_documents(path), ['a\r\nb', '', '\u00e9 '])

  def test_missing_file(self):
    with self.assertRaisesRegex(ValueError, 'gone.txt.xz is missing'):
      corpus.read_documents(self.folder / 'gone.txt.xz')

  def test_pack(self):
    packed = corpus.pack([np.uint16([5, 6]), np.uint16([]), np.uint16([7])], 0)
    np.testing.assert_array_equal(packed, [0, 5, 6, 0, 0, 7, 0])
    self.assertEqual(packed.dtype, np.uint16)

  def test_tokens_are_made_once(self):
    tokenizer = corpus.made_tokenizer(self.path, self.folder, 262)
    first = corpus.tokenised(self.folder, self.path, self.cache)
    text = tokenizer.decode(first['python'].tolist(), skip_special_tokens=False)
    self.assertEqual(text, corpus.END.join(['', TEXTS[1], TEXTS[1] + '!', '']))
    (self.folder / 'python.train.txt.xz').unlink()
    again = corpus.tokenised(self.folder, self.path, self.cache)
    np.testing.assert_array_equal(again['python'], first['python'])

  def test_a_new_tokenizer_never_meets_old_tokens(self):
    corpus.made_tokenizer(self.path, self.folder, 262)
    old = corpus.tokenised(self.folder, self.path, self.cache)
    self.path.unlink()
    tokenizer = corpus.made_tokenizer(self.path, self.folder, 300)
    new = corpus.tokenised(self.folder, self.path, self.cache)
    self.assertLess(len(new['books']), len(old['books']))
    self.assertIn(TEXTS[0], tokenizer.decode(new['books'].tolist()))

  def test_tokens_left_by_a_killed_run_are_made_again(self):
    corpus.made_tokenizer(self.path, self.folder, 262)
    whole = corpus.tokenised(self.folder, self.path, self.cache)
    # A run that dies while it makes tokens has removed the stamp before.
    (self.cache / 'tokenizer.json').unlink()
    np.save(self.cache / 'books.npy', np.uint16([1, 2]))
    again = corpus.tokenised(self.folder, self.path, self.cache)
    np.testing.assert_array_equal(again['books'], whole['books'])


class OrderTest(absltest.TestCase):
  def test_resumed_counts_continue_the_order(self):
    whole = corpus.Order([1000, 400], 10, seed=3)
    seen, rows, straight = [0, 0], (3, 2), []
    for _ in range(80):
      straight.append(whole.starts(seen, rows))
      seen = [a + b for a, b in zip(seen, rows, strict=True)]
    later = corpus.Order([1000, 400], 10, seed=3)
    np.testing.assert_array_equal(
      later.starts((3 * 61, 2 * 61), rows), straight[61]
    )

  def test_an_epoch_visits_each_window_once(self):
    order = corpus.Order([1000, 400], 10, seed=3)
    count = (1000 - 1) // 10 - 1
    for epoch in range(3):
      starts = order.starts((epoch * count, 0), (count, 0))
      self.assertLen(set(starts.tolist()), count)
      self.assertLen(set((starts % 10).tolist()), 1)
      self.assertBetween(starts.min(), 0, 9)
      # The last target of the last window is still a token.
      self.assertLessEqual(starts.max() + 10, 1000 - 1)

  def test_epochs_differ(self):
    order = corpus.Order([1000], 10, seed=3)
    count = (1000 - 1) // 10 - 1
    first = order.starts((0,), (count,)).tolist()
    second = order.starts((count,), (count,)).tolist()
    self.assertNotEqual(first, second)

  def test_domains_lie_one_after_another(self):
    order = corpus.Order([1000, 400], 10, seed=3)
    starts = order.starts((0, 0), (5, 7))
    self.assertEqual(starts.dtype, np.int32)
    self.assertLess(starts[:5].max(), 1000)
    self.assertBetween(starts[5:].min(), 1000, 1399)
    self.assertLess(starts[5:].max() + 10, 1400)

  def test_epochs_count_tokens(self):
    order = corpus.Order([1000, 400], 10, seed=3)
    self.assertEqual(order.epochs((50, 80)), (0.5, 2.0))

  def test_too_little_text(self):
    with self.assertRaisesRegex(ValueError, '20 tokens holds no two windows'):
      corpus.Order([1000, 20], 10, seed=3)


if __name__ == '__main__':
  absltest.main()
