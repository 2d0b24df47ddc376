"""Queries and a new key behind their norm and rotation, inside a GPU kernel.

Queries that share a head of keys and its new key are one tile: what is done to
one is done to all, and code that runs once costs a small kernel most.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kernel_call as kernels

LEAST = 16  # Of anything that a product sums over.
HALVES = np.int32(0), np.int32(1)  # Of a head: what is rotated together.
_FIRST = np.int32(0)
Halves = tuple[jax.Array, jax.Array]


class Refs(NamedTuple):
  """What heads are made of.

  Attributes:
    split: `[N, H + 2K, 2, dh / 2]`, queries, keys and values in halves.
    cos: float32 `[N, dh / 2]`.
    sin: likewise.
    norms: of queries and of keys, `[L, heads or 1, 2, dh / 2]`; maybe none.
  """

  split: Any
  cos: Any
  sin: Any
  norms: list[Any]


class _Tile(NamedTuple):
  """Which heads a tile has.

  Attributes:
    heads: int32 `[lines, padded]`, of queries, keys and values.
    lanes: int32 `[lines, padded]`, of half a head.
    ask: bool `[lines]`, which lines are queries.
    keep: bool `[lines, padded]`, what is real.
  """

  heads: jax.Array
  lanes: jax.Array
  ask: jax.Array
  keep: jax.Array


def share(config: config_lib.ModelConfig) -> int:
  """Queries of a head of keys; in a tile they come behind the new key."""
  return config.num_heads // config.num_kv_heads


def lines(config: config_lib.ModelConfig) -> int:
  """Of a tile: the new key, its queries, and padding."""
  return kernels.padded(share(config) + 1, kernels.LEAST_ROWS)


def finish(
  config: config_lib.ModelConfig,
  refs: Refs,
  layer: jax.Array,
  row: jax.Array,
  head: jax.Array,
) -> Halves:
  """Lower and upper half of a tile's heads, each `[lines, padded]`.

  As `attention.project` makes them, in the type of what was projected.
  """
  some, narrow = kernels.whole(config.head_dim // 2, LEAST)
  tile = _tile(config, head)
  both = [
    kernels.load(refs.split.at[row, tile.heads, part, tile.lanes], tile.keep)
    for part in HALVES
  ]
  a, b = (half.astype(jnp.float32) for half in both)
  if refs.norms:
    a, b = _normed(config, refs, tile, layer, row, (a, b))
  cos, sin = (
    kernels.load(turn.at[row, some], narrow)[None, :]
    for turn in (refs.cos, refs.sin)
  )
  # What is padding is 0, and so it stays.
  dtype = refs.split.dtype
  low, high = a * cos - b * sin, b * cos + a * sin
  return low.astype(dtype), high.astype(dtype)


def _tile(config: config_lib.ModelConfig, head: jax.Array) -> _Tile:
  half = config.head_dim // 2
  size = lines(config), kernels.padded(half, LEAST)
  line, lane = (jax.lax.broadcasted_iota(jnp.int32, size, i) for i in (0, 1))
  asked = head * share(config) + line - 1
  heads = jnp.where(line > 0, asked, config.num_heads + head)
  keep = (line <= share(config)) & (lane < half)
  return _Tile(heads, lane, jnp.arange(size[0], dtype=jnp.int32) > 0, keep)


def _normed(
  config: config_lib.ModelConfig,
  refs: Refs,
  tile: _Tile,
  layer: jax.Array,
  row: jax.Array,
  both: Halves,
) -> list[jax.Array]:
  """Behind the norm of queries or keys, over each head or all of a kind."""
  dtype, width = refs.split.dtype, config.head_dim
  if config.qk_norm == 'head':
    low, high = (jnp.sum(x * x, axis=1) for x in both)
    squares = (low + high) / width
  else:
    kinds = (0, config.num_heads), (config.num_heads, config.num_kv_heads)
    asked, told = (_square(refs.split, row, *kind, width) for kind in kinds)
    squares = jnp.where(tile.ask, asked, told)
  factor = jax.lax.rsqrt(squares + config.norm_eps)[:, None]
  scales = [_scale(config, refs.norms, tile, layer, part) for part in HALVES]
  return [
    ((x * factor).astype(dtype) * scale.astype(dtype)).astype(jnp.float32)
    for x, scale in zip(both, scales, strict=True)
  ]


def _square(
  split: Any, row: jax.Array, first: int, count: int, width: int
) -> jax.Array:
  """The mean square of all heads of a kind."""
  at, real = kernels.some(first, count)
  half, narrow = kernels.whole(width // 2, LEAST)
  every = [
    kernels.load(split.at[row, at, part, half], real[:, None] & narrow[None, :])
    for part in HALVES
  ]
  low, high = (jnp.sum(jnp.square(x.astype(jnp.float32))) for x in every)
  return (low + high) / (count * width)


def _scale(
  config: config_lib.ModelConfig,
  norms: list[Any],
  tile: _Tile,
  layer: jax.Array,
  part: np.int32,
) -> jax.Array:
  """A half of the norms' weights, as the tile has its heads."""
  some, narrow = kernels.whole(config.head_dim // 2, LEAST)
  if config.qk_norm == 'head':
    asked, told = (
      kernels.load(norm.at[layer, _FIRST, part, some], narrow)[None, :]
      for norm in norms
    )
    return jnp.where(tile.ask[:, None], asked, told)
  asked = kernels.load(
    norms[0].at[layer, tile.heads, part, tile.lanes],
    tile.keep & tile.ask[:, None],
  )
  keys = jnp.maximum(tile.heads - config.num_heads, 0)
  told = kernels.load(
    norms[1].at[layer, keys, part, tile.lanes],
    tile.keep & ~tile.ask[:, None],
  )
  return jnp.where(tile.ask[:, None], asked, told)
