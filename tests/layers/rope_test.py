"""Rotary embedding: angles as transformers has them, rotation by its laws."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import rope

# `inv_freq` and `attention_scaling` of transformers 5.24 for head_dim 16:
# Qwen3MoeRotaryEmbedding(Qwen3MoeConfig(head_dim=16, rope_parameters=...)).
# Whole models of every kind are compared in reference_test.py.
LLAMA3 = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
YARN = {'kind': 'yarn', 'original_context': 1024}
KNOWN = {
  'default': (
    {},
    '1 0.3162278 0.1 0.03162278 0.01 0.003162278 1e-3 0.0003162278',
    1.0,
  ),
  'linear': (
    {'kind': 'linear', 'factor': 4.0},
    '0.25 0.07905694 0.025 '
    '0.007905695 0.0025 0.0007905695 0.00025 7.905695e-05',
    1.0,
  ),
  'llama3': (
    {'kind': 'llama3', 'theta': 5e5, 'factor': 8.0, 'original_context': 1024}
    | LLAMA3,
    '1 0.1939228 0.03760603 '
    '0.001312569 0.0001767767 3.428102e-05 6.64787e-06 1.289173e-06',
    1.0,
  ),
  'yarn': (
    YARN | {'factor': 4.0},
    '1 0.3162278 0.08125 0.01976424 0.004375 0.0007905695 0.00025 7.905695e-05',
    1.138629436111989,
  ),
  'yarn, ends not rounded, scale given': (
    YARN
    | {'factor': 4.0, 'truncate': False, 'beta_fast': 16.0, 'beta_slow': 2.0}
    | {'attention_factor': 1.3},
    '1 0.3162278 0.1 0.0187018 0.0025 0.0007905695 0.00025 7.905695e-05',
    1.3,
  ),
  'yarn, two mscales': (
    YARN | {'factor': 40.0, 'mscale': 1.0, 'mscale_all_dim': 0.5},
    '1 0.3162278 0.075625 '
    '0.01620667 0.0026875 7.905695e-05 2.5e-05 7.905694e-06',
    1.1557219901962608,
  ),
}


class FrequenciesTest(parameterized.TestCase):
  @parameterized.named_parameters((k, *v) for k, v in KNOWN.items())
  def test_as_transformers(self, fields, angles, scale):
    config = config_lib.RopeConfig(**fields)
    expected = np.array(angles.split(), np.float64)
    ours, our_scale = rope.frequencies(config, 16)
    self.assertEqual(ours.dtype, np.float32)
    np.testing.assert_allclose(ours, expected, rtol=3e-6)
    self.assertAlmostEqual(our_scale, scale, places=12)

  def test_yarn_that_stretches_nothing_scales_nothing(self):
    config = config_lib.RopeConfig(kind='yarn', original_context=64)
    ours, scale = rope.frequencies(config, 16)
    plain, _ = rope.frequencies(config_lib.RopeConfig(), 16)
    np.testing.assert_allclose(ours, plain, rtol=1e-6)
    self.assertEqual(scale, 1.0)

  def test_unknown_kind_is_named(self):
    with self.assertRaisesRegex(ValueError, 'longrope'):
      rope.frequencies(config_lib.RopeConfig(kind='longrope'), 16)


class RotateTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.angles, _ = rope.frequencies(config_lib.RopeConfig(theta=50.0), 8)
    self.x = jax.random.normal(jax.random.key(0), (5, 3, 8))

  def test_is_a_product_of_complex_numbers(self):
    positions = np.array([0, 1, 2, 7, 30])
    ours = rope.rotate(self.x, jnp.asarray(positions), self.angles, 1.3)
    x = np.asarray(self.x, np.float64)
    pairs = x[..., :4] + 1j * x[..., 4:]
    turned = pairs * np.exp(1j * positions[:, None, None] * self.angles) * 1.3
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(ours, expected, atol=1e-5)

  def test_position_zero_stays(self):
    ours = rope.rotate(self.x, jnp.zeros(5, jnp.int32), self.angles, 1.0)
    np.testing.assert_array_equal(ours, self.x)

  def test_products_depend_on_distance_alone(self):
    q, k = self.x[:2], self.x[2:4]

    def product(at):
      a = rope.rotate(q, jnp.full(2, at + 9), self.angles, 1.0)
      b = rope.rotate(k, jnp.full(2, at), self.angles, 1.0)
      return jnp.sum(a * b, axis=-1)

    np.testing.assert_allclose(product(0), product(40), atol=1e-4)
    nearer = rope.rotate(q, jnp.full(2, 5), self.angles, 1.0)
    self.assertGreater(
      float(jnp.abs(jnp.sum(nearer * k, axis=-1) - product(0)).max()), 0.1
    )

  @parameterized.parameters(((),), ((2,),), ((2, 3),))
  def test_any_leading_shape(self, lead):
    x = np.random.default_rng(1).normal(size=(*lead, 3, 8)).astype(np.float32)
    positions = np.arange(np.prod(lead, dtype=int)).reshape(lead) + 4
    turn = jax.jit(lambda x, at: rope.rotate(x, at, self.angles, 1.0))
    flat = turn(x.reshape(-1, 3, 8), positions.reshape(-1))
    np.testing.assert_allclose(
      turn(x, positions), np.reshape(flat, x.shape), atol=1e-6
    )

  def test_keeps_the_type_and_turns_in_float32(self):
    x = self.x.astype(jnp.bfloat16)
    positions = jnp.full(5, 1000)
    ours = rope.rotate(x, positions, self.angles, 1.0)
    self.assertEqual(ours.dtype, jnp.bfloat16)
    wide = rope.rotate(x.astype(jnp.float32), positions, self.angles, 1.0)
    np.testing.assert_array_equal(ours, wide.astype(jnp.bfloat16))


if __name__ == '__main__':
  absltest.main()
