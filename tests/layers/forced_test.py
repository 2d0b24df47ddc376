"""Recorded expert ids in place of the router's own."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax.layers import block, forced
from bevy_jax.layers import config as config_lib
from bevy_jax.layers import params as params_lib

_TABLE = np.array(
  [[[[5, 1], [2, 0]], [[3, 4], [7, 6]]], [[[0, 7], [1, 2]], [[6, 5], [4, 3]]]],
  np.int16,
)  # 2 requests, 2 positions, 2 layers, 2 experts.


def _model(**changes: object) -> config_lib.ModelConfig:
  return config_lib.tiny(num_layers=2, moe_layers=(True, True), **changes)


class ForcedTest(parameterized.TestCase):
  @parameterized.parameters(True, False)
  def test_ids_are_the_recording_and_weights_the_routers(self, norm: bool):
    """Seen to fail with the ids of the router, and with its best weights."""
    config = _model(norm_topk=norm)
    params = params_lib.init(config, jax.random.key(0))
    p = forced.attach(config, params, _TABLE)['layers'][1]
    x = jax.random.normal(jax.random.key(1), (4, config.model_dim))
    seeds, positions = jnp.array([0, 1, 3, 0]), jnp.array([0, 1, 4, 7])
    own = block.route(config, p, x)
    got = forced.apply(config, p, x, own, seeds, positions)
    np.testing.assert_array_equal(got.ids, [[2, 0], [4, 3], [1, 2], [7, 6]])
    self.assertEqual(got.ids.dtype, jnp.int32)
    h = np.asarray(x, np.float64)
    h /= np.sqrt((h**2).mean(-1, keepdims=True) + config.norm_eps)
    logits = (h * np.asarray(p['mlp_norm'])) @ np.asarray(p['router'])
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    wanted = np.take_along_axis(shares, np.asarray(got.ids), -1)
    if norm:
      wanted /= wanted.sum(-1, keepdims=True)
    np.testing.assert_allclose(got.weights, wanted, rtol=1e-5)

  def test_the_routers_own_choice_forced_upon_it_changes_nothing(self):
    config = _model()
    params = params_lib.init(config, jax.random.key(0))
    p = params['layers'][0]
    x = jax.random.normal(jax.random.key(1), (1, config.model_dim))
    own = block.route(config, p, x)
    table = np.asarray(own.ids, np.int16)[:, None]
    none = jnp.zeros(1, jnp.int32)
    same = forced.apply(config, p | {'forced': table}, x, own, none, none)
    np.testing.assert_array_equal(same.ids, own.ids)
    np.testing.assert_array_equal(same.weights, own.weights)
    self.assertIs(forced.apply(config, p, x, own, none, none), own)

  def test_values_that_are_not_finite_are_still_told(self):
    config = _model()
    params = params_lib.init(config, jax.random.key(0))
    p = forced.attach(config, params, _TABLE)['layers'][0]
    x = jnp.full((1, config.model_dim), jnp.nan)
    none = jnp.zeros(1, jnp.int32)
    got = forced.apply(config, p, x, block.route(config, p, x), none, none)
    self.assertFalse(bool(got.sound[0]))
    self.assertTrue(bool(jnp.all(jnp.isfinite(got.weights))))

  @parameterized.parameters(
    (_TABLE[:, :, :1], 'needs .* 2 layers, 2 experts'),
    (_TABLE[..., :1], 'needs'),
    (_TABLE + np.int16(1), '1 to 8, but a layer has 0 to 7'),
    (_TABLE - np.int16(1), '-1 to 6'),
  )
  def test_a_recording_of_another_model_is_refused(self, table, said):
    with self.assertRaisesRegex(ValueError, said):
      forced.attach(_model(), {'layers': [{}, {}]}, table)


if __name__ == '__main__':
  absltest.main()
