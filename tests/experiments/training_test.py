import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

from bevy_jax.experiments import demo_model, forward, training
from bevy_jax.layers import config as config_lib
from bevy_jax.layers import params, reference, router

CONFIG = config_lib.tiny(num_layers=2, moe_layers=(True,) * 2)
# Op by op, each of them would be a hundred compilations.
_RUN = jax.jit(forward.run, static_argnums=0, static_argnames='dtype')
_GATE = jax.jit(forward._gate, static_argnums=0)


def _weights(seed):
  shared, experts = jax.random.split(jax.random.key(seed))
  return {
    'shared': params.init(CONFIG, shared),
    'experts': params.init_experts(CONFIG, experts),
  }


class ForwardTest(parameterized.TestCase):
  def test_dense_experts_give_the_reference_logits(self):
    weights = _weights(1)
    tokens = jax.random.randint(jax.random.key(2), (2, 12), 0, 96)
    out = _RUN(CONFIG, weights, tokens, dtype=jnp.float32)
    ours = out.hidden @ weights['shared']['embed'].T
    for row in range(2):
      true = jax.jit(reference.logits, static_argnums=0)(
        CONFIG, weights['shared'], weights['experts'], tokens[row]
      )
      np.testing.assert_allclose(ours[row], true, rtol=1e-4, atol=1e-4)

  @parameterized.parameters(True, False)
  def test_gate_is_the_router_with_ties(self, norm_topk):
    config = config_lib.tiny(norm_topk=norm_topk)
    h = jax.random.normal(jax.random.key(0), (2, 5, config.model_dim))
    w = jax.random.normal(jax.random.key(1), (config.model_dim, 8))
    # Columns 2 and 6 tie everywhere, and all eight do on a zero row.
    w = w.at[:, 6].set(w[:, 2])
    h = h.at[0, 0].set(0.0)
    gate, mask, _ = _GATE(config, w, h)
    routing = router.route(config, w, h)
    true = jnp.zeros((2, 5, 8))
    rows, columns = jnp.mgrid[:2, :5]
    true = true.at[rows[..., None], columns[..., None], routing.ids].set(
      routing.weights
    )
    np.testing.assert_allclose(gate, true, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(mask, true > 0)
    self.assertEqual(mask[0, 0].tolist(), [True] * 2 + [False] * 6)

  def test_balance_is_one_when_even_and_large_when_not(self):
    config = config_lib.tiny()
    even = jnp.eye(8, config.model_dim).T * 9.0
    tokens = jnp.eye(8, config.model_dim)
    # Token i prefers i, then i + 1: every expert gets two of sixteen choices.
    tokens = (tokens + 0.5 * jnp.roll(tokens, 1, axis=0))[None]
    _, _, (balance, _) = _GATE(config, even, tokens)
    self.assertAlmostEqual(float(balance), 1.0, places=5)
    one = jnp.ones((1, 4, config.model_dim))
    slope = jnp.broadcast_to(jnp.arange(8.0)[None, :], (config.model_dim, 8))
    _, _, (balance, z) = _GATE(config, slope, one)
    # Expert 7 has all the probability and half of the choices.
    self.assertAlmostEqual(float(balance), 4.0, places=4)
    self.assertAlmostEqual(float(z), (7 * config.model_dim) ** 2, delta=1.0)

  def test_loss_and_its_gradient_are_those_of_log_softmax(self):
    embed = jax.random.normal(jax.random.key(0), (96, 32))
    hidden = jax.random.normal(jax.random.key(1), (2, 3, 32))
    targets = jnp.asarray([[0, 95, 7], [1, 1, 2]])

    def ours(embed, hidden):
      weights = {'shared': {'embed': embed}}
      return jnp.sum(forward.token_losses(weights, hidden, targets))

    def plain(embed, hidden):
      logits = jnp.einsum('bsd,vd->bsv', hidden, embed)
      return jnp.sum(
        optax.softmax_cross_entropy_with_integer_labels(logits, targets)
      )

    mine = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(embed, hidden)
    true = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(embed, hidden)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(true), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

  def test_dropout_keeps_the_mean_and_needs_a_key(self):
    x = jnp.ones((64, 64))
    dropped = forward._drop(x, 0.25, jax.random.key(0))
    self.assertAlmostEqual(float(dropped.mean()), 1.0, delta=0.05)
    self.assertAlmostEqual(float((dropped == 0).mean()), 0.25, delta=0.05)
    np.testing.assert_array_equal(forward._drop(x, 0.25, None), x)

  def test_cpu_has_no_cudnn(self):
    if jax.default_backend() != 'cpu':
      self.skipTest('a GPU may have cuDNN')
    self.assertEqual(forward.best_attention(CONFIG, 16), 'xla')


class StepTest(parameterized.TestCase):
  @parameterized.parameters(
    (0, 0.1),
    (4, 0.5),
    (9, 1.0),
    (10, 1.0),
    (60, 0.515),
    (110, 0.03),
    (999, 0.03),
  )
  def test_learning_rate(self, step, fraction):
    train = training.TrainConfig(peak_lr=2.0, warmup=10, floor=0.03)
    lr = training.learning_rate(train, jnp.int32(step), jnp.int32(110))
    self.assertAlmostEqual(float(lr), 2.0 * fraction, places=5)

  def test_unknown_length_never_decays(self):
    train = training.TrainConfig(peak_lr=2.0, warmup=10)
    lr = training.learning_rate(
      train, jnp.int32(5000), jnp.int32(training.UNKNOWN)
    )
    self.assertAlmostEqual(float(lr), 2.0, places=5)

  @parameterized.parameters((0.25, (6, 2)), (0.0, (8, 0)), (0.3, (6, 2)))
  def test_rows(self, share, rows):
    train = training.TrainConfig(batch=8, python_share=share)
    self.assertEqual(train.rows, rows)

  def test_decay_spares_vectors(self):
    train = training.TrainConfig(decay=0.5)
    tree = {'matrix': jnp.ones((2, 2)), 'vector': jnp.ones(2)}
    optimiser = training.optimiser(train)
    zero = jax.tree.map(jnp.zeros_like, tree)
    updates, _ = jax.jit(optimiser.update)(zero, optimiser.init(tree), tree)
    np.testing.assert_allclose(updates['matrix'], 0.5)
    np.testing.assert_allclose(updates['vector'], 0.0)

  def test_learns_a_repeating_text(self):
    config = dataclasses.replace(
      demo_model.micro(), num_layers=1, moe_layers=(True,)
    )
    train = training.TrainConfig(
      batch=8, window=32, warmup=5, peak_lr=1e-2, dropout=0.1
    )
    weights = demo_model.init(config, jax.random.key(0))
    state = training.start(train, weights)
    state = state._replace(total=jnp.asarray(60, jnp.int32))
    stream = jnp.asarray(np.arange(4000) % 37, jnp.uint16)
    rng, losses = np.random.default_rng(0), []
    for _ in range(60):
      starts = jnp.asarray(rng.integers(0, 3900, 8), jnp.int32)
      state, said = training.step(config, train, state, stream, starts)
      losses.append(float(said['loss']))
    # An untrained model is at log(512) = 6.2 nats.
    self.assertBetween(losses[0], 6.0, 6.6)
    # Knowing the 37 tokens alone would leave log(37) = 3.6.
    self.assertLess(losses[-1], 1.8)
    self.assertEqual(int(state.step), 60)
    self.assertEqual(state.seen.tolist(), [60 * 6, 60 * 2])


if __name__ == '__main__':
  absltest.main()
