"""The golden truth: everything resident, no cache, plain and slow.

Shares the router, the norm, the rotary embedding and the sampling with the
engine, and nothing else: attention is one full matrix, experts are gathered
per token, every token recomputes the whole text before it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bevy_jax.layers import attention, embed, norm, router
from bevy_jax.layers import config as config_lib
from bevy_jax.layers import sampling as sampling_lib

HIGHEST = jax.lax.Precision.HIGHEST


@functools.partial(jax.jit, static_argnums=0)
def logits(
  config: config_lib.ModelConfig,
  params: dict[str, Any],
  experts_LxEx3xFxD: jax.Array,
  tokens_T: jax.Array,
) -> jax.Array:
  """Logits after every token of one text, float32 `[T, V]`.

  `experts_LxEx3xFxD` has one entry for each layer that has experts.
  """
  with jax.default_matmul_precision('highest'):
    x = embed.embed(params, tokens_T)
    positions = jnp.arange(tokens_T.shape[0])
    moe = 0
    for layer, p in enumerate(params['layers']):
      x = x + _attention(config, p, layer, x, positions)
      h = norm.rms_norm(x, p['mlp_norm'], config.norm_eps)
      if config.moe_layers[layer]:
        x = x + _experts(config, p, experts_LxEx3xFxD[moe], h)
        moe += 1
      else:
        x = x + _swiglu(h, p['dense_in'], p['dense_out'])
    return embed.logits(config, params, x)


def generate(
  config: config_lib.ModelConfig,
  params: dict[str, Any],
  experts_LxEx3xFxD: jax.Array,
  prompt: list[int],
  new_tokens: int,
  *,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  seed: int = 0,
  eos_ids: tuple[int, ...] = (),
  length: int = 0,
) -> list[int]:
  """The new tokens of one request, the ending one included.

  Texts are padded to `length`, or as far as needed where that is 0: equal
  lengths share one compiled program.
  """
  settings = sampling_lib.Sampling(
    jnp.array([temperature], jnp.float32),
    jnp.array([top_k], jnp.int32),
    jnp.array([top_p], jnp.float32),
    jnp.array([min_p], jnp.float32),
    jnp.array([seed], jnp.int32),
  )
  text = list(prompt)
  # One length for all steps: causality hides the padding from every token.
  padded = np.zeros(length or len(prompt) + new_tokens, np.int32)
  for _ in range(new_tokens):
    padded[: len(text)] = text
    last = jnp.array([len(text) - 1], jnp.int32)
    token = _next_token(
      config, params, experts_LxEx3xFxD, jnp.asarray(padded), last, settings
    )
    text.append(int(token[0]))
    if text[-1] in eos_ids:
      break
  return text[len(prompt) :]


@functools.partial(jax.jit, static_argnums=0)
def _next_token(
  config: config_lib.ModelConfig,
  params: dict[str, Any],
  experts_LxEx3xFxD: jax.Array,
  tokens_T: jax.Array,
  last_1: jax.Array,
  settings: sampling_lib.Sampling,
) -> jax.Array:
  out = logits(config, params, experts_LxEx3xFxD, tokens_T)
  return sampling_lib.sample(out[last_1], settings, last_1)


def stack(blocks: Sequence[jax.Array], shape: tuple[int, int]) -> jax.Array:
  """Packed experts by key as one float32 array, `[L, E, 3, F, D]`."""
  whole = np.stack([np.asarray(b).astype(np.float32) for b in blocks])
  return jnp.asarray(whole.reshape(*shape, *whole.shape[1:]))


def _attention(
  c: config_lib.ModelConfig,
  p: dict[str, Any],
  layer: int,
  x: jax.Array,
  positions: jax.Array,
) -> jax.Array:
  h = norm.rms_norm(x, p['attn_norm'], c.norm_eps)
  q, k, v = attention.project(c, p, h[None], positions[None])
  repeat = c.num_heads // c.num_kv_heads
  k, v = (jnp.repeat(a[0], repeat, axis=1) for a in (k, v))
  scores = jnp.einsum('qhd,khd->hqk', q[0], k) / np.sqrt(c.head_dim)
  distance = positions[:, None] - positions[None, :]
  seen = distance >= 0
  if c.window(layer):
    seen &= distance < c.window(layer)
  weights = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf), axis=-1)
  mixed = jnp.einsum('hqk,khd->qhd', weights, v)
  return attention.output(c, p, mixed.reshape(x.shape[0], -1))


def _experts(
  c: config_lib.ModelConfig, p: dict[str, Any], bank: jax.Array, h: jax.Array
) -> jax.Array:
  routing = router.route(c, p['router'], h)
  chosen = bank.astype(h.dtype)[routing.ids]
  gate = jnp.einsum('nd,ntfd->ntf', h, chosen[:, :, 0])
  up = jnp.einsum('nd,ntfd->ntf', h, chosen[:, :, 1])
  y = jnp.einsum('ntf,ntfd->ntd', jax.nn.silu(gate) * up, chosen[:, :, 2])
  out = jnp.einsum('nt,ntd->nd', routing.weights, y)
  if c.shared_dim:
    shared = _swiglu(h, p['shared_in'], p['shared_out'])
    if c.shared_gate:
      shared = jax.nn.sigmoid(h @ p['shared_gate']) * shared
    out = out + shared
  return out


def _swiglu(h: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
  return (jax.nn.silu(h @ w_in[0]) * (h @ w_in[1])) @ w_out
