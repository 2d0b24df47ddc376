"""Training texts: documents, their tokenizer, packed tokens, data order."""

import json
import lzma
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers

END = '<|endoftext|>'
DOMAINS = ('books', 'python')


def read_documents(path: pathlib.Path) -> list[str]:
  """The documents of one `.txt.xz` file, byte for byte, without separators."""
  if not path.is_file():
    raise ValueError(
      f'corpus file {path} is missing; a corpus folder holds '
      '{books,python}.{train,valid}.txt.xz, documents separated by '
      f'{END}.'
    )
  with lzma.open(path, 'rb') as file:
    return file.read().decode('utf-8').split(END)


def train_tokenizer(
  texts: Iterable[str], vocab_size: int
) -> tokenizers.Tokenizer:
  """A lossless byte-level BPE: no normaliser, `END` is token 0."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[END],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  return tokenizer


def made_tokenizer(
  path: pathlib.Path, folder: pathlib.Path, vocab_size: int
) -> tokenizers.Tokenizer:
  """The tokenizer at `path`, trained on `folder` first where it is missing."""
  if not path.is_file():
    path.parent.mkdir(parents=True, exist_ok=True)
    trained = train_tokenizer(balanced_sample(folder), vocab_size)
    trained.save(str(path))
  tokenizer = tokenizers.Tokenizer.from_file(str(path))
  if tokenizer.get_vocab_size() > vocab_size:
    raise ValueError(
      f'{path} has {tokenizer.get_vocab_size()} entries but the model has '
      f'{vocab_size}; name another --tokenizer or remove that file.'
    )
  return tokenizer


def balanced_sample(folder: pathlib.Path, books_stride: int = 3) -> list[str]:
  """Texts for the tokenizer: all of python, every n-th document of books."""
  books = read_documents(folder / 'books.train.txt.xz')[::books_stride]
  return books + read_documents(folder / 'python.train.txt.xz')


def encode(
  tokenizer: tokenizers.Tokenizer, documents: Sequence[str]
) -> list[np.ndarray]:
  """One uint16 array a document, without separators."""
  if tokenizer.get_vocab_size() > 2**16:
    raise ValueError(
      f'a vocabulary of {tokenizer.get_vocab_size()} does not fit uint16; '
      'train a tokenizer of at most 65536 entries.'
    )
  encodings = tokenizer.encode_batch_fast(
    list(documents), add_special_tokens=False
  )
  return [np.asarray(e.ids, np.uint16) for e in encodings]


def end_id(tokenizer: tokenizers.Tokenizer) -> int:
  """The number of the token between documents."""
  number: int | None = tokenizer.token_to_id(END)
  if number is None:
    raise ValueError(
      f'the tokenizer has no token {END}, which must separate documents; '
      'name another --tokenizer.'
    )
  return number


def pack(documents: Sequence[np.ndarray], end: int) -> np.ndarray:
  """One stream: every document after one `end`, and one at the end."""
  mark = np.asarray([end], np.uint16)
  return np.concatenate([x for d in documents for x in (mark, d)] + [mark])


def tokenised(
  folder: pathlib.Path, tokenizer_path: pathlib.Path, cache: pathlib.Path
) -> dict[str, np.ndarray]:
  """Packed training streams by domain, from `cache` where it holds them.

  The cache is keyed by the tokenizer's text, so that a new tokenizer never
  meets old tokens; files appear whole (written aside, then renamed).
  """
  text = tokenizer_path.read_text(encoding='utf-8')
  tokenizer = tokenizers.Tokenizer.from_str(text)
  stamp = cache / 'tokenizer.json'
  fresh = not stamp.is_file() or stamp.read_text(encoding='utf-8') != text
  cache.mkdir(parents=True, exist_ok=True)
  streams = {}
  for domain in DOMAINS:
    path = cache / f'{domain}.npy'
    if fresh or not path.is_file():
      stamp.unlink(missing_ok=True)
      documents = read_documents(folder / f'{domain}.train.txt.xz')
      aside = cache / f'{domain}.partial.npy'
      ids = encode(tokenizer, documents)
      np.save(aside, pack(ids, end_id(tokenizer)))
      aside.rename(path)
    streams[domain] = np.load(path, allow_pickle=False)
  stamp.write_text(text, encoding='utf-8')
  return streams


class Order:
  """Which windows come next: a pure function of how many were seen.

  Every epoch of a domain cuts its stream at a new random offset and visits
  the windows in a new random order. Nothing is consumed, so a resumed run
  that knows its counts gets what the first run would have got.
  """

  def __init__(self, lengths: Sequence[int], window: int, seed: int):
    """`lengths` in tokens, one a domain, in the order of the joined streams."""
    for length in lengths:
      if length < 2 * window + 1:
        raise ValueError(
          f'a stream of {length} tokens holds no two windows of {window}; '
          'use more text or a shorter window.'
        )
    self._lengths, self._window, self._seed = tuple(lengths), window, seed
    self._epochs: dict[int, tuple[int, np.ndarray]] = {}

  def starts(self, seen: Sequence[int], rows: Sequence[int]) -> np.ndarray:
    """int32 `[sum(rows)]`: first tokens of the next `rows` a domain.

    `seen` is how many windows of each domain came before.
    """
    parts, base = [], 0
    for domain, (length, first, count_now) in enumerate(
      zip(self._lengths, seen, rows, strict=True)
    ):
      # One window less than fit, so that any offset leaves a next token.
      count = (length - 1) // self._window - 1
      for number in range(first, first + count_now):
        epoch = self._epoch(domain, number // count, count)
        parts.append(base + int(epoch[number % count]))
      base += length
    return np.asarray(parts, np.int32)

  def epochs(self, seen: Sequence[int]) -> tuple[float, ...]:
    """How often each domain's text was read."""
    return tuple(
      windows * self._window / length
      for length, windows in zip(self._lengths, seen, strict=True)
    )

  def _epoch(self, domain: int, epoch: int, count: int) -> np.ndarray:
    held = self._epochs.get(domain)
    if held is None or held[0] != epoch:
      rng = np.random.default_rng((self._seed, domain, epoch))
      offset = int(rng.integers(self._window))
      held = (epoch, rng.permutation(count) * self._window + offset)
      self._epochs[domain] = held
    return held[1]


def write_tokenizer(
  tokenizer: tokenizers.Tokenizer, folder: pathlib.Path, context: int
) -> None:
  """Writes tokenizer.json and tokenizer_config.json for any reader."""
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / 'tokenizer.json'))
  config = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'bos_token': END,
    'eos_token': END,
    'pad_token': END,
    'add_prefix_space': False,
    'clean_up_tokenization_spaces': False,
    'model_max_length': context,
  }
  (folder / 'tokenizer_config.json').write_text(
    json.dumps(config, indent=2) + '\n', encoding='utf-8'
  )
