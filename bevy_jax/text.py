"""From text to tokens and back, piece by piece."""

import pathlib
from collections.abc import Sequence

import tokenizers

# What decoding gives for bytes that are not a whole character yet.
_BROKEN = '\ufffd'


class Text:
  """A model's tokenizer.

  Attributes:
    vocab_size: number of its tokens, added ones included.
  """

  def __init__(self, directory: pathlib.Path):
    path = directory / 'tokenizer.json'
    if not path.is_file():
      raise ValueError(
        f'{directory} has no tokenizer.json; save the tokenizer in its fast '
        'form (tokenizer.json) beside the weights.'
      )
    self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
    self.vocab_size: int = self._tokenizer.get_vocab_size()

  def encode(self, text: str) -> list[int]:
    """Token ids of a prompt, with the special ones that the model expects."""
    ids: list[int] = self._tokenizer.encode(text).ids
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    """Text of token ids, special tokens left out."""
    text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
    return text


class Pieces:
  """The text of one request as its tokens come; never half a character.

  A token may end in the middle of a character, and how it reads may depend
  on the token before. So each piece is what decoding a short tail of tokens
  adds, and it is held back while it ends in broken bytes.
  """

  def __init__(self, text: Text, before: Sequence[int] = ()):
    """`before` are the last tokens that the text goes on from."""
    self._text = text
    self._ids = list(before)
    self._from = 0  # Start of the tail that is decoded again.
    self._shown = len(self._ids)  # Tokens whose text is out.

  def feed(self, token: int) -> str:
    """Takes a token and gives the text that is certain now."""
    self._ids.append(token)
    return self._take(final=False)

  def flush(self) -> str:
    """What is left at the end, broken bytes included."""
    return self._take(final=True)

  def _take(self, final: bool) -> str:
    before = self._text.decode(self._ids[self._from : self._shown])
    whole = self._text.decode(self._ids[self._from :])
    if whole.endswith(_BROKEN) and not final:
      return ''
    self._from, self._shown = self._shown, len(self._ids)
    return whole[len(before) :]


class Watch:
  """The growing text of a request, cut at its first stop string.

  Attributes:
    text: what may be shown; it never ends in the beginning of a stop string.
    tokens: all tokens so far.
  """

  def __init__(
    self,
    text: Text,
    stop: Sequence[str],
    silent: Sequence[int] = (),
    before: Sequence[int] = (),
  ):
    """Watches for `stop`; `silent` tokens add no text; see `Pieces`."""
    self.text = ''
    self.tokens: list[int] = []
    self._silent = frozenset(silent)
    self._pieces = Pieces(text, before)
    self._stop = [s for s in stop if s]
    self._held = ''

  def feed(self, token: int) -> bool:
    """Takes a token; True where a stop string has come."""
    self.tokens.append(token)
    if token in self._silent:
      return False
    return self._grow(self._pieces.feed(token))

  def finish(self) -> None:
    """Shows what was held back; nothing more will come."""
    if not self._grow(self._pieces.flush()):
      self.text += self._held
    self._held = ''

  def _grow(self, piece: str) -> bool:
    self._held += piece
    found = [i for s in self._stop if (i := self._held.find(s)) >= 0]
    if found:
      self.text += self._held[: min(found)]
      self._held, self._stop = '', []
      return True
    keep = self._unsure()
    self.text += self._held[: len(self._held) - keep]
    self._held = self._held[len(self._held) - keep :]
    return False

  def _unsure(self) -> int:
    """Length of the longest end that may begin a stop string."""
    longest = max((len(s) for s in self._stop), default=1) - 1
    for length in range(min(longest, len(self._held)), 0, -1):
      end = self._held[-length:]
      if any(s.startswith(end) for s in self._stop):
        return length
    return 0
