"""A launch's rows taken out of the state, ready for experts, as a GPU kernel."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kernel_call as kernels
from bevy_jax.layers import rope


class Rows(NamedTuple):
  """N rows of a launch at a layer whose experts come next.

  Attributes:
    x: `[N, D]`, the stream.
    h: `[N, D]`, the same behind the experts' norm.
    slots: int32 `[N, T]`, where each choice lies; -1 where it is not read.
    weights: float32 `[N, T]`, of each choice.
    go: int32 `[N]`, 0 for rows that are padding or have stopped.
    positions: int32 `[N]`, of the token that the rows are at.
    cos: float32 `[N, dh / 2]`, of the rotation there.
    sin: likewise.
  """

  x: jax.Array
  h: jax.Array
  slots: jax.Array
  weights: jax.Array
  go: jax.Array
  positions: jax.Array
  cos: jax.Array
  sin: jax.Array


def take(
  config: config_lib.ModelConfig,
  norm_D: jax.Array,
  rows_N: jax.Array,
  table_E: jax.Array,
  x_RxD: jax.Array,
  ids_RxT: jax.Array,
  weights_RxT: jax.Array,
  positions_R: jax.Array,
) -> Rows:
  """The rows of a launch; a program each.

  Args:
    config: the model.
    norm_D: weights of the experts' norm.
    rows_N: int32, row numbers; R and above are padding.
    table_E: int32, slot of each expert, -1 where it may not be read.
    x_RxD: the stream of all rows.
    ids_RxT: int32, their choices.
    weights_RxT: float32, of their choices.
    positions_R: int32, of their tokens.
  """
  n, (r, d), t = rows_N.shape[0], x_RxD.shape, config.top_k
  width, half = kernels.padded(d), config.head_dim // 2
  hp = kernels.padded(half)
  angles, stretch = rope.frequencies(config.rope, config.head_dim)

  def kernel(*refs: Any) -> None:
    rows, table, x, ids, weights, places, norm, turns, *outs = refs
    out_x, out_h, out_slots, out_weights, go, positions, cos, sin = outs
    i = pl.program_id(0)
    real = (rows[i] >= 0) & (rows[i] < r)
    row = jnp.clip(rows[i], 0, r - 1)
    at, inside = pl.ds(0, width), jnp.arange(width, dtype=jnp.int32) < d
    stream = kernels.load(x.at[row, at], inside)
    scale = kernels.load(norm.at[at], inside)
    kernels.store(out_x.at[i, at], stream, inside)
    h = kernels.normed(stream, scale, d, config.norm_eps)
    kernels.store(out_h.at[i, at], h, inside)
    for choice in map(np.int32, range(t)):
      slot = table[ids[row, choice]]
      out_slots[i, choice] = jnp.where(real, slot, -1)
      out_weights[i, choice] = weights[row, choice]
    go[i] = real.astype(jnp.int32)
    position = places[row]
    positions[i] = position
    some, narrow = pl.ds(0, hp), jnp.arange(hp, dtype=jnp.int32) < half
    theta = position.astype(jnp.float32) * kernels.load(turns.at[some], narrow)
    kernels.store(cos.at[i, some], jnp.cos(theta) * stretch, narrow)
    kernels.store(sin.at[i, some], jnp.sin(theta) * stretch, narrow)

  def shape(*size: int, kind: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(size, kind)

  wide, single = x_RxD.dtype, jnp.float32
  made = kernels.call(
    kernel,
    'take',
    (n,),
    (
      shape(n, d, kind=wide),
      shape(n, d, kind=wide),
      shape(n, t),
      shape(n, t, kind=single),
      shape(n),
      shape(n),
      shape(n, half, kind=single),
      shape(n, half, kind=single),
    ),
    (
      rows_N, table_E, x_RxD, ids_RxT, weights_RxT, positions_R, norm_D,
      jnp.asarray(angles),
    ),
    warps=8,
  )  # fmt: skip
  return Rows(*made)
