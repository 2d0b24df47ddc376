"""Text: streaming pieces never split a character, stop strings cut."""

import pathlib
import tempfile

import pytest
import tokenizers
from absl.testing import absltest, parameterized
from tokenizers import decoders, models, pre_tokenizers

from bevy_jax import text as text_lib


def _byte_level(directory: pathlib.Path) -> text_lib.Text:
  """A tokenizer with one token a byte: every accent spans two tokens."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocab = {'<end>': 0} | {c: i + 1 for i, c in enumerate(alphabet)}
  tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(['<end>'])
  tokenizer.save(str(directory / 'tokenizer.json'))
  return text_lib.Text(directory)


class TextTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.text = _byte_level(self.folder)

  @parameterized.parameters('plain', 'naïve café', '🙂🙃', 'a🙂', '日本語\n')
  def test_pieces_are_whole_characters(self, text):
    ids = self.text.encode(text)
    pieces = text_lib.Pieces(self.text)
    shown = [pieces.feed(i) for i in ids]
    self.assertNotIn('\ufffd', ''.join(shown))
    self.assertEqual(''.join(shown) + pieces.flush(), text)
    self.assertLen(ids, len(text.encode()))

  def test_a_piece_is_read_behind_the_prompt(self):
    """Llama-like decoders drop the first space of what they are given."""
    vocab = {'<unk>': 0, '▁a': 1, '▁time': 2}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    folder = self.folder / 'metaspace'
    folder.mkdir()
    tokenizer.save(str(folder / 'tokenizer.json'))
    pieces = text_lib.Pieces(text_lib.Text(folder), before=[1])
    self.assertEqual(pieces.feed(2), ' time')

  def test_broken_bytes_come_out_at_the_end_only(self):
    ids = self.text.encode('x🙂')[:-1]
    pieces = text_lib.Pieces(self.text)
    self.assertEqual(''.join(pieces.feed(i) for i in ids), 'x')
    self.assertIn('\ufffd', pieces.flush())

  def test_stop_string_cuts_and_is_never_shown(self):
    watch = text_lib.Watch(self.text, ['END', 'DO'])
    seen = []
    for i in self.text.encode('say EN, then END of it'):
      stopped = watch.feed(i)
      seen.append(watch.text)
      if stopped:
        break
    self.assertTrue(stopped)
    self.assertEqual(watch.text, 'say EN, then ')
    self.assertFalse([s for s in seen if s.endswith(('E', 'EN', 'END'))])

  def test_held_back_text_is_shown_in_the_end(self):
    watch = text_lib.Watch(self.text, ['END'])
    for i in self.text.encode('the EN'):
      self.assertFalse(watch.feed(i))
    self.assertEqual(watch.text, 'the ')
    watch.finish()
    self.assertEqual(watch.text, 'the EN')

  def test_silent_tokens_count_but_do_not_show(self):
    watch = text_lib.Watch(self.text, [], silent=[0])
    for i in [*self.text.encode('hi'), 0]:
      watch.feed(i)
    watch.finish()
    self.assertEqual(watch.text, 'hi')
    self.assertLen(watch.tokens, 3)

  def test_missing_tokenizer_is_named(self):
    empty = self.folder / 'none'
    empty.mkdir()
    with pytest.raises(ValueError, match=r'tokenizer\.json'):
      text_lib.Text(empty)


if __name__ == '__main__':
  absltest.main()
