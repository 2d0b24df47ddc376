"""Root-mean-square normalisation."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from bevy_jax.layers import norm


class NormTest(absltest.TestCase):
  def test_by_hand(self):
    x = jnp.array([[3.0, 4.0], [0.0, 0.0]])
    weight = jnp.array([1.0, 2.0])
    root = np.sqrt(12.5)
    got = norm.rms_norm(x, weight, 0.0)
    np.testing.assert_allclose(got[0], [3 / root, 8 / root], rtol=1e-6)
    got = norm.rms_norm(x, weight, 1e-6)
    np.testing.assert_array_equal(got[1], [0, 0])

  def test_epsilon_counts(self):
    got = norm.rms_norm(jnp.array([1e-3]), jnp.ones(1), 1e-6)
    np.testing.assert_allclose(got, [np.sqrt(0.5)], rtol=1e-5)

  def test_bfloat16_is_rounded_once(self):
    x = np.random.default_rng(0).normal(size=(4, 64))
    x = jnp.asarray(x, jnp.bfloat16)
    got = norm.rms_norm(x, jnp.ones(64), 1e-6)
    self.assertEqual(got.dtype, jnp.bfloat16)
    wide = norm.rms_norm(x.astype(jnp.float32), jnp.ones(64), 1e-6)
    np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))


if __name__ == '__main__':
  absltest.main()
