"""SwiGLU experts, read where they lie through slot numbers."""

import jax
import jax.numpy as jnp

from bevy_jax.layers import quant

# Experts in slots: floats `[S, 3, F, D]`, or packed ones.
Pool = jax.Array | quant.Packed


def swiglu(x: jax.Array, expert_3xFxD: jax.Array) -> jax.Array:
  """One packed expert on `x [N, D]`: gate, up, transposed down."""
  gate = _dot(x, expert_3xFxD[0].T)
  up = _dot(x, expert_3xFxD[1].T)
  hidden = (jax.nn.silu(gate) * up).astype(x.dtype)
  return _dot(hidden, expert_3xFxD[2])


def apply(
  pool: Pool,
  x_NxD: jax.Array,
  slots_NxT: jax.Array,
  distinct_M: jax.Array,
  count: jax.Array | int,
  partial_NxTxD: jax.Array,
) -> jax.Array:
  """Expert outputs for each choice of each row, float32 `[N, T, D]`.

  Walks over the first `count` of the distinct slots and reads each once;
  of a quantised pool, one expert at a time is made wide again.
  A choice whose slot is among them gets that expert's output; any other
  keeps what `partial_NxTxD` holds, so that a set of experts too large for
  the pool can come in waves. Outputs stay apart until `combine`, which is
  why neither the slots nor the waves change the order of any sum.
  """

  def one(i: jax.Array, y: jax.Array) -> jax.Array:
    slot = distinct_M[i]
    out = swiglu(x_NxD, _read(pool, slot, x_NxD.dtype))
    chosen = (slots_NxT == slot) & (slot >= 0)
    return jnp.where(chosen[:, :, None], out[:, None, :], y)

  out: jax.Array = jax.lax.fori_loop(0, count, one, partial_NxTxD)
  return out


def combine(weights_NxT: jax.Array, y_NxTxD: jax.Array) -> jax.Array:
  """The weighted sum over a row's choices, in their order, `[N, D]`."""
  total = weights_NxT[:, 0, None] * y_NxTxD[:, 0]
  for t in range(1, weights_NxT.shape[1]):
    total = total + weights_NxT[:, t, None] * y_NxTxD[:, t]
  return total


def _read(pool: Pool, slot: jax.Array, dtype: jnp.dtype) -> jax.Array:
  if isinstance(pool, quant.Packed):
    block = jax.lax.dynamic_index_in_dim(pool.data, slot, keepdims=False)
    return quant.unpack(pool.layout, block).astype(dtype)
  expert: jax.Array = jax.lax.dynamic_index_in_dim(pool, slot, keepdims=False)
  return expert


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
  return jnp.matmul(x, w, preferred_element_type=jnp.float32)
