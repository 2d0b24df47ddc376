"""The router: order of softmax and top-k, ties, rows that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import router


def _config(**changes: object) -> config_lib.ModelConfig:
  return config_lib.tiny(num_experts=8, **changes)


def _plain(logits: np.ndarray, top_k: int, norm: bool):
  """Softmax over all experts, then the best ones, in float64."""
  p = np.exp(logits - logits.max(-1, keepdims=True).astype(np.float64))
  p /= p.sum(-1, keepdims=True)
  ids = np.argsort(-p, axis=-1, kind='stable')[..., :top_k]
  weights = np.take_along_axis(p, ids, -1)
  return ids, weights / weights.sum(-1, keepdims=True) if norm else weights


class RouterTest(parameterized.TestCase):
  @parameterized.product(norm=(False, True), top_k=(1, 2, 5, 8))
  def test_against_numpy(self, norm: bool, top_k: int):
    logits = np.random.default_rng(0).normal(size=(50, 8)) * 3
    logits = logits.astype(np.float32)
    config = _config(top_k=top_k, norm_topk=norm)
    got = router.choose(config, jnp.asarray(logits))
    ids, weights = _plain(logits, top_k, norm)
    np.testing.assert_array_equal(got.ids, ids)
    np.testing.assert_allclose(got.weights, weights, rtol=2e-6)
    self.assertTrue(np.all(got.sound))

  def test_without_norm_the_weights_are_shares_of_all(self):
    """Neither raw logits nor renormalised: in (0, 1), less than 1 in all."""
    logits = jnp.array([[2.0, -1.0, 0.5, 3.0, 0.0, -2.0, 1.0, 0.0]])
    got = router.choose(_config(norm_topk=False), logits)
    total = np.asarray(got.weights).sum()
    self.assertGreater(total, 0)
    self.assertLess(total, 0.999)
    both = router.choose(_config(norm_topk=True), logits)
    np.testing.assert_array_equal(both.ids, got.ids)
    np.testing.assert_allclose(np.asarray(both.weights).sum(), 1, rtol=1e-6)

  def test_ties_go_to_the_lowest_id(self):
    logits = np.zeros((20, 8), np.float32)
    got = router.choose(_config(top_k=3), jnp.asarray(logits))
    np.testing.assert_array_equal(got.ids, [[0, 1, 2]] * 20)
    logits[:, [2, 5, 7]] = 1.5
    got = router.choose(_config(top_k=4), jnp.asarray(logits))
    np.testing.assert_array_equal(got.ids, [[2, 5, 7, 0]] * 20)

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_what_is_not_finite_gets_ids_in_range(self, bad: float):
    logits = np.random.default_rng(1).normal(size=(3, 8)).astype(np.float32)
    logits[1, 6] = bad
    got = router.choose(_config(top_k=3), jnp.asarray(logits))
    np.testing.assert_array_equal(got.sound, [True, False, True])
    np.testing.assert_array_equal(got.ids[1], [0, 1, 2])
    self.assertTrue(np.all(np.isfinite(got.weights)))
    alone = router.choose(_config(top_k=3), jnp.asarray(logits[:1]))
    np.testing.assert_array_equal(got.ids[0], alone.ids[0])

  def test_the_product_is_float32_whatever_the_model_is(self):
    """Experts that bfloat16 could not tell apart are told apart."""
    x = jnp.ones((1, 32), jnp.bfloat16)
    weights = np.zeros((32, 8), np.float32)
    weights[0] = 7 + np.arange(8) * 1e-3
    got = router.route(_config(), jnp.asarray(weights), x)
    np.testing.assert_array_equal(got.ids, [[7, 6]])
    self.assertEqual(got.weights.dtype, jnp.float32)

  def test_leading_axes_are_kept(self):
    x = jax.random.normal(jax.random.key(0), (2, 3, 32))
    w = jax.random.normal(jax.random.key(1), (32, 8))
    got = router.route(_config(), w, x)
    flat = router.route(_config(), w, x.reshape(6, 32))
    self.assertEqual((got.ids.shape, got.sound.shape), ((2, 3, 2), (2, 3)))
    np.testing.assert_array_equal(got.ids.reshape(6, 2), flat.ids)


if __name__ == '__main__':
  absltest.main()
