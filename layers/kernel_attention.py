"""Attention of one new token a row as a GPU kernel, on the cache in place.

A program has one row and one head of keys, with all the queries that share it.
It finishes its queries and its new key, writes key and value into the cache
and walks over the row's own positions: what lies behind them costs nothing.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kernel_call as kernels
from bevy_jax.layers import kernel_rows, kv_cache

ATTEND = 64, 4, 3  # Positions of a step, warps, stages.
_LEAST = 16  # Of anything that a product sums over.
_HALVES = np.int32(0), np.int32(1)  # Of a head: what is rotated together.
_FIRST = np.int32(0)
_Halves = tuple[jax.Array, jax.Array]
# Layer, row, head and position in the caches.
_Place = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def attend(
  config: config_lib.ModelConfig,
  p: dict[str, Any],
  place: kernel_rows.Place,
  caches: kv_cache.LayerCache,
  qkv_NxA: jax.Array,
  rows: kernel_rows.Rows,
) -> tuple[jax.Array, kv_cache.LayerCache]:
  """Mixed values `[N, H * dh]` and the caches with each row's new position.

  For a row that does not go on nothing is read or written; its values are 0.

  Args:
    config: the model.
    p: weights of all layers; only norms of queries and keys are used.
    place: whose.
    caches: of all layers, `[L, R, K, C, dh]`.
    qkv_NxA: from `kernel_dense.project`.
    rows: whose numbers are rows of the caches.
  """
  n, half = qkv_NxA.shape[0], config.head_dim // 2
  all_heads = config.num_heads + 2 * config.num_kv_heads
  norms = [p['q_norm'], p['k_norm']] if config.qk_norm else []
  norms = [norm.reshape(norm.shape[0], -1, 2, half) for norm in norms]
  keys = kernels.View(caches.k, (*caches.k.shape[:4], 2, half))
  operands = (
    kernels.View(qkv_NxA, (n, all_heads, 2, half)),
    kernels.View(qkv_NxA, (n, all_heads, config.head_dim)),
    rows.numbers,
    rows.positions,
    rows.go,
    rows.cos,
    rows.sin,
    *place.operands,
    jnp.asarray([config.window(i) for i in range(place.layers)], jnp.int32),
    keys,
    caches.v,
    *norms,
  )
  attention = _Attend(config, place, qkv_NxA.dtype)
  heads = n, config.num_heads, config.head_dim
  width = config.num_heads * config.head_dim
  k, v, mixed = kernels.call(
    attention.kernel,
    'attend',
    (n, config.num_kv_heads),
    (
      kernels.View(kernels.shape(keys.shape, caches.k.dtype), caches.k.shape),
      kernels.shape(caches.v.shape, caches.v.dtype),
      kernels.View(kernels.shape(heads, qkv_NxA.dtype), (n, width)),
    ),
    operands,
    warps=ATTEND[1],
    stages=ATTEND[2],
    aliases={10: 0, 11: 1},
    early=attention.early,
  )
  return mixed, kv_cache.LayerCache(k, v)


class _Norm(NamedTuple):
  """Weights of a norm of heads: `[L, heads or 1, 2, dh / 2]`, and whose."""

  every: Any
  layer: jax.Array


@dataclasses.dataclass(frozen=True)
class _Heads:
  """Some heads that lie side by side, all of one kind.

  Attributes:
    first: of all the heads of queries, keys and values.
    count: how many, as a tile has them.
    real: how many of these are there.
    start: first head of the kind.
    kind: how many heads the kind has.
  """

  first: Any
  count: int
  real: int
  start: int
  kind: int


class _Attend:
  """The kernel and what it is made of."""

  def __init__(
    self,
    config: config_lib.ModelConfig,
    place: kernel_rows.Place,
    dtype: jnp.dtype,
  ):
    self._config, self._place, self._dtype = config, place, dtype
    self._share = config.num_heads // config.num_kv_heads
    self._lines = kernels.padded(self._share, kernels.LEAST_ROWS)
    self._half, self._width = config.head_dim // 2, config.head_dim

  def early(self, *refs: Any) -> tuple[jax.Array, jax.Array]:
    """The layer and its window."""
    control, hop, windows = refs[7:10]
    layer = self._place.layer(control, hop, kernels.constant)
    return layer, kernels.constant(windows, layer)

  def kernel(self, layer: jax.Array, window: jax.Array, *refs: Any) -> None:
    """One row and head of keys; refs as `attend` gives them."""
    split, qkv, numbers, positions, go, cos, sin, *rest = refs
    old_k, old_v = rest[3:5]
    norms, (k_out, v_out, out) = rest[5:-3], rest[-3:]
    c, i, head = self._config, pl.program_id(0), pl.program_id(1)
    number, position = numbers[i], positions[i]
    _, lines, _, context, _ = old_v.shape
    going = (go[i] != 0) & (number >= 0) & (number < lines)
    going &= (position >= 0) & (position < context)
    place = layer, jnp.clip(number, 0, lines - 1), head, position
    some, narrow = kernels.whole(self._half, _LEAST)
    turn = [kernels.load(a.at[i, some], narrow)[None, :] for a in (cos, sin)]
    first = head * self._share, self._lines, self._share
    queries = _Heads(*first, 0, c.num_heads)
    one = _Heads(c.num_heads + head, 1, 1, c.num_heads, c.num_kv_heads)
    scales = [_Norm(norm, layer) for norm in norms]
    q = self._finish(split, i, queries, scales[:1], turn)
    k = self._finish(split, i, one, scales[1:], turn)
    value = c.num_heads + c.num_kv_heads + head
    k, v = self._sound(k, qkv, (i, value), old_k.dtype, old_v.dtype)
    self._write(k_out, v_out, place, k, v, going)
    mixed = self._walk(old_k, old_v, place, window, going, q, k, v)
    lanes, wide = kernels.whole(self._width, _LEAST)
    line = jnp.arange(self._lines, dtype=jnp.int32)
    mine = (line < self._share)[:, None] & wide[None, :]
    there = pl.ds(head * self._share, self._lines)
    kernels.store(out.at[i, there, lanes], mixed, mine)

  def _finish(
    self,
    split: Any,
    row: jax.Array,
    heads: _Heads,
    norms: list[_Norm],
    turn: list[jax.Array],
  ) -> _Halves:
    """Heads behind their norm and rotated, lower and upper half."""
    some, narrow = kernels.whole(self._half, _LEAST)
    line = jnp.arange(heads.count, dtype=jnp.int32)
    keep = (line < heads.real)[:, None] & narrow[None, :]
    at = pl.ds(heads.first, heads.count)
    both = [
      kernels.load(split.at[row, at, part, some], keep).astype(jnp.float32)
      for part in _HALVES
    ]
    if norms:
      both = self._norm(both, split, row, heads, norms[0], keep)
    a, b = both
    cos, sin = turn
    low, high = (
      jnp.where(keep, x, 0).astype(self._dtype)
      for x in (a * cos - b * sin, b * cos + a * sin)
    )
    return low, high

  def _norm(
    self,
    both: list[jax.Array],
    split: Any,
    row: jax.Array,
    heads: _Heads,
    norm: _Norm,
    keep: jax.Array,
  ) -> list[jax.Array]:
    """The norm of queries or keys, over each head or over all of them."""
    some, narrow = kernels.whole(self._half, _LEAST)
    if self._config.qk_norm == 'head':
      squares = sum(jnp.sum(x * x, axis=1) for x in both) / self._width
      scales = [
        kernels.load(norm.every.at[norm.layer, _FIRST, part, some], narrow)[
          None, :
        ]
        for part in _HALVES
      ]
    else:
      _, real = kernels.whole(heads.kind)
      at, mask = pl.ds(heads.start, real.shape[0]), real[:, None] & narrow[None]
      every = [
        kernels.load(split.at[row, at, part, some], mask).astype(jnp.float32)
        for part in _HALVES
      ]
      total = sum(jnp.sum(x * x) for x in every) / (heads.kind * self._width)
      squares = jnp.broadcast_to(total, (heads.count,))
      there = pl.ds(heads.first - heads.start, heads.count)
      scales = [
        kernels.load(norm.every.at[norm.layer, there, part, some], keep)
        for part in _HALVES
      ]
    factor = jax.lax.rsqrt(squares + self._config.norm_eps)[:, None]
    return [
      ((x * factor).astype(self._dtype) * scale.astype(self._dtype)).astype(
        jnp.float32
      )
      for x, scale in zip(both, scales, strict=True)
    ]

  def _sound(
    self,
    k: _Halves,
    made: Any,
    where: tuple[jax.Array, jax.Array],
    k_dtype: jnp.dtype,
    v_dtype: jnp.dtype,
  ) -> tuple[_Halves, jax.Array]:
    """Key and value as the cache keeps them; see `kv_cache.write`."""
    lanes, wide = kernels.whole(self._width, _LEAST)
    v = kernels.load(made.at[(*where, lanes)], wide)
    finite = jnp.abs(v.astype(jnp.float32)) < jnp.inf
    bad = jnp.max(jnp.where(wide & ~finite, 1, 0))
    v = jnp.where(wide & (bad == 0), v, 0).astype(v_dtype)
    spoilt = 0.0 / (1 - bad).astype(jnp.float32)  # nan where it is bad.
    low, high = ((x.astype(jnp.float32) + spoilt).astype(k_dtype) for x in k)
    return (low, high), v

  def _write(
    self,
    k_out: Any,
    v_out: Any,
    place: _Place,
    k: _Halves,
    v: jax.Array,
    going: jax.Array,
  ) -> None:
    layer, row, head, position = place
    some, narrow = kernels.whole(self._half, _LEAST)
    lanes, wide = kernels.whole(self._width, _LEAST)
    spot = pl.ds(position, 1)
    for part, half in zip(_HALVES, k, strict=True):
      there = k_out.at[layer, row, head, spot, part, some]
      kernels.store(there, half, (narrow & going)[None, :])
    kernels.store(v_out.at[layer, row, head, position, lanes], v, wide & going)

  def _walk(
    self,
    old_k: Any,
    old_v: Any,
    place: _Place,
    window: jax.Array,
    going: jax.Array,
    q: _Halves,
    k: _Halves,
    v: jax.Array,
  ) -> jax.Array:
    """Values mixed over the row's positions, softmax as one goes along.

    The new position comes first: its key and value are at hand.
    """
    layer, row, head, position = place
    some, narrow = kernels.whole(self._half, _LEAST)
    lanes, wide = kernels.whole(self._width, _LEAST)
    scale, size = self._width**-0.5, ATTEND[0]
    begin = jnp.where(window > 0, jnp.maximum(position - window + 1, 0), 0)

    def step(j: jax.Array, carry: Any) -> Any:
      mixed, most, total = carry
      places = j * size + jnp.arange(size, dtype=jnp.int32)
      seen = (places < position) & (places >= begin)
      at, known = pl.ds(j * size, size), seen[:, None] & narrow[None, :]
      scores = jnp.zeros((self._lines, size), jnp.float32)
      for part, half in zip(_HALVES, q, strict=True):
        keys = kernels.load(old_k.at[layer, row, head, at, part, some], known)
        scores += kernels.dot_rows(half, keys.astype(self._dtype))
      scores = jnp.where(seen[None, :], scores * scale, -1e30)
      new_most = jnp.maximum(most, jnp.max(scores, axis=1))
      fade = jnp.exp(most - new_most)
      weights = jnp.exp(scores - new_most[:, None])
      both = seen[:, None] & wide[None, :]
      values = kernels.load(old_v.at[layer, row, head, at, lanes], both)
      more = kernels.dot_rows(weights.astype(values.dtype), values, first=True)
      mixed = mixed * fade[:, None] + more
      return mixed, new_most, total * fade + jnp.sum(weights, axis=1)

    own = sum(
      jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32), axis=1)
      for a, b in zip(q, k, strict=True)
    )
    alone = jnp.broadcast_to(
      v.astype(jnp.float32)[None, :], (self._lines, v.shape[0])
    )
    start = alone, own * scale, jnp.ones((self._lines,), jnp.float32)
    stop = (jnp.where(going, position, 0) + size - 1) // size
    mixed, _, total = jax.lax.fori_loop(begin // size, stop, step, start)
    return jnp.where(going, mixed / total[:, None], 0)
