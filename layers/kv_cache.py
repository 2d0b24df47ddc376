"""Keys and values of every request row, one pair of arrays a layer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bevy_jax.layers import config as config_lib


class LayerCache(NamedTuple):
  """What one layer remembers.

  Attributes:
    k: `[rows, K, context, dh]`, rotated keys at their positions; heads come
      first so that attention is one batched product without a transpose.
    v: `[rows, K, context, dh]`.
  """

  k: jax.Array
  v: jax.Array


def init(
  config: config_lib.ModelConfig, rows: int, context: int, dtype: jnp.dtype
) -> list[LayerCache]:
  """An empty cache, one entry a layer."""
  shape = (rows, config.num_kv_heads, context, config.head_dim)
  return [
    LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    for _ in range(config.num_layers)
  ]


def stacked(
  config: config_lib.ModelConfig, rows: int, context: int, dtype: jnp.dtype
) -> LayerCache:
  """The same as one entry, whose arrays begin with an axis of layers."""
  shape = (
    config.num_layers, rows, config.num_kv_heads, context, config.head_dim,
  )  # fmt: skip
  return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def nbytes(
  config: config_lib.ModelConfig, rows: int, context: int, dtype: jnp.dtype
) -> int:
  """Bytes that `init` would take."""
  width = config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
  return 2 * config.num_layers * rows * context * width


def randomize(caches: Any, seed: int) -> Any:
  """Normal numbers at all positions of caches, which it gives up."""
  leaves, form = jax.tree.flatten(caches)

  def normal(old: jax.Array, key: jax.Array) -> jax.Array:
    return jax.random.normal(key, old.shape, old.dtype)

  fill = jax.jit(
    normal,
    donate_argnums=0,
    keep_unused=True,
    out_shardings=leaves[0].sharding,
  )
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  new = [fill(*each) for each in zip(leaves, keys, strict=True)]
  return jax.tree.unflatten(form, new)


def write(
  cache: LayerCache,
  rows_G: jax.Array,
  positions_GxT: jax.Array,
  k_GxTxKxd: jax.Array,
  v_GxTxKxd: jax.Array,
) -> LayerCache:
  """Stores new keys and values; rows and positions out of range are dropped.

  That is how padding is written: nowhere. A value that is not finite is kept
  as 0 under a key of nan: the text that it belongs to is spoilt for good, but
  not the next one in its row, whose weights of 0 would not hide a nan value.
  """
  finite = jnp.all(jnp.isfinite(v_GxTxKxd), axis=-1, keepdims=True)
  k_GxTxKxd = jnp.where(finite, k_GxTxKxd, jnp.nan)
  v_GxTxKxd = jnp.where(finite, v_GxTxKxd, 0)
  where = (rows_G[:, None], slice(None), positions_GxT)
  k = cache.k.at[where].set(k_GxTxKxd.astype(cache.k.dtype), mode='drop')
  v = cache.v.at[where].set(v_GxTxKxd.astype(cache.v.dtype), mode='drop')
  return LayerCache(k, v)


def read(cache: LayerCache, rows_G: jax.Array) -> LayerCache:
  """The rows of a group, `[G, K, context, dh]`; padding reads the last row."""
  return LayerCache(
    cache.k.at[rows_G].get(mode='clip'), cache.v.at[rows_G].get(mode='clip')
  )
