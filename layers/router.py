"""The router: which experts a token uses, and with what weights."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bevy_jax.layers import config as config_lib


class Routing(NamedTuple):
  """What the router says of each row.

  Attributes:
    ids: int32 `[..., T]`, distinct expert ids, best first.
    weights: float32 `[..., T]`, how much each expert counts.
    sound: bool `[...]`, False where the logits were not finite.
  """

  ids: jax.Array
  weights: jax.Array
  sound: jax.Array


def _softmax(logits: jax.Array) -> jax.Array:
  return jax.nn.softmax(logits, axis=-1)


# A score turns float32 logits [..., E] into scores [..., E].
SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {'softmax': _softmax}


def route(
  config: config_lib.ModelConfig, router_DxE: jax.Array, x: jax.Array
) -> Routing:
  """Chooses `top_k` experts for each row of `x [..., D]`.

  Always float32. Ties go to the lowest id. A row whose logits are not finite
  gets ids 0..T-1 and `sound` False, so that no id is ever out of range.
  """
  return choose(config, logits(router_DxE, x))


def logits(router_DxE: jax.Array, x: jax.Array) -> jax.Array:
  """The router's matrix product, float32 `[..., E]`."""
  return jnp.matmul(
    x.astype(jnp.float32),
    router_DxE.astype(jnp.float32),
    precision=jax.lax.Precision.HIGHEST,
  )


def choose(config: config_lib.ModelConfig, logits: jax.Array) -> Routing:
  """The router after its matrix product: float32 `logits [..., E]`."""
  sound = jnp.all(jnp.isfinite(logits), axis=-1)
  scores = SCORES[config.score](jnp.where(sound[..., None], logits, 0.0))
  weights, ids = jax.lax.top_k(scores, config.top_k)
  if config.norm_topk:
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  return Routing(ids.astype(jnp.int32), weights, sound)


def weigh(
  config: config_lib.ModelConfig, logits: jax.Array, ids: jax.Array
) -> jax.Array:
  """What `choose` would give ids `[..., T]` if it had chosen them."""
  sound = jnp.all(jnp.isfinite(logits), axis=-1)
  scores = SCORES[config.score](jnp.where(sound[..., None], logits, 0.0))
  weights = jnp.take_along_axis(scores, ids, axis=-1)
  if config.norm_topk:
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  return weights
