"""Products with shared weights as GPU kernels.

Their weights lie with what a product sums over last, as `merged` lays them,
so that a program reads whole lines of memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kernel_call as kernels

PROJECT = 32, 128, 4, 4
OUTPUT = 16, 256, 4, 4


def project(
  config: config_lib.ModelConfig, p: dict[str, Any], h_NxD: jax.Array
) -> jax.Array:
  """Queries, keys and values side by side, `[N, A]`, A = (H + 2K) * dh.

  Biases and clamps are applied; norms of heads and the rotation are not.
  """
  n, d = h_NxD.shape
  a = p['wqkv'].shape[0]
  width, db = kernels.block(a, PROJECT[0]), kernels.block(d, PROJECT[1])
  rows = kernels.padded(n, kernels.LEAST_ROWS)
  biases = [p['bqkv']] if config.qkv_bias else []

  def kernel(x: Any, weights: Any, *refs: Any) -> None:
    out, at = refs[-1], pl.ds(pl.program_id(0) * width, width)

    def step(i: jax.Array, acc: jax.Array) -> jax.Array:
      columns = pl.ds(i * db, db)
      h = kernels.load_rows(x, columns, rows, db)
      return acc + kernels.dot(kernels.load(weights.at[at, columns]), h)

    start = jnp.zeros((rows, width), jnp.float32)
    made = jax.lax.fori_loop(0, d // db, step, start).astype(out.dtype)
    if biases:
      made += kernels.load(refs[0].at[at])[None, :]
    if config.clip_qkv is not None:
      made = jnp.clip(made, -config.clip_qkv, config.clip_qkv)
    kernels.store_rows(out, at, made)

  out: jax.Array = kernels.call(
    kernel,
    'project',
    (a // width,),
    jax.ShapeDtypeStruct((n, a), h_NxD.dtype),
    (h_NxD, p['wqkv'], *biases),
    warps=PROJECT[2],
    stages=PROJECT[3],
  )
  return out


def output(
  config: config_lib.ModelConfig,
  p: dict[str, Any],
  mixed_NxA: jax.Array,
  x_NxD: jax.Array,
  go_N: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The stream with what attention has mixed, and what the router needs of it.

  A row that does not go on, 0 in `go_N`, keeps its stream. Each program has
  some columns of the stream and adds their part to the router's product; the
  root mean square, a factor of a row, comes last.

  Returns:
    The stream `[N, D]`; the parts' logits before the norm's factor, float32
    `[parts, N, E]`; their sums of squares, float32 `[parts, N]`.
  """
  n, a = mixed_NxA.shape
  d, e = x_NxD.shape[1], config.num_experts
  width, ab = kernels.block(d, OUTPUT[0]), kernels.block(a, OUTPUT[1])
  rows = kernels.padded(n, kernels.LEAST_ROWS)
  ep, parts = kernels.padded(e, 16), d // width
  biases = [p['bo']] if config.out_bias else []

  def kernel(*refs: Any) -> None:
    mixed, x, go, weights, norm, router, *rest = refs
    out, logits, squares = rest[-3:]
    part = pl.program_id(0)
    at = pl.ds(part * width, width)

    def step(i: jax.Array, acc: jax.Array) -> jax.Array:
      inner = pl.ds(i * ab, ab)
      h = kernels.load_rows(mixed, inner, rows, ab)
      return acc + kernels.dot(kernels.load(weights.at[at, inner]), h)

    start = jnp.zeros((rows, width), jnp.float32)
    made = jax.lax.fori_loop(0, a // ab, step, start).astype(out.dtype)
    if biases:
      made += kernels.load(rest[0].at[at])[None, :]
    lines = jnp.arange(rows, dtype=jnp.int32)
    old = kernels.load_rows(x, at, rows, width)
    going = kernels.load(go.at[pl.ds(0, rows)], lines < n)[:, None] != 0
    new = jnp.where(going, old + made, old)
    real = jnp.broadcast_to((lines < n)[:, None], new.shape)
    kernels.store(out.at[pl.ds(0, rows), at], new, real)
    wide = new.astype(jnp.float32)
    total = jnp.sum(wide * wide, axis=1)
    kernels.store(squares.at[part, pl.ds(0, rows)], total, lines < n)
    h = new * kernels.load(norm.at[at])[None, :].astype(new.dtype)
    columns = jax.lax.broadcasted_iota(jnp.int32, (width, ep), 1) < e
    w = kernels.load(router.at[at, pl.ds(0, ep)], columns)
    each = kernels.dot(w.astype(h.dtype), h, first=True)
    there = logits.at[part, pl.ds(0, rows), pl.ds(0, ep)]
    kernels.store_block(there, each, n, e)

  out: tuple[jax.Array, jax.Array, jax.Array] = kernels.call(
    kernel,
    'output',
    (parts,),
    (
      jax.ShapeDtypeStruct((n, d), x_NxD.dtype),
      jax.ShapeDtypeStruct((parts, n, e), jnp.float32),
      jax.ShapeDtypeStruct((parts, n), jnp.float32),
    ),
    (mixed_NxA, x_NxD, go_N, p['wo_t'], p['mlp_norm'], p['router'], *biases),
    warps=OUTPUT[2],
    stages=OUTPUT[3],
  )
  return out
