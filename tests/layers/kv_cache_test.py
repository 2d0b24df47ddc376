"""Keys and values of rows: written once, padding nowhere, nothing leaks."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kv_cache

_CONFIG = config_lib.tiny()  # 2 key and value heads of width 8, 4 layers


def _new(g: int, t: int) -> tuple[jnp.ndarray, jnp.ndarray]:
  shape = (g, t, _CONFIG.num_kv_heads, _CONFIG.head_dim)
  k = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape) + 1
  return k, -k


class CacheTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.cache = kv_cache.init(_CONFIG, 3, 5, jnp.float32)[0]

  def test_shapes_and_bytes(self):
    caches = kv_cache.init(_CONFIG, 3, 5, jnp.bfloat16)
    self.assertLen(caches, 4)
    self.assertEqual(
      kv_cache.nbytes(_CONFIG, 3, 5, jnp.bfloat16),
      sum(a.nbytes for cache in caches for a in cache),
    )

  def test_what_is_written_is_read(self):
    k, v = _new(2, 2)
    rows, positions = jnp.array([2, 0]), jnp.array([[1, 2], [4, 0]])
    cache = kv_cache.write(self.cache, rows, positions, k, v)
    seen = kv_cache.read(cache, rows)
    for g in range(2):
      for t in range(2):
        at = int(positions[g, t])
        np.testing.assert_array_equal(seen.k[g, :, at], k[g, t])
        np.testing.assert_array_equal(seen.v[g, :, at], v[g, t])
    self.assertEqual(np.count_nonzero(cache.k), k.size)
    np.testing.assert_array_equal(kv_cache.read(cache, jnp.array([1])).k, 0)

  def test_padding_is_written_nowhere(self):
    k, v = _new(2, 2)
    rows, positions = jnp.array([3, 1]), jnp.array([[0, 1], [5, 2]])
    cache = kv_cache.write(self.cache, rows, positions, k, v)
    self.assertEqual(np.count_nonzero(cache.k), k[1, 1].size)
    np.testing.assert_array_equal(cache.k[1, :, 2], k[1, 1])

  def test_values_that_are_not_finite_spoil_their_own_text_alone(self):
    k, v = _new(1, 2)
    v = v.at[0, 1, 0, 3].set(jnp.inf)
    at = jnp.array([[0, 1]])
    cache = kv_cache.write(self.cache, jnp.array([0]), at, k, v)
    self.assertTrue(np.all(np.isfinite(cache.v)))
    self.assertTrue(np.all(np.isnan(cache.k[0, 0, 1])))
    np.testing.assert_array_equal(cache.k[0, 1, 1], k[0, 1, 1])
    np.testing.assert_array_equal(cache.v[0, :, 0], v[0, 0])


if __name__ == '__main__':
  absltest.main()
