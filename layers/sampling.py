"""From logits to the next token: greedy, or drawn with a seed of its own."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sampling(NamedTuple):
  """How each row draws its token; every field `[G]`.

  Attributes:
    temperature: float32; 0 is greedy.
    top_k: int32; keep the k likeliest tokens, 0 keeps all.
    top_p: float32; keep the likeliest tokens up to this mass, 1 keeps all.
    min_p: float32; drop what is less likely than this times the likeliest.
    seed: int32; with the position it fixes the draw.
  """

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  min_p: jax.Array
  seed: jax.Array


def sample(
  logits_GxV: jax.Array, sampling: Sampling, positions_G: jax.Array
) -> jax.Array:
  """The next token of each row, int32 `[G]`.

  The draw depends on the row's logits, its seed and its position alone, so
  the same request gives the same text whatever runs beside it. Sorting and
  drawing are skipped where every row is greedy.
  """
  greedy = jnp.argmax(logits_GxV, axis=-1).astype(jnp.int32)

  def draw() -> jax.Array:
    drawn = jax.vmap(_draw)(logits_GxV, sampling, positions_G)
    return jnp.where(sampling.temperature > 0, drawn, greedy)

  wild = jnp.any(sampling.temperature > 0)
  out: jax.Array = jax.lax.cond(wild, draw, lambda: greedy)
  return out


def _draw(
  logits_V: jax.Array, sampling: Sampling, position: jax.Array
) -> jax.Array:
  scaled = logits_V / jnp.maximum(sampling.temperature, 1e-6)
  order = jnp.argsort(-scaled, stable=True)
  ranked = scaled[order]
  kept = keep(ranked, sampling.top_k, sampling.top_p, sampling.min_p)
  key = jax.random.fold_in(jax.random.key(sampling.seed), position)
  noise = jax.random.gumbel(key, ranked.shape)
  best = jnp.argmax(jnp.where(kept, ranked + noise, -jnp.inf))
  return order[best].astype(jnp.int32)


def keep(
  ranked_V: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
  """Which of the descending `ranked_V` logits may be drawn, bool `[V]`.

  top-k first, then top-p on what is left, then min-p; the likeliest token
  always stays.
  """
  rank = jnp.arange(ranked_V.shape[0])
  kept = (top_k <= 0) | (rank < top_k)
  probs = jax.nn.softmax(jnp.where(kept, ranked_V, -jnp.inf))
  before = jnp.cumsum(probs) - probs
  kept &= before < top_p
  kept &= probs >= min_p * probs[0]
  return kept | (rank == 0)
