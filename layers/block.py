"""One decoder layer in its two halves: attend and route, apply experts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bevy_jax.layers import attention, experts, kv_cache, norm, router
from bevy_jax.layers import config as config_lib

LayerParams = dict[str, Any]


class Work(NamedTuple):
  """Which experts to apply to which rows; N rows, T choices, M experts.

  Attributes:
    slots: int32 `[N, T]`, slot of each choice, -1 where it is not now.
    distinct: int32 `[M]`, the slots to read, -1 behind the last.
    reads: how many of `distinct` to read: an int32 scalar, or M itself.
  """

  slots: jax.Array
  distinct: jax.Array
  reads: jax.Array | int


def can_read(table_E: jax.Array, ids_NxT: jax.Array) -> jax.Array:
  """Which rows find all their choices in a table, see `work`: bool `[N]`."""
  return jnp.all(table_E.at[ids_NxT].get(mode='clip') >= 0, axis=1)


def work(
  table_E: jax.Array, ids_NxT: jax.Array, active_N: jax.Array, most: int
) -> Work:
  """What some rows' choices read, by where each expert lies.

  Args:
    table_E: int32, slot of each expert, -1 where it may not be read.
    ids_NxT: int32, the choices.
    active_N: bool, rows that count; the others read nothing.
    most: M, no fewer than the distinct experts that N rows can choose.
  """
  slots = table_E.at[ids_NxT].get(mode='clip')
  slots = jnp.where(active_N[:, None], slots, -1)
  # In the order of their ids: each compares with all, since a kernel or two
  # of that are cheaper than a sort.
  expert_E = jnp.arange(table_E.shape[0], dtype=jnp.int32)
  chosen = (ids_NxT[:, :, None] == expert_E[None, None]) & (slots >= 0)[
    :, :, None
  ]
  used_E = jnp.any(chosen, axis=(0, 1))
  before_E = jnp.sum(
    used_E[None] & (expert_E[None] < expert_E[:, None]), axis=1
  )
  place_M = jnp.arange(most, dtype=jnp.int32)
  there = used_E[None] & (before_E[None] == place_M[:, None])
  distinct = jnp.max(jnp.where(there, table_E[None], -1), axis=1)
  return Work(slots, distinct, jnp.sum(used_E, dtype=jnp.int32))


def attend(
  config: config_lib.ModelConfig,
  p: LayerParams,
  cache: kv_cache.LayerCache,
  window: int,
  x_GxTxD: jax.Array,
  rows_G: jax.Array,
  positions_GxT: jax.Array,
) -> tuple[jax.Array, kv_cache.LayerCache]:
  """Attention with its residual; writes the cache, then reads it."""
  with jax.named_scope('attend'):
    h = norm.rms_norm(x_GxTxD, p['attn_norm'], config.norm_eps)
    q, k, v = attention.project(config, p, h, positions_GxT)
    cache = kv_cache.write(cache, rows_G, positions_GxT, k, v)
    seen = kv_cache.read(cache, rows_G)
    mixed = attention.attend(q, seen.k, seen.v, positions_GxT, window)
    return x_GxTxD + attention.output(config, p, mixed), cache


def route(
  config: config_lib.ModelConfig, p: LayerParams, x_NxD: jax.Array
) -> router.Routing:
  """The router of an MoE layer on the stream after attention."""
  with jax.named_scope('route'):
    h = norm.rms_norm(x_NxD, p['mlp_norm'], config.norm_eps)
    return router.route(config, p['router'], h)


def expert_outputs(
  config: config_lib.ModelConfig,
  p: LayerParams,
  pool: experts.Pool,
  x_NxD: jax.Array,
  work: Work,
  partial_NxTxD: jax.Array,
) -> jax.Array:
  """Outputs of the experts in `work`, the others' from `partial`."""
  with jax.named_scope('experts'):
    h = norm.rms_norm(x_NxD, p['mlp_norm'], config.norm_eps)
    return experts.apply(
      pool, h, work.slots, work.distinct, work.reads, partial_NxTxD
    )


def finish_experts(
  config: config_lib.ModelConfig,
  p: LayerParams,
  x_NxD: jax.Array,
  weights_NxT: jax.Array,
  y_NxTxD: jax.Array,
) -> jax.Array:
  """Sums the choices, adds the shared expert and the residual, `[N, D]`."""
  with jax.named_scope('combine'):
    out = experts.combine(weights_NxT, y_NxTxD)
    if config.shared_dim:
      h = norm.rms_norm(x_NxD, p['mlp_norm'], config.norm_eps)
      out = out + _shared(config, p, h)
    return x_NxD + out.astype(x_NxD.dtype)


def dense(
  config: config_lib.ModelConfig, p: LayerParams, x: jax.Array
) -> jax.Array:
  """The feed-forward half of a layer without experts."""
  with jax.named_scope('dense'):
    h = norm.rms_norm(x, p['mlp_norm'], config.norm_eps)
    return x + _feed_forward(h, p['dense_in'], p['dense_out']).astype(x.dtype)


def _shared(
  config: config_lib.ModelConfig, p: LayerParams, h: jax.Array
) -> jax.Array:
  out = _feed_forward(h, p['shared_in'], p['shared_out'])
  if config.shared_gate:
    gate = jnp.matmul(h, p['shared_gate'], preferred_element_type=jnp.float32)
    out = jax.nn.sigmoid(gate) * out
  return out


def _feed_forward(h: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
  gate = jnp.matmul(h, w_in[0], preferred_element_type=jnp.float32)
  up = jnp.matmul(h, w_in[1], preferred_element_type=jnp.float32)
  hidden = (jax.nn.silu(gate) * up).astype(h.dtype)
  return jnp.matmul(hidden, w_out, preferred_element_type=jnp.float32)
