"""Attention of one new token a row as a GPU kernel, on the cache in place.

A program has one row, one head of keys with all the queries that share it, and
a part of the row's own positions: what lies behind them costs nothing. It
finishes its queries and walks over its part. The first one also writes the new
key and value into the cache. Whichever program of a row and head is done last
adds up their parts, in order.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kernel_call as kernels
from bevy_jax.layers import kernel_dense, kernel_heads, kernel_rows, kv_cache

ATTEND = 128, 8, 1  # Positions of a step, warps, stages.
# Programs that share a row and head: as many whatever the launch, so that what
# a row becomes does not hang on who is with it.
PARTS = 4
_NEVER = -1e30  # A score of what is not there.
_HALVES = kernel_heads.HALVES
_Halves = kernel_heads.Halves
# Row of the launch, head of keys, part.
_Own = tuple[jax.Array, jax.Array, jax.Array]
# Layer, row, head and position in the caches.
_Place = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def attend(
  config: config_lib.ModelConfig,
  p: dict[str, Any],
  place: kernel_rows.Place,
  caches: kv_cache.LayerCache,
  made: kernel_dense.Projected,
  rows: kernel_rows.Rows,
) -> tuple[jax.Array, kv_cache.LayerCache]:
  """Mixed values `[N, H * dh]` and the caches with each row's new position.

  For a row that does not go on nothing is read or written; its values are 0.

  Args:
    config: the model.
    p: weights of all layers; only norms of queries and keys are used.
    place: whose.
    caches: of all layers, `[L, R, K, C, dh]`.
    made: queries, keys and values.
    rows: whose numbers are rows of the caches.
  """
  qkv_NxA = made.qkv
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
    made.arrived,
    *norms,
  )
  attention = _Attend(config, place, qkv_NxA.dtype)
  k, v, _, out, *_ = kernels.call(
    attention.kernel,
    'attend',
    (n, config.num_kv_heads, PARTS),
    _written(config, made, keys, caches.v),
    operands,
    warps=ATTEND[1],
    stages=ATTEND[2],
    aliases={10: 0, 11: 1, 12: 2},
    early=attention.early,
  )
  return out, kv_cache.LayerCache(k, v)


def _written(
  config: config_lib.ModelConfig,
  made: kernel_dense.Projected,
  keys: kernels.View,
  values: jax.Array,
) -> tuple[kernels.View | jax.ShapeDtypeStruct, ...]:
  """In the order of `_Outs`; parts have the new key's line too."""
  (n, heads), width = made.arrived.shape, config.head_dim
  parts, lines = (n, heads, PARTS), 1 + kernel_heads.share(config)
  mixed = kernels.shape((n, config.num_heads, width), made.qkv.dtype)
  return (
    kernels.View(kernels.shape(keys.shape, keys.array.dtype), keys.array.shape),
    kernels.shape(values.shape, values.dtype),
    kernels.shape((n, heads), jnp.int32),
    kernels.View(mixed, (n, config.num_heads * width)),
    kernels.shape((*parts, lines, width), jnp.float32),
    kernels.shape((*parts, 2, lines), jnp.float32),
  )


class _Span(NamedTuple):
  """Which positions a program has.

  Attributes:
    begin: first position that the row looks at.
    position: the new one, behind the last of them.
    first: first step of the program.
    stop: the step behind its last one; it may have none.
  """

  begin: jax.Array
  position: jax.Array
  first: jax.Array
  stop: jax.Array


class _Mixed(NamedTuple):
  """Values mixed over some positions, by the softmax of these.

  Attributes:
    values: float32 `[lines, dh]`, weighed but not yet divided by `total`.
    most: float32 `[lines]`, the highest score.
    total: float32 `[lines]`, sum of the weights.
  """

  values: jax.Array
  most: jax.Array
  total: jax.Array


class _Outs(NamedTuple):
  """What the kernel writes: caches, who is done, the result, and its parts."""

  k: Any
  v: Any
  arrived: Any
  mixed: Any
  values: Any
  sums: Any


class _Attend:
  """The kernel and what it is made of."""

  def __init__(
    self,
    config: config_lib.ModelConfig,
    place: kernel_rows.Place,
    dtype: jnp.dtype,
  ):
    self._config, self._place, self._dtype = config, place, dtype
    self._share = kernel_heads.share(config)
    self._lines = kernel_heads.lines(config)
    self._half, self._width = config.head_dim // 2, config.head_dim

  def early(self, *refs: Any) -> tuple[jax.Array, jax.Array]:
    """The layer and its window."""
    control, hop, windows = refs[7:10]
    layer = self._place.layer(control, hop, kernels.constant)
    return layer, kernels.constant(windows, layer)

  def kernel(self, layer: jax.Array, window: jax.Array, *refs: Any) -> None:
    """One part of a row and head of keys; refs as `attend` gives them."""
    numbers, positions, go = refs[2:5]
    i, head, part = (pl.program_id(axis) for axis in range(3))
    number, position = numbers[i], positions[i]
    _, lines, _, context, _ = refs[11].shape
    going = (go[i] != 0) & (number >= 0) & (number < lines)
    going &= (position >= 0) & (position < context)
    place = layer, jnp.clip(number, 0, lines - 1), head, position
    span, own = _span(part, position, window, going), (i, head, part)
    outs = _Outs(*refs[-6:])
    self._leave(outs, own, self._mix(refs, outs, own, place, span, going))
    if not kernels.interpreted():
      plgpu.debug_barrier()  # All threads have written.
    done = plgpu.atomic_add(outs.arrived, (i, head), np.int32(1))
    pl.when(done == PARTS - 1)(lambda: self._end(outs, own, going))

  def _mix(
    self,
    refs: Any,
    outs: _Outs,
    own: _Own,
    place: _Place,
    span: _Span,
    going: jax.Array,
  ) -> _Mixed:
    """What a part's positions give; the first one has the new one too."""
    split, qkv, _, _, _, cos, sin, *rest = refs
    (old_k, old_v), norms = rest[3:5], rest[6:-6]
    c, (i, head, part) = self._config, own
    made = kernel_heads.Refs(split, cos, sin, norms)
    q = kernel_heads.finish(c, made, place[0], i, head)
    value = i, c.num_heads + c.num_kv_heads + head
    k, v = self._sound(q, qkv, value, old_k.dtype, old_v.dtype)
    mine = part == 0
    self._write(outs.k, outs.v, place, k, v, going & mine)

    def step(j: jax.Array, mixed: _Mixed) -> _Mixed:
      more = self._tile(old_k, old_v, place, span, j)
      return self._fold(mixed, q, more)

    mixed = self._own(q, k, v, mine)
    out: _Mixed = jax.lax.fori_loop(span.first, span.stop, step, mixed)
    return out

  def _sound(
    self,
    k: _Halves,
    made: Any,
    where: tuple[jax.Array, jax.Array],
    k_dtype: jnp.dtype,
    v_dtype: jnp.dtype,
  ) -> tuple[_Halves, jax.Array]:
    """Keys and a value as the cache keeps them; see `kv_cache.write`."""
    lanes, wide = kernels.whole(self._width, kernel_heads.LEAST)
    v = kernels.load(made.at[(*where, lanes)], wide)
    finite = jnp.abs(v.astype(jnp.float32)) < jnp.inf
    bad = jnp.max(jnp.where(wide & ~finite, 1, 0))
    v = jnp.where(bad == 0, v, 0).astype(v_dtype)
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
    """Writes the new key, a line of the tile, and the value."""
    layer, row, head, position = place
    some, narrow = kernels.whole(self._half, kernel_heads.LEAST)
    lanes, wide = kernels.whole(self._width, kernel_heads.LEAST)
    line = jnp.arange(self._lines, dtype=jnp.int32)
    mine = (line == 0)[:, None] & (narrow & going)[None, :]
    spot = pl.ds(position, self._lines)
    for part, half in zip(_HALVES, k, strict=True):
      kernels.store(k_out.at[layer, row, head, spot, part, some], half, mine)
    kernels.store(v_out.at[layer, row, head, position, lanes], v, wide & going)

  def _own(
    self, q: _Halves, k: _Halves, v: jax.Array, mine: jax.Array
  ) -> _Mixed:
    """The new position alone, whose key and value are at hand, or nothing."""
    line = jnp.arange(self._lines, dtype=jnp.int32)
    scores = jnp.where((line == 0)[None, :], self._scores(q, k), 0)
    score = jnp.sum(scores, axis=1)
    size, one = (self._lines, v.shape[0]), jnp.ones(line.shape, jnp.float32)
    values = jnp.broadcast_to(v.astype(jnp.float32)[None, :], size)
    return _Mixed(
      jnp.where(mine, values, 0.0),
      jnp.where(mine, score, _NEVER),
      jnp.where(mine, one, 0.0),
    )

  def _tile(
    self, old_k: Any, old_v: Any, place: _Place, span: _Span, step: jax.Array
  ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Halves of keys and the values of a step, and which of them count."""
    layer, row, head, _ = place
    some, narrow = kernels.whole(self._half, kernel_heads.LEAST)
    lanes, wide = kernels.whole(self._width, kernel_heads.LEAST)
    size = ATTEND[0]
    places = step * size + jnp.arange(size, dtype=jnp.int32)
    seen = (places < span.position) & (places >= span.begin)
    at, known = pl.ds(step * size, size), seen[:, None] & narrow[None, :]
    keys = [
      kernels.load(old_k.at[layer, row, head, at, part, some], known)
      for part in _HALVES
    ]
    both = seen[:, None] & wide[None, :]
    values = kernels.load(old_v.at[layer, row, head, at, lanes], both)
    return keys, values, seen

  def _fold(
    self,
    mixed: _Mixed,
    q: _Halves,
    tile: tuple[list[jax.Array], jax.Array, jax.Array],
  ) -> _Mixed:
    """A step's positions with those before them, softmax as one goes along."""
    keys, values, seen = tile
    scores = jnp.where(seen[None, :], self._scores(q, keys), _NEVER)
    most = jnp.maximum(mixed.most, jnp.max(scores, axis=1))
    fade = jnp.exp(mixed.most - most)
    weights = jnp.exp(scores - most[:, None])
    more = kernels.dot_rows(weights.astype(values.dtype), values, first=True)
    return _Mixed(
      mixed.values * fade[:, None] + more,
      most,
      mixed.total * fade + jnp.sum(weights, axis=1),
    )

  def _scores(self, q: _Halves, keys: Sequence[jax.Array]) -> jax.Array:
    """Of all lines for some keys, by halves of both."""
    low, high = (
      kernels.dot_rows(half, key.astype(self._dtype))
      for half, key in zip(q, keys, strict=True)
    )
    out: jax.Array = (low + high) * self._width**-0.5
    return out

  def _leave(self, outs: _Outs, own: _Own, mixed: _Mixed) -> None:
    """Writes a part where the program that comes last finds it."""
    lanes, _ = kernels.whole(self._width, kernel_heads.LEAST)
    there, count = pl.ds(0, self._lines), 1 + self._share
    left = outs.values.at[(*own, there, lanes)]
    kernels.store_block(left, mixed.values, count, self._width)
    real = jnp.arange(self._lines, dtype=jnp.int32) < count
    for place, values in zip(_HALVES, mixed[1:], strict=True):
      kernels.store(outs.sums.at[(*own, place, there)], values, real)

  def _end(self, outs: _Outs, own: _Own, going: jax.Array) -> None:
    """Adds up the parts of a row and head, in their order."""
    lanes, wide = kernels.whole(self._width, kernel_heads.LEAST)
    # Behind the new key. A plain 1 is refused where padding passes the end.
    there, real = kernels.some(jnp.int32(1), self._share)
    both = real[:, None] & wide[None, :]
    found = []
    for part in map(np.int32, range(PARTS)):
      most, total = (
        kernels.fresh(outs.sums.at[(*own[:2], part, place, there)], real)
        for place in _HALVES
      )
      left = outs.values.at[(*own[:2], part, there, lanes)]
      found.append(_Mixed(kernels.fresh(left, both), most, total))
    most = functools.reduce(jnp.maximum, (each.most for each in found))
    fades = [jnp.exp(each.most - most) for each in found]
    pairs = list(zip(found, fades, strict=True))
    whole: Any = sum(each.total * fade for each, fade in pairs)
    values: Any = sum(each.values * fade[:, None] for each, fade in pairs)
    mixed = jnp.where(going, values / whole[:, None], 0)
    heads = pl.ds(own[1] * self._share, there.size)
    kernels.store(outs.mixed.at[own[0], heads, lanes], mixed, both)


def _span(
  part: jax.Array, position: jax.Array, window: jax.Array, going: jax.Array
) -> _Span:
  """A part's share of the steps that a row looks at; no step is split."""
  size, position = ATTEND[0], jnp.where(going, position, 0)
  begin = jnp.where(window > 0, jnp.maximum(position - window + 1, 0), 0)
  first, stop = begin // size, (position + size - 1) // size
  each = (stop - first + PARTS - 1) // PARTS
  own = first + part * each
  return _Span(begin, position, own, jnp.minimum(own + each, stop))
