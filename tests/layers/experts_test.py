"""Experts through slot numbers: against numpy, in waves, any slots."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from bevy_jax.layers import experts

_N, _T, _D, _F, _SLOTS = 5, 3, 8, 6, 7
_apply = jax.jit(experts.apply)


def _setup() -> tuple[jax.Array, jax.Array, np.ndarray]:
  keys = jax.random.split(jax.random.key(0), 2)
  pool = jax.random.normal(keys[0], (_SLOTS, 3, _F, _D))
  x = jax.random.normal(keys[1], (_N, _D))
  rng = np.random.default_rng(0)
  slots = np.stack([rng.permutation(_SLOTS)[:_T] for _ in range(_N)])
  return pool, x, slots.astype(np.int32)


def _distinct(slots: np.ndarray, length: int = _SLOTS) -> tuple[jax.Array, int]:
  found = np.unique(slots[slots >= 0])
  padded = np.full(length, -1, np.int32)
  padded[: len(found)] = found
  return jnp.asarray(padded), len(found)


def _zeros() -> jax.Array:
  return jnp.zeros((_N, _T, _D), jnp.float32)


class ApplyTest(absltest.TestCase):
  def test_against_numpy(self):
    pool, x, slots = _setup()
    distinct, count = _distinct(slots)
    got = _apply(pool, x, slots, distinct, jnp.int32(count), _zeros())
    p, h = np.asarray(pool, np.float64), np.asarray(x, np.float64)
    for n in range(_N):
      for t in range(_T):
        gate, up, down = p[slots[n, t]]
        g = gate @ h[n]
        wanted = (g / (1 + np.exp(-g)) * (up @ h[n])) @ down
        np.testing.assert_allclose(got[n, t], wanted, rtol=1e-4, atol=1e-5)

  def test_waves_are_bitwise_one_go(self):
    pool, x, slots = _setup()
    distinct, count = _distinct(slots)
    whole = _apply(pool, x, slots, distinct, jnp.int32(count), _zeros())
    # Stale outputs of the layer before lie in `partial` at first.
    y = jnp.full((_N, _T, _D), jnp.nan)
    for wave in ([0, 3], [1], [2, 4, 5, 6]):
      some = np.where(np.isin(slots, wave), slots, -1).astype(np.int32)
      distinct, count = _distinct(some)
      y = _apply(pool, x, some, distinct, jnp.int32(count), y)
    np.testing.assert_array_equal(y, whole)

  def test_where_an_expert_lies_changes_nothing(self):
    pool, x, slots = _setup()
    distinct, count = _distinct(slots)
    whole = _apply(pool, x, slots, distinct, jnp.int32(count), _zeros())
    order = np.random.default_rng(1).permutation(_SLOTS)
    where = np.argsort(order).astype(np.int32)[slots]
    distinct, count = _distinct(where)
    moved = _apply(pool[order], x, where, distinct, jnp.int32(count), _zeros())
    np.testing.assert_array_equal(moved, whole)

  def test_a_static_count_skips_the_padding(self):
    """As on a GPU: all of `distinct` is walked, -1 among them."""
    pool, x, slots = _setup()
    slots[0] = -1
    distinct, count = _distinct(slots)
    dynamic = _apply(pool, x, slots, distinct, jnp.int32(count), _zeros())
    long, _ = _distinct(slots, _SLOTS + 4)
    static = experts.apply(pool, x, slots, long, len(long), _zeros())
    np.testing.assert_allclose(static, dynamic, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(static[0], np.zeros((_T, _D)))

  def test_combine_adds_in_the_order_of_the_choices(self):
    weights = jnp.array([[0.5, 0.25, 0.25]], jnp.float32)
    y = jnp.array([[[4.0, 8.0], [1.0, 2.0], [-3.0, 4.0]]])
    np.testing.assert_array_equal(experts.combine(weights, y), [[1.5, 5.5]])


if __name__ == '__main__':
  absltest.main()
