"""What storing experts in fewer bits costs, in bits per byte of a text."""

import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import tokenizers

from bevy_jax import loading, storage
from bevy_jax.experiments import corpus, evaluation, forward


class Cost(NamedTuple):
  """How well a text is predicted with experts stored in one way.

  Attributes:
    experts: the storage, as `storage.name` spells it.
    bits_per_weight: of a stored expert, scales included.
    text: whose bytes.
    bits_per_byte: of the text.
    tokens: predictions that were counted.
  """

  experts: str
  bits_per_weight: float
  text: str
  bits_per_byte: float
  tokens: int


class Asked(NamedTuple):
  """A comparison.

  Attributes:
    model: 'demo' or a directory.
    corpus: folder with {books,python}.valid.txt.xz.
    experts: names of storages; the first is what others are set beside.
    limit: about so many tokens of each text; 0 for all.
    rows: windows at once.
  """

  model: str
  corpus: pathlib.Path
  experts: tuple[str, ...]
  limit: int
  rows: int


def measured(asked: Asked, dtype: str) -> Iterator[Cost]:
  """The cost of each storage on each text; products in `dtype`."""
  model = loading.load(asked.model, param_dtype='float32')
  check(model)
  texts = {
    domain: windows(
      model,
      corpus.read_documents(asked.corpus / f'{domain}.valid.txt.xz'),
      asked.limit,
    )
    for domain in corpus.DOMAINS
  }
  storages = [storage.parse(name) for name in asked.experts]
  attention = forward.best_attention(model.config, model.config.context)
  yield from costs(model, texts, storages, attention, dtype, asked.rows)


def check(model: loading.Loaded) -> None:
  """ValueError where this is no model that `forward` can run from floats."""
  c = model.config
  odd = c.qk_norm != 'head' or c.qkv_bias or c.out_bias or c.windows
  if odd or not all(c.moe_layers) or c.shared_dim or not c.tied:
    raise ValueError(
      f'{model.directory} is not built like the demo model, and only such '
      'models can be judged: every layer with routed experts alone, norms on '
      'query and key heads, full attention, a tied embedding.'
    )
  if model.format is not None:
    raise ValueError(
      f'{model.directory} is stored as {model.format.name} already; give the '
      'model that it was converted from.'
    )


def shortened(
  tokenizer: tokenizers.Tokenizer, documents: Sequence[str], limit: int
) -> list[str]:
  """The start of every document, about `limit` tokens in all; 0 for all."""
  total = sum(map(len, corpus.encode(tokenizer, documents)))
  if not limit or total <= limit:
    return list(documents)
  return [d[: math.ceil(len(d) * limit / total)] for d in documents]


def costs(
  model: loading.Loaded,
  texts: dict[str, evaluation.Windows],
  storages: Sequence[storage.Storage],
  attention: str,
  dtype: str,
  rows: int,
) -> Iterator[Cost]:
  """Judges one storage after another, each on all texts.

  Args:
    model: a demo model as floats, its shared weights in float32.
    texts: windows of each text.
    storages: what experts are stored as before they are used.
    attention: see `forward.run`.
    dtype: of the matrix products.
    rows: windows at once.
  """
  config = model.config
  shape = (config.num_layers, config.num_experts)
  whole = storage.experts(model.experts, None, config.expert_shape)
  for kind in storages:
    blocks = [storage.encode(kind, w) for w in whole]
    bits = 8 * blocks[0].nbytes / whole[0].size
    wide = [storage.decode(kind, b, config.expert_shape) for b in blocks]
    weights: forward.Weights = {
      'shared': model.params,
      'experts': jnp.asarray(np.stack(wide).reshape(*shape, *wide[0].shape)),
    }
    for name, windows in texts.items():
      said = evaluation.evaluate(
        config, weights, windows, attention, dtype, rows
      )
      yield Cost(
        storage.name(kind), bits, name, said.bits_per_byte, said.tokens
      )


def windows(
  model: loading.Loaded, documents: Sequence[str], limit: int
) -> evaluation.Windows:
  """The windows of a text, as the model's tokenizer reads it."""
  tokenizer = tokenizers.Tokenizer.from_file(
    str(model.directory / 'tokenizer.json')
  )
  some = shortened(tokenizer, documents, limit)
  return evaluation.Windows.of(tokenizer, some, model.config.context)


def excess(found: Sequence[Cost]) -> np.ndarray:
  """Bits per byte above those of the first storage on the same text."""
  first: dict[str, float] = {}
  for cost in found:
    first.setdefault(cost.text, cost.bits_per_byte)
  return np.asarray([c.bits_per_byte - first[c.text] for c in found])
