"""The halves of a layer: chunks and steps agree, the shared expert's gate."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax.layers import block, kv_cache
from bevy_jax.layers import config as config_lib
from bevy_jax.layers import params as params_lib

# Op by op, each of them would be a hundred compilations.
_ATTEND = jax.jit(block.attend, static_argnums=(0, 3))
_FINISH = jax.jit(block.finish_experts, static_argnums=0)


def _layer(config: config_lib.ModelConfig, layer: int = 0) -> dict:
  return params_lib.init(config, jax.random.key(0))['layers'][layer]


class AttendTest(parameterized.TestCase):
  @parameterized.parameters(0, 3)
  def test_a_chunk_is_its_tokens_one_by_one(self, window: int):
    config = config_lib.tiny()
    p, x = _layer(config), jax.random.normal(jax.random.key(1), (2, 6, 32))
    rows = jnp.array([1, 0])
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    empty = kv_cache.init(config, 2, 8, jnp.float32)[0]
    whole, _ = _ATTEND(config, p, empty, window, x, rows, positions)
    cache = empty
    for t in range(6):
      some = slice(t, t + 1)
      out, cache = _ATTEND(
        config, p, cache, window, x[:, some], rows, positions[:, some]
      )
      np.testing.assert_allclose(out, whole[:, some], rtol=1e-4, atol=1e-5)


class FinishTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.x = jax.random.normal(jax.random.key(1), (3, 32))
    self.weights = jnp.full((3, 2), 0.5)
    self.y = jax.random.normal(jax.random.key(2), (3, 2, 32))

  def _finish(self, gate: float, **changes: object) -> jax.Array:
    config = config_lib.tiny(**changes)
    p = _layer(config)
    if config.shared_gate:
      # h @ gate is then `gate` times a positive number in every row.
      p['mlp_norm'] = jnp.ones(32)
      p['shared_gate'] = gate * jnp.ones((32, 1))
    x = jnp.abs(self.x)
    return _FINISH(config, p, x, self.weights, self.y) - x

  def test_without_a_shared_expert(self):
    np.testing.assert_allclose(
      self._finish(0), self.y.mean(1), rtol=1e-4, atol=1e-5
    )

  def test_the_gate_of_the_shared_expert_is_used(self):
    with_gate = {'shared_dim': 20, 'shared_gate': True}
    routed = self.y.mean(1)
    shut = self._finish(-10, **with_gate)
    np.testing.assert_allclose(shut, routed, atol=1e-4)
    wide = self._finish(10, **with_gate) - routed
    half = self._finish(0, **with_gate) - routed
    self.assertGreater(np.abs(wide).max(), 0.1)
    np.testing.assert_allclose(wide, 2 * half, rtol=1e-3, atol=1e-4)

  def test_without_a_gate_it_counts_in_full(self):
    with_gate = self._finish(10, shared_dim=20, shared_gate=True)
    config = config_lib.tiny(shared_dim=20)
    p = _layer(config_lib.tiny(shared_dim=20, shared_gate=True))
    p['mlp_norm'] = jnp.ones(32)
    x = jnp.abs(self.x)
    got = _FINISH(config, p, x, self.weights, self.y) - x
    np.testing.assert_allclose(got, with_gate, rtol=1e-3, atol=1e-4)


class DenseTest(absltest.TestCase):
  def test_against_numpy(self):
    config = config_lib.tiny(moe_layers=(False, True, True, True), dense_dim=24)
    p = _layer(config)
    x = jax.random.normal(jax.random.key(1), (3, 32))
    got = block.dense(config, p, x)
    h = np.asarray(x, np.float64)
    h = h / np.sqrt((h * h).mean(-1, keepdims=True) + config.norm_eps)
    h = h * np.asarray(p['mlp_norm'])
    gate, up = h @ np.asarray(p['dense_in'])
    wanted = x + (gate / (1 + np.exp(-gate)) * up) @ np.asarray(p['dense_out'])
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)


class WorkTest(absltest.TestCase):
  def test_slots_and_distinct_slots_of_choices(self):
    """Seen to fail with rows that do not count reading all the same."""
    table = jnp.array([7, -1, 4, 0, 9], jnp.int32)
    ids = jnp.array([[4, 0], [1, 2], [0, 4], [3, 2]], jnp.int32)
    active = jnp.array([True, True, True, False])
    work = block.work(table, ids, active, 5)
    np.testing.assert_array_equal(
      work.slots, [[9, 7], [-1, 4], [7, 9], [-1, -1]]
    )
    # In the order of their experts, nothing twice, -1 behind the last.
    np.testing.assert_array_equal(work.distinct, [7, 4, 9, -1, -1])
    self.assertEqual(int(work.reads), 3)
    np.testing.assert_array_equal(
      block.can_read(table, ids), [True, False, True, True]
    )


if __name__ == '__main__':
  absltest.main()
