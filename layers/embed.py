"""From tokens to the residual stream, and from it to logits."""

from typing import Any

import jax
import jax.numpy as jnp

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import norm


def embed(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
  """Rows of the embedding for int32 `tokens [...]`: `[..., D]`."""
  out: jax.Array = params['embed'].at[tokens].get(mode='clip')
  return out


def logits(
  config: config_lib.ModelConfig, params: dict[str, Any], x: jax.Array
) -> jax.Array:
  """Final norm and head on `x [..., D]`: float32 `[..., V]`."""
  x = norm.rms_norm(x, params['final_norm'], config.norm_eps)
  head = params['embed'].T if config.tied else params['head']
  return jnp.matmul(x, head, preferred_element_type=jnp.float32)
