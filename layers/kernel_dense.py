"""Products with shared weights as GPU kernels.

Their weights are those of all layers, `stacked`, and lie with what a product
sums over last, so that a program reads whole lines of memory.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kernel_call as kernels
from bevy_jax.layers import kernel_router, kernel_rows

# Outputs of a program, inputs of a step, warps, stages.
PROJECT = 16, 128, 2, 6
OUTPUT = 16, 256, 2, 6


class Projected(NamedTuple):
  """What a layer's attention is made of.

  Attributes:
    qkv: `[N, A]`, queries, keys and values side by side, A = (H + 2K) * dh.
    arrived: int32 `[N, K]`, 0: programs of attention that are done.
  """

  qkv: jax.Array
  arrived: jax.Array


def project(
  config: config_lib.ModelConfig,
  p: dict[str, Any],
  place: kernel_rows.Place,
  rows: kernel_rows.Rows,
) -> Projected:
  """Queries, keys and values of each row.

  Biases and clamps are applied; norms of heads and the rotation are not.
  Where no row goes on nobody has arrived, and nothing else is written.
  """
  n, d = rows.h.shape
  a = p['wqkv'].shape[1]
  width, db = kernels.block(a, PROJECT[0]), kernels.block(d, PROJECT[1])
  lines = kernels.padded(n, kernels.LEAST_ROWS)
  biases = [p['bqkv']] if config.qkv_bias else []

  def early(*refs: Any) -> tuple[jax.Array]:
    control, hop = refs[2:4]
    return (place.layer(control, hop, kernels.constant),)

  def kernel(own: jax.Array, *refs: Any) -> None:
    go, x, (weights, *bias, out, arrived) = *refs[:2], refs[4:]
    at = pl.ds(pl.program_id(0) * width, width)

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
      _clear(arrived)

    @pl.when(kernels.anybody(go))
    def _() -> None:
      made = _product(weights, own, at, x, lines, db).astype(out.dtype)
      if biases:
        made += kernels.load(bias[0].at[own, at])[None, :]
      if config.clip_qkv is not None:
        made = jnp.clip(made, -config.clip_qkv, config.clip_qkv)
      kernels.store_rows(out, at, made)

  made: tuple[jax.Array, jax.Array] = kernels.call(
    kernel,
    'project',
    (a // width,),
    (
      kernels.shape((n, a), rows.h.dtype),
      kernels.shape((n, config.num_kv_heads), jnp.int32),
    ),
    (rows.go, rows.h, *place.operands, p['wqkv'], *biases),
    warps=PROJECT[2],
    stages=PROJECT[3],
    early=early,
  )
  return Projected(*made)


def _clear(arrived: Any) -> None:
  size = [kernels.padded(count) for count in arrived.shape]
  there = arrived.at[pl.ds(0, size[0]), pl.ds(0, size[1])]
  kernels.store_block(there, jnp.zeros(size, jnp.int32), *arrived.shape)


def _product(
  weights: Any, layer: Any, at: Any, rows: Any, lines: int, size: int
) -> jax.Array:
  """Some outputs of all rows, `[lines, outputs]`, `size` inputs a step."""

  def step(i: jax.Array, acc: jax.Array) -> jax.Array:
    inner = pl.ds(i * size, size)
    h = kernels.load_rows(rows, inner, lines, size)
    return acc + kernels.dot(kernels.load(weights.at[layer, at, inner]), h)

  start = jnp.zeros((lines, at.size), jnp.float32)
  out: jax.Array = jax.lax.fori_loop(0, rows.shape[1] // size, step, start)
  return out


def output(
  config: config_lib.ModelConfig,
  p: dict[str, Any],
  place: kernel_rows.Place,
  mixed_NxA: jax.Array,
  rows: kernel_rows.Rows,
) -> kernel_router.Parts:
  """The stream with what attention has mixed, and what the router needs of it.

  A row that does not go on keeps its stream. Each program has some columns of
  the stream and adds their part to the router's product; the root mean square,
  a factor of a row, comes last. Nothing is made where no row goes on.
  """
  (n, a), d, e = mixed_NxA.shape, rows.x.shape[1], config.num_experts
  width, ab = kernels.block(d, OUTPUT[0]), kernels.block(a, OUTPUT[1])
  lines, parts = kernels.padded(n, kernels.LEAST_ROWS), d // width
  weights_of = [p[k] for k in ('wo_t', 'mlp_norm', 'router')]
  biases = [p['bo']] if config.out_bias else []

  def early(*refs: Any) -> tuple[jax.Array, ...]:
    control, hop, _, norm, router = refs[3:8]
    own = place.layer(control, hop, kernels.constant)
    at = pl.ds(pl.program_id(0) * width, width)
    return own, *_routing(norm, router, own, at, e)

  def kernel(
    own: jax.Array, norm: jax.Array, router: jax.Array, *refs: Any
  ) -> None:
    mixed, x, go, (weights, *rest) = *refs[:3], refs[5:]
    out, logits, squares = rest[-3:]
    part = pl.program_id(0)
    at = pl.ds(part * width, width)

    @pl.when(kernels.anybody(go))
    def _() -> None:
      more = _product(weights, own, at, mixed, lines, ab).astype(out.dtype)
      if biases:
        more += kernels.load(rest[2].at[own, at])[None, :]
      new = _going(go, kernels.load_rows(x, at, lines, width), more)
      kernels.store_rows(out, at, new)
      _add_part(part, new, norm, router, logits, squares)

  made: tuple[jax.Array, jax.Array, jax.Array] = kernels.call(
    kernel,
    'output',
    (parts,),
    (
      kernels.shape((n, d), rows.x.dtype),
      kernels.shape((parts, n, e), jnp.float32),
      kernels.shape((parts, n), jnp.float32),
    ),
    (mixed_NxA, rows.x, rows.go, *place.operands, *weights_of, *biases),
    warps=OUTPUT[2],
    stages=OUTPUT[3],
    early=early,
  )
  return kernel_router.Parts(*made)


def _going(go: Any, old: jax.Array, more: jax.Array) -> jax.Array:
  """`old + more` in rows that go on."""
  line = jnp.arange(old.shape[0], dtype=jnp.int32)
  on = kernels.load(go.at[pl.ds(0, old.shape[0])], line < go.shape[0])
  return jnp.where(on[:, None] != 0, old + more, old)


def _routing(
  norm: Any, router: Any, layer: jax.Array, at: Any, experts: int
) -> tuple[jax.Array, jax.Array]:
  """Some columns of the norm and of the router, `[width, experts, padded]`."""
  size = at.size, kernels.padded(experts, 16)
  real = jax.lax.broadcasted_iota(jnp.int32, size, 1) < experts
  found = kernels.load(router.at[layer, at, pl.ds(0, size[1])], real)
  return kernels.load(norm.at[layer, at]), found


def _add_part(
  part: jax.Array,
  new: jax.Array,
  norm: jax.Array,
  router: jax.Array,
  logits: Any,
  squares: Any,
) -> None:
  """Some columns' part of the router's product and of the rows' squares."""
  _, n, e = logits.shape
  lines = new.shape[0]
  real = jnp.arange(lines, dtype=jnp.int32) < n
  wide = new.astype(jnp.float32)
  total = jnp.sum(wide * wide, axis=1)
  kernels.store(squares.at[part, pl.ds(0, lines)], total, real)
  h = new * norm[None, :].astype(new.dtype)
  each = kernels.dot(router.astype(h.dtype), h, first=True)
  there = logits.at[part, pl.ds(0, lines), pl.ds(0, router.shape[1])]
  kernels.store_block(there, each, n, e)
