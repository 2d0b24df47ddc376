"""Attention of one new token a row as a GPU kernel, on the cache in place.

A program has one row and one head of keys, with all the queries that share it.
It finishes its queries and its new key, writes key and value into the cache
and walks over the row's own positions: what lies behind them costs nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kernel_call as kernels
from bevy_jax.layers import kv_cache

ATTEND = 64, 4, 3
_HALVES = np.int32(0), np.int32(1)  # Of a head: what is rotated together.


def attend(
  config: config_lib.ModelConfig,
  p: dict[str, Any],
  cache: kv_cache.LayerCache,
  window: int,
  qkv_NxA: jax.Array,
  rows_N: jax.Array,
  positions_N: jax.Array,
  go_N: jax.Array,
  cos_Nxh: jax.Array,
  sin_Nxh: jax.Array,
) -> tuple[jax.Array, kv_cache.LayerCache]:
  """Mixed values `[N, H * dh]` and the cache with each row's new position.

  Args:
    config: the model.
    p: the layer's weights; only norms of queries and keys are used.
    cache: of the layer.
    window: the last positions that a query sees; 0 for all.
    qkv_NxA: from `kernel_dense.project`.
    rows_N: int32 rows of the cache.
    positions_N: int32, of the new tokens.
    go_N: int32; where 0 nothing is read or written for a row, and its mixed
      values are 0.
    cos_Nxh: float32 `[N, dh / 2]`, of the rotation at these positions.
    sin_Nxh: likewise.
  """
  c = config
  n, heads = qkv_NxA.shape[0], c.num_heads
  kv, dh = c.num_kv_heads, c.head_dim
  context, half = cache.k.shape[2], dh // 2
  share, hp, dp = heads // kv, kernels.padded(half), kernels.padded(dh)
  lines = kernels.padded(share, kernels.LEAST_ROWS)
  norms = [p['q_norm'], p['k_norm']] if c.qk_norm else []
  norms = [norm.reshape(*norm.shape[:-1], -1, 2, half) for norm in norms]
  if c.qk_norm == 'head':
    norms = [norm[0] for norm in norms]
  dtype = qkv_NxA.dtype

  def kernel(*refs: Any) -> None:
    qkv, values, rows, positions, go, cosines, sines, old_k, old_v, *rest = refs
    k_out, v_out, out = rest[-3:]
    i, head = pl.program_id(0), pl.program_id(1)
    row = jnp.clip(rows[i], 0, old_k.shape[0] - 1)
    position = positions[i]
    going = (go[i] != 0) & (rows[i] < old_k.shape[0]) & (rows[i] >= 0)
    going = going & (position < context) & (position >= 0)
    some = pl.ds(0, hp)
    narrow = jnp.arange(hp, dtype=jnp.int32) < half
    wide = jnp.arange(dp, dtype=jnp.int32) < dh
    cosine = kernels.load(cosines.at[i, some], narrow)[None, :]
    sine = kernels.load(sines.at[i, some], narrow)[None, :]

    def halves(first: Any, count: int, keep: Any) -> list[jax.Array]:
      """`count` heads from `first` on, lower and upper half, as float32."""
      return [
        kernels.load(qkv.at[i, pl.ds(first, count), part, some], keep).astype(
          jnp.float32
        )
        for part in _HALVES
      ]

    def finished(
      first: Any, count: int, real: int, norm: Any, start: int, of: int
    ) -> tuple[jax.Array, jax.Array]:
      """Heads with their norm and rotated, both halves.

      `start` and `of` are the first and the number of heads of this kind.
      """
      line = jnp.arange(count, dtype=jnp.int32)
      keep = (line < real)[:, None] & narrow[None, :]
      both = halves(first, count, keep)
      if c.qk_norm is not None:
        if c.qk_norm == 'head':
          squares = sum(jnp.sum(x * x, axis=1) for x in both) / dh
          scales = [
            kernels.load(norm.at[part, some], narrow)[None, :]
            for part in _HALVES
          ]
        else:
          every = jnp.arange(kernels.padded(of), dtype=jnp.int32) < of
          whole = halves(
            start, every.shape[0], every[:, None] & narrow[None, :]
          )
          squares = sum(jnp.sum(x * x) for x in whole) / (of * dh)
          squares = jnp.broadcast_to(squares, (count,))
          there = pl.ds(first - start, count)
          scales = [
            kernels.load(norm.at[there, part, some], keep) for part in _HALVES
          ]
        factor = jax.lax.rsqrt(squares + c.norm_eps)[:, None]
        both = [
          ((x * factor).astype(dtype) * scale.astype(dtype)).astype(jnp.float32)
          for x, scale in zip(both, scales, strict=True)
        ]
      a, b = both
      turned = a * cosine - b * sine, b * cosine + a * sine
      low, high = (jnp.where(keep, x, 0).astype(dtype) for x in turned)
      return low, high

    q_norm, k_norm = (rest[0], rest[1]) if norms else (None, None)
    q_low, q_high = finished(head * share, lines, share, q_norm, 0, heads)
    k_low, k_high = finished(heads + head, 1, 1, k_norm, heads, kv)
    v_new = kernels.load(values.at[i, heads + kv + head, pl.ds(0, dp)], wide)
    finite = jnp.abs(v_new.astype(jnp.float32)) < jnp.inf
    bad = jnp.max(jnp.where(wide & ~finite, 1, 0))
    v_new = jnp.where(wide & (bad == 0), v_new, 0).astype(old_v.dtype)
    spoilt = 0.0 / (1 - bad).astype(jnp.float32)  # nan where it is bad.
    k_low = (k_low.astype(jnp.float32) + spoilt).astype(old_k.dtype)
    k_high = (k_high.astype(jnp.float32) + spoilt).astype(old_k.dtype)
    write = (narrow & going)[None, :]
    spot = pl.ds(position, 1)
    kernels.store(k_out.at[row, head, spot, _HALVES[0], some], k_low, write)
    kernels.store(k_out.at[row, head, spot, _HALVES[1], some], k_high, write)
    kernels.store(
      v_out.at[row, head, position, pl.ds(0, dp)], v_new, wide & going
    )

    scale = dh**-0.5

    def own(a: jax.Array, b: jax.Array) -> jax.Array:
      return jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32), axis=1)

    most = (own(q_low, k_low) + own(q_high, k_high)) * scale
    total = jnp.ones((lines,), jnp.float32)
    mixed = jnp.broadcast_to(v_new.astype(jnp.float32)[None, :], (lines, dp))
    begin = jnp.maximum(position - window + 1, 0) if window else jnp.int32(0)
    stop = jnp.where(going, position, 0)
    steps = jnp.arange(ATTEND[0], dtype=jnp.int32)

    def step(j: jax.Array, carry: Any) -> Any:
      mixed, most, total = carry
      places = j * ATTEND[0] + steps
      seen = (places < position) & (places >= begin)
      at = pl.ds(j * ATTEND[0], ATTEND[0])
      known = seen[:, None] & narrow[None, :]
      first = kernels.load(old_k.at[row, head, at, _HALVES[0], some], known)
      second = kernels.load(old_k.at[row, head, at, _HALVES[1], some], known)
      scores = kernels.dot_rows(q_low, first.astype(dtype))
      scores += kernels.dot_rows(q_high, second.astype(dtype))
      scores = jnp.where(seen[None, :], scores * scale, -1e30)
      new_most = jnp.maximum(most, jnp.max(scores, axis=1))
      fade = jnp.exp(most - new_most)
      weights = jnp.exp(scores - new_most[:, None])
      found = kernels.load(
        old_v.at[row, head, at, pl.ds(0, dp)], seen[:, None] & wide[None, :]
      )
      mixed = mixed * fade[:, None] + kernels.dot_rows(
        weights.astype(found.dtype), found, first=True
      )
      return mixed, new_most, total * fade + jnp.sum(weights, axis=1)

    mixed, most, total = jax.lax.fori_loop(
      begin // ATTEND[0],
      (stop + ATTEND[0] - 1) // ATTEND[0],
      step,
      (mixed, most, total),
    )
    made = jnp.where(going, mixed / total[:, None], 0)
    line = jnp.arange(lines, dtype=jnp.int32)
    mine = (line < share)[:, None] & wide[None, :]
    kernels.store(
      out.at[i, pl.ds(head * share, lines), pl.ds(0, dp)], made, mine
    )

  made_NxHxd = qkv_NxA.reshape(n, heads + 2 * kv, dh)
  split_NxHx2xh = qkv_NxA.reshape(n, heads + 2 * kv, 2, half)
  keys = cache.k.reshape(*cache.k.shape[:3], 2, half)
  operands = (
    split_NxHx2xh,
    made_NxHxd,
    rows_N,
    positions_N,
    go_N,
    cos_Nxh,
    sin_Nxh,
    keys,
    cache.v,
    *norms,
  )
  k, v, mixed = kernels.call(
    kernel,
    'attend',
    (n, kv),
    (
      jax.ShapeDtypeStruct(keys.shape, keys.dtype),
      jax.ShapeDtypeStruct(cache.v.shape, cache.v.dtype),
      jax.ShapeDtypeStruct((n, heads, dh), dtype),
    ),
    operands,
    warps=ATTEND[1],
    stages=ATTEND[2],
    aliases={7: 0, 8: 1},
  )
  return mixed.reshape(n, heads * dh), kv_cache.LayerCache(
    k.reshape(cache.k.shape), v
  )
