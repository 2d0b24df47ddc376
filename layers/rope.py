"""Rotary position embedding with the scaling kinds that models use."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from bevy_jax.layers import config as config_lib


def frequencies(
  rope: config_lib.RopeConfig, head_dim: int
) -> tuple[np.ndarray, float]:
  """Angle per position `[head_dim / 2]` and the scale of cos and sin.

  The formulas are those of Hugging Face transformers, which defines what the
  checkpoints mean. 'linear' divides every angle by `factor`; 'llama3' keeps
  short wavelengths, divides long ones and blends between; 'yarn' (Peng et
  al. 2023) blends along a ramp over the dimensions and scales attention.
  """
  exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
  angles = rope.theta**-exponents
  if rope.kind == 'default':
    return angles.astype(np.float32), 1.0
  if rope.kind == 'linear':
    return (angles / rope.factor).astype(np.float32), 1.0
  if rope.kind == 'llama3':
    return _llama3(rope, angles).astype(np.float32), 1.0
  if rope.kind == 'yarn':
    angles = _yarn(rope, angles, head_dim)
    return angles.astype(np.float32), _yarn_scale(rope)
  raise ValueError(
    f'rope kind {rope.kind!r} is not known; known are default, linear, '
    'llama3 and yarn.'
  )


def rotate(
  x: jax.Array, positions: jax.Array, angles: np.ndarray, scale: float
) -> jax.Array:
  """Rotates `x [..., heads, dh]` by `positions [...]`; halves are paired.

  Angles, cosines and products are float32; the result has the type of `x`.
  """
  cos, sin = (a[..., None, :] for a in _turn(positions, angles, scale))
  low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate(
    [low * cos - high * sin, high * cos + low * sin], axis=-1
  )
  return rotated.astype(x.dtype)


def turn(
  rope: config_lib.RopeConfig, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines at `positions [...]`, float32 `[..., head_dim / 2]`."""
  return _turn(positions, *frequencies(rope, head_dim))


def _turn(
  positions: jax.Array, angles: np.ndarray, scale: float
) -> tuple[jax.Array, jax.Array]:
  theta = positions[..., None].astype(jnp.float32) * jnp.asarray(
    angles
  ).reshape((1,) * positions.ndim + angles.shape)
  return jnp.cos(theta) * scale, jnp.sin(theta) * scale


def _llama3(rope: config_lib.RopeConfig, angles: np.ndarray) -> np.ndarray:
  wavelength = 2 * math.pi / angles
  longest = rope.original_context / rope.low_freq_factor
  shortest = rope.original_context / rope.high_freq_factor
  blend = (rope.original_context / wavelength - rope.low_freq_factor) / (
    rope.high_freq_factor - rope.low_freq_factor
  )
  blended = (1 - blend) * angles / rope.factor + blend * angles
  slow = np.where(wavelength > longest, angles / rope.factor, blended)
  return np.where(wavelength < shortest, angles, slow)


def _yarn(
  rope: config_lib.RopeConfig, angles: np.ndarray, head_dim: int
) -> np.ndarray:
  def dimension(rotations: float) -> float:
    turns = rope.original_context / (rotations * 2 * math.pi)
    return head_dim * math.log(turns) / (2 * math.log(rope.theta))

  low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
  if rope.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, head_dim - 1)
  span = high - low if high != low else 0.001
  ramp = np.clip((np.arange(head_dim // 2) - low) / span, 0, 1)
  out: np.ndarray = angles / rope.factor * ramp + angles * (1 - ramp)
  return out


def _yarn_scale(rope: config_lib.RopeConfig) -> float:
  def mscale(weight: float) -> float:
    if rope.factor <= 1:
      return 1.0
    return 0.1 * weight * math.log(rope.factor) + 1.0

  if rope.attention_factor is not None:
    return rope.attention_factor
  if rope.mscale and rope.mscale_all_dim:
    return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
  return mscale(1.0)
