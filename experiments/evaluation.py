"""Quality of a trained model: bits per byte, use of experts, samples."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from bevy_jax.experiments import corpus, forward
from bevy_jax.layers import config as config_lib

_ROWS = 64


class Judged(NamedTuple):
  """How well a text was predicted.

  Attributes:
    loss: mean nats a token.
    bits_per_byte: bits over bytes of raw UTF-8 text.
    tokens: predictions that were counted.
    text_bytes: bytes that they spell.
    loads: float64 `[L, E]`, how many of them used each expert.
  """

  loss: float
  bits_per_byte: float
  tokens: int
  text_bytes: int
  loads: np.ndarray

  def figures(self) -> dict[str, float]:
    """All but the loads, for a JSON file."""
    return {k: v for k, v in self._asdict().items() if k != 'loads'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows:
  """Documents cut so that every token is predicted once, with context.

  Attributes:
    tokens: int32 `[n, window + 1]`, padded with the end token.
    counted: float32 `[n, window]`, 1 where the prediction counts.
    text_bytes: bytes of the raw UTF-8 text that the counted tokens spell.
  """

  tokens: np.ndarray
  counted: np.ndarray
  text_bytes: int

  @classmethod
  def of(
    cls,
    tokenizer: tokenizers.Tokenizer,
    documents: Sequence[str],
    window: int,
  ) -> 'Windows':
    """Windows overlap by half: later ones count their second half only.

    A document follows one end token and its text alone is counted, so the
    nats over `text_bytes` are those of the text, whatever the tokenizer.
    """
    end = corpus.end_id(tokenizer)
    tokens, counted = [], []
    for ids in corpus.encode(tokenizer, documents):
      line = np.concatenate([[end], ids.astype(np.int64)])
      done = 0
      for start in range(0, max(len(line) - 1 - window // 2, 1), window // 2):
        piece = line[start : start + window + 1]
        mask = np.zeros(window, np.float32)
        mask[done - start : len(piece) - 1] = 1
        tokens.append(np.pad(piece, (0, window + 1 - len(piece))))
        counted.append(mask)
        done = start + len(piece) - 1
      assert done == len(ids), (done, len(ids))
    return cls(
      tokens=np.stack(tokens).astype(np.int32),
      counted=np.stack(counted),
      text_bytes=sum(len(d.encode('utf-8')) for d in documents),
    )


def evaluate(
  config: config_lib.ModelConfig,
  weights: forward.Weights,
  windows: Windows,
  attention: str,
  dtype: str = 'bfloat16',
  rows: int = _ROWS,
) -> Judged:
  """Predicts every counted token of the windows once, `rows` at a time."""
  count = len(windows.tokens)
  # A power of two, so that texts of any size share few compiled programs.
  rows = min(rows, 1 << (count - 1).bit_length())
  nats, loads = 0.0, np.zeros((config.num_layers, config.num_experts))
  for first in range(0, count, rows):
    piece = slice(first, first + rows)
    short = rows - len(windows.tokens[piece])
    tokens = np.pad(windows.tokens[piece], ((0, short), (0, 0)))
    counted = np.pad(windows.counted[piece], ((0, short), (0, 0)))
    total, load = _measure(config, attention, dtype, weights, tokens, counted)
    nats += float(total)
    loads += np.asarray(load, np.float64)
  number = int(windows.counted.sum())
  bits = nats / math.log(2) / windows.text_bytes
  return Judged(nats / number, bits, number, windows.text_bytes, loads)


def expert_use(loads: dict[str, np.ndarray]) -> dict[str, object]:
  """How even, and how different between two domains, expert use is a layer.

  `loads` holds counts `[L, E]` a domain. `max_over_mean` is of both domains
  with equal weight; `distance` is the total variation distance between the
  two domains' distributions, 0 for the same experts and 1 for disjoint ones.
  """
  first, second = (x / x.sum(axis=-1, keepdims=True) for x in loads.values())
  mean = (first + second) / 2
  return {
    'max_over_mean': (mean.max(axis=-1) / mean.mean(axis=-1)).tolist(),
    'min_over_mean': (mean.min(axis=-1) / mean.mean(axis=-1)).tolist(),
    'unused': int((mean == 0).sum()),
    'distance': (np.abs(first - second).sum(axis=-1) / 2).tolist(),
  }


def sample(
  config: config_lib.ModelConfig,
  weights: forward.Weights,
  tokenizer: tokenizers.Tokenizer,
  prompts: Sequence[str],
  *,
  new_tokens: int,
  temperature: float,
  seed: int,
  attention: str,
) -> list[str]:
  """Continues each prompt by whole forward passes: slow, and needs no cache.

  Temperature 0 is greedy. Texts are prompt and continuation, up to the end
  token.
  """
  encoded = [e.ids for e in tokenizer.encode_batch_fast(list(prompts))]
  longest = max(map(len, encoded)) + new_tokens
  if longest > config.context:
    raise ValueError(
      f'prompt and {new_tokens} new tokens need {longest} positions but the '
      f'context is {config.context}; ask for fewer tokens.'
    )
  width = -(-longest // 64) * 64
  tokens = np.zeros((len(encoded), width), np.int32)
  lengths = np.asarray([len(ids) for ids in encoded], np.int32)
  for row, ids in zip(tokens, encoded, strict=True):
    row[: len(ids)] = ids
  held = jnp.asarray(tokens)
  key = jax.random.key(seed)
  for i in range(new_tokens):
    held = _extend(
      config,
      attention,
      weights,
      temperature,
      held,
      jnp.asarray(lengths + i),
      jax.random.fold_in(key, i),
    )
  texts = []
  for row, ids in zip(np.asarray(held), encoded, strict=True):
    made = row[len(ids) : len(ids) + new_tokens]
    ends = np.flatnonzero(np.isin(made, config.eos_ids))
    made = made[: ends[0]] if len(ends) else made
    texts.append(tokenizer.decode(ids + made.tolist()))
  return texts


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _measure(
  config: config_lib.ModelConfig,
  attention: str,
  dtype: str,
  weights: forward.Weights,
  tokens: jax.Array,
  counted: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  out = forward.run(
    config, weights, tokens[:, :-1], attention=attention, dtype=dtype
  )
  nats = forward.token_losses(weights, out.hidden, tokens[:, 1:])
  used = out.chosen * counted[None, ..., None]
  return jnp.sum(nats * counted), jnp.sum(used, axis=(1, 2))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _extend(
  config: config_lib.ModelConfig,
  attention: str,
  weights: forward.Weights,
  temperature: float,
  tokens: jax.Array,
  lengths: jax.Array,
  key: jax.Array,
) -> jax.Array:
  """Writes one new token at `lengths [B]` of `tokens [B, S]`."""
  out = forward.run(config, weights, tokens, attention=attention)
  rows = jnp.arange(len(tokens))
  last = out.hidden[rows, lengths - 1].astype(jnp.float32)
  logits = last @ weights['shared']['embed'].T
  scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
  drawn = jax.random.categorical(key, scaled, axis=-1)
  new = jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1))
  return tokens.at[rows, lengths].set(new.astype(jnp.int32))
