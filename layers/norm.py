"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  """Scales `x [..., D]` to unit root mean square, times `weight [D]`.

  The mean is taken in float32; the result has the type of `x`.
  """
  wide = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
  weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
  return (wide * scale).astype(x.dtype) * weight.astype(x.dtype)
