"""Experts as GPU kernels: each weight is read once from where it lies.

A program serves a part of one expert for all rows of a launch: at decode the
rows are few, and reading weights is all that costs. One kernel does gate, up
and SiLU, another the way down, a third sums the choices of each row.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kernel_call as kernels
from bevy_jax.layers import kernel_packed, kernel_rows, kernel_tiles, quant


def apply(
  pool: jax.Array | quant.Packed,
  h_NxD: jax.Array,
  slots_NxT: jax.Array,
  place: kernel_rows.Place,
) -> jax.Array:
  """What every chosen expert makes of its rows, float32 `[N, T, D]`.

  Args:
    pool: experts in slots.
    h_NxD: the stream behind the norm.
    slots_NxT: int32, slot of each choice; nothing is written for -1.
    place: where the experts lie; those that no choice names are not read.
  """
  rows = h_NxD.shape[0]
  if isinstance(pool, quant.Packed):
    how = pool.layout
    first, second = kernel_tiles.expert(how.format.name, how.shape, rows)
    hidden = kernel_packed.gate_up(pool, h_NxD, slots_NxT, place, first)
    return kernel_packed.down(pool, hidden, slots_NxT, place, second)
  first, second = kernel_tiles.expert('float', pool.shape[1:], rows)
  hidden = gate_up(pool, h_NxD, slots_NxT, place, first)
  return down(pool, hidden, slots_NxT, place, second)


def gate_up(
  pool_Sx3xFxD: jax.Array,
  h_NxD: jax.Array,
  slots_NxT: jax.Array,
  place: kernel_rows.Place,
  tile: kernel_tiles.Tile,
) -> jax.Array:
  """SiLU(gate) * up of each listed expert for all rows, `[M, N, F]`."""
  n, d = h_NxD.shape
  f, m = pool_Sx3xFxD.shape[2], kernel_rows.listed(place, slots_NxT)
  rows = kernels.padded(n, kernels.LEAST_ROWS)
  fb, db = kernels.block(f, tile.outer), kernels.block(d, tile.inner)

  def kernel(pool: Any, x: Any, slots: Any, *refs: Any) -> None:
    control, hop, out = refs
    expert, at = pl.program_id(0), pl.ds(pl.program_id(1) * fb, fb)
    slot, named = kernel_rows.expert(place, slots, control, hop, expert)

    @pl.when(named)
    def _() -> None:
      def step(i: jax.Array, carry: Any) -> Any:
        gate, up = carry
        columns = pl.ds(i * db, db)
        h = kernels.load_rows(x, columns, rows, db)
        w_gate = kernels.load(pool.at[slot, kernels.GATE, at, columns])
        w_up = kernels.load(pool.at[slot, kernels.UP, at, columns])
        return gate + kernels.dot(w_gate, h), up + kernels.dot(w_up, h)

      zero = jnp.zeros((rows, fb), jnp.float32)
      gate, up = jax.lax.fori_loop(0, d // db, step, (zero, zero))
      kernels.store_rows(out, at, kernels.swiglu(gate, up), expert)

  out: jax.Array = kernels.call(
    kernel,
    'gate_up',
    (m, f // fb),
    kernels.shape((m, n, f), h_NxD.dtype),
    (pool_Sx3xFxD, h_NxD, slots_NxT, *place.operands),
    warps=tile.warps,
    stages=tile.stages,
    early=lambda *refs: (),
  )
  return out


def down(
  pool_Sx3xFxD: jax.Array,
  hidden_MxNxF: jax.Array,
  slots_NxT: jax.Array,
  place: kernel_rows.Place,
  tile: kernel_tiles.Tile,
) -> jax.Array:
  """The way down of each listed expert, for the choices that name it."""
  m, n, f = hidden_MxNxF.shape
  d, t = pool_Sx3xFxD.shape[3], slots_NxT.shape[1]
  rows = kernels.padded(n, kernels.LEAST_ROWS)
  ob, fb = kernels.block(d, tile.outer), kernels.block(f, tile.inner)

  def kernel(pool: Any, hidden: Any, slots: Any, *refs: Any) -> None:
    control, hop, out = refs
    expert, at = pl.program_id(0), pl.ds(pl.program_id(1) * ob, ob)
    slot, named = kernel_rows.expert(place, slots, control, hop, expert)

    @pl.when(named)
    def _() -> None:
      def step(i: jax.Array, acc: jax.Array) -> jax.Array:
        inner = pl.ds(i * fb, fb)
        h = kernels.load_rows(hidden, inner, rows, fb, expert)
        w = kernels.load(pool.at[slot, kernels.DOWN, inner, at])
        return acc + kernels.dot(w, h, first=True)

      start = jnp.zeros((rows, ob), jnp.float32)
      acc = jax.lax.fori_loop(0, f // fb, step, start)
      kernels.store_choices(out, slots, slot, at, acc)

  out: jax.Array = kernels.call(
    kernel,
    'down',
    (m, d // ob),
    kernels.shape((n, t, d), jnp.float32),
    (pool_Sx3xFxD, hidden_MxNxF, slots_NxT, *place.operands),
    warps=tile.warps,
    stages=tile.stages,
    early=lambda *refs: (),
  )
  return out


def combine(
  config: config_lib.ModelConfig,
  rows: kernel_rows.Rows,
  y_NxTxD: jax.Array,
  partial_RxTxD: jax.Array,
  norm_LxD: jax.Array,
  place: kernel_rows.Place,
) -> tuple[jax.Array, jax.Array]:
  """The stream with the weighted sum of each row's choices added.

  Choices whose slot is -1 come from the row's earlier waves. A row that does
  not go on keeps its stream.

  Returns:
    The stream `[N, D]`, and the same behind the norm of `place`.
  """
  n, t, d = y_NxTxD.shape

  def early(*refs: Any) -> tuple[jax.Array]:
    at, real = kernels.whole(d)
    norm, control, hop = refs[7:10]
    own = place.layer(control, hop, kernels.constant)
    return (kernels.load(norm.at[own, at], real),)

  def kernel(scale: jax.Array, *refs: Any) -> None:
    x, y, weights, slots, partial, numbers, go, _, _, _, *outs = refs
    i, (at, real) = pl.program_id(0), kernels.whole(d)
    row = jnp.clip(numbers[i], 0, partial.shape[0] - 1)
    total = jnp.zeros(real.shape, jnp.float32)
    for choice in map(np.int32, range(t)):
      here = real & (jnp.full(real.shape, slots[i, choice]) >= 0)
      late = kernels.load(partial.at[row, choice, at], real & ~here)
      now = kernels.load(y.at[i, choice, at], here)
      total += weights[i, choice] * jnp.where(here, now, late)
    old = kernels.load(x.at[i, at], real)
    new = jnp.where(go[i] != 0, old + total.astype(old.dtype), old)
    kernels.store(outs[0].at[i, at], new, real)
    h = kernels.normed(new, scale, d, config.norm_eps)
    kernels.store(outs[1].at[i, at], h, real)

  same = kernels.shape((n, d), rows.x.dtype)
  out: tuple[jax.Array, jax.Array] = kernels.call(
    kernel,
    'combine',
    (n,),
    (same, same),
    (
      rows.x, y_NxTxD, rows.weights, rows.slots, partial_RxTxD, rows.numbers,
      rows.go, norm_LxD, *place.operands,
    ),
    warps=8,
    early=early,
  )  # fmt: skip
  return out
