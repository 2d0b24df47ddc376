"""Grouped-query attention over a cache of request rows."""

from typing import Any

import jax
import jax.numpy as jnp

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import norm, rope


def project(
  config: config_lib.ModelConfig,
  p: dict[str, Any],
  x_GxTxD: jax.Array,
  positions_GxT: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Queries `[G, T, H, dh]`, keys and values `[G, T, K, dh]`, rotated."""
  c = config
  q, k, v = _apart(c, p, x_GxTxD)
  if c.qk_norm == 'full':
    q = norm.rms_norm(q, p['q_norm'], c.norm_eps)
    k = norm.rms_norm(k, p['k_norm'], c.norm_eps)
  if c.clip_qkv is not None:
    q, k, v = (jnp.clip(a, -c.clip_qkv, c.clip_qkv) for a in (q, k, v))
  lead = x_GxTxD.shape[:2]
  q = q.reshape(*lead, c.num_heads, c.head_dim)
  k = k.reshape(*lead, c.num_kv_heads, c.head_dim)
  v = v.reshape(*lead, c.num_kv_heads, c.head_dim)
  if c.qk_norm == 'head':
    q = norm.rms_norm(q, p['q_norm'], c.norm_eps)
    k = norm.rms_norm(k, p['k_norm'], c.norm_eps)
  angles, scale = rope.frequencies(c.rope, c.head_dim)
  q = rope.rotate(q, positions_GxT, angles, scale)
  k = rope.rotate(k, positions_GxT, angles, scale)
  return q, k, v


def _apart(
  c: config_lib.ModelConfig, p: dict[str, Any], x: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Queries, keys and values with their biases, whatever form `p` has."""
  if 'wqkv' in p:
    made = x @ p['wqkv'].T
    if c.qkv_bias:
      made = _add(made, p['bqkv'])
    ends = [
      c.num_heads * c.head_dim,
      (c.num_heads + c.num_kv_heads) * c.head_dim,
    ]
    q, k, v = jnp.split(made, ends, axis=-1)
    return q, k, v
  q, k, v = x @ p['wq'], x @ p['wk'], x @ p['wv']
  if c.qkv_bias:
    q, k, v = (_add(a, p[b]) for a, b in ((q, 'bq'), (k, 'bk'), (v, 'bv')))
  return q, k, v


def attend(
  q_GxTxHxd: jax.Array,
  k_GxKxCxd: jax.Array,
  v_GxKxCxd: jax.Array,
  positions_GxT: jax.Array,
  window: int,
) -> jax.Array:
  """Each query sees the cached positions up to its own: `[G, T, H * dh]`.

  With a `window` it sees only the last `window` of them. The softmax is
  float32; the result has the type of the queries.
  """
  g, t, h, d = q_GxTxHxd.shape
  kv, c = k_GxKxCxd.shape[1:3]
  q = q_GxTxHxd.reshape(g, t, kv, h // kv, d)
  scores = jnp.einsum(
    'gtkrd,gkcd->gkrtc', q, k_GxKxCxd, preferred_element_type=jnp.float32
  )
  keys = jnp.arange(c, dtype=jnp.int32)[None, None, :]
  last = positions_GxT[:, :, None]
  seen = keys <= last
  if window:
    seen &= keys > last - window
  scores = jnp.where(seen[:, None, None], scores * d**-0.5, -1e30)
  weights = jax.nn.softmax(scores, axis=-1).astype(v_GxKxCxd.dtype)
  out = jnp.einsum('gkrtc,gkcd->gtkrd', weights, v_GxKxCxd)
  return out.reshape(g, t, h * d).astype(q_GxTxHxd.dtype)


def output(
  config: config_lib.ModelConfig, p: dict[str, Any], mixed: jax.Array
) -> jax.Array:
  """The projection back to the residual stream, `[G, T, D]`."""
  out = mixed @ (p['wo_t'].T if 'wo_t' in p else p['wo'])
  return _add(out, p['bo']) if config.out_bias else out


def _add(x: jax.Array, bias: jax.Array) -> jax.Array:
  return x + bias.reshape((1,) * (x.ndim - 1) + bias.shape)
