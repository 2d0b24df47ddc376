"""Attention over cached rows: against plain numpy, windows, spoilt rows."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax.layers import attention
from bevy_jax.layers import config as config_lib

_H, _K, _C, _D = 4, 2, 9, 8


def _random(seed: int, *shape: int) -> jax.Array:
  return jax.random.normal(jax.random.key(seed), shape)


def _plain(q, k, v, positions, window: int) -> np.ndarray:
  q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
  out = np.zeros(q.shape)
  for g, t, h in np.ndindex(q.shape[:3]):
    last = int(positions[g, t])
    first = max(0, last - window + 1) if window else 0
    of = h // (_H // _K)
    scores = k[g, of, first : last + 1] @ q[g, t, h] / np.sqrt(_D)
    weights = np.exp(scores - scores.max())
    out[g, t, h] = (weights / weights.sum()) @ v[g, of, first : last + 1]
  return out.reshape(*q.shape[:2], -1)


class AttendTest(parameterized.TestCase):
  @parameterized.parameters(0, 1, 3, 100)
  def test_against_numpy(self, window: int):
    q, k = _random(0, 2, 3, _H, _D), _random(1, 2, _K, _C, _D)
    v = _random(2, 2, _K, _C, _D)
    positions = jnp.array([[0, 1, 2], [4, 8, 6]])
    got = attention.attend(q, k, v, positions, window)
    wanted = _plain(q, k, v, np.asarray(positions), window)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)

  def test_what_lies_behind_a_position_is_not_seen(self):
    q, k = _random(0, 1, 1, _H, _D), _random(1, 1, _K, _C, _D)
    v = _random(2, 1, _K, _C, _D)
    at = jnp.array([[4]])
    clean = attention.attend(q, k, v, at, 0)
    spoilt = k.at[:, :, 5:].set(jnp.nan)
    other = v.at[:, :, 5:].set(1e9)
    got = attention.attend(q, spoilt, other, at, 0)
    np.testing.assert_array_equal(got, clean)

  def test_scores_are_float32(self):
    q = _random(0, 1, 1, _H, _D).astype(jnp.bfloat16)
    k = _random(1, 1, _K, _C, _D).astype(jnp.bfloat16)
    got = attention.attend(q, k, k, jnp.array([[8]]), 0)
    self.assertEqual(got.dtype, jnp.bfloat16)
    wanted = _plain(q, k, k, np.array([[8]]), 0)
    np.testing.assert_allclose(
      np.asarray(got, np.float32), wanted, rtol=0.03, atol=0.02
    )


class ProjectTest(parameterized.TestCase):
  def _project(self, **changes: object):
    config = config_lib.tiny(**changes)
    d, q, kv = 32, 4 * 8, 2 * 8
    p = {
      'wq': _random(1, d, q),
      'wk': _random(2, d, kv),
      'wv': _random(3, d, kv),
    }
    p |= {'bq': _random(4, q), 'bk': _random(5, kv), 'bv': _random(6, kv)}
    full = config.qk_norm == 'full'
    p['q_norm'] = jnp.ones(q if full else 8) * 2
    p['k_norm'] = jnp.ones(kv if full else 8) * 3
    x, positions = _random(0, 1, 2, d), jnp.array([[0, 5]])
    return attention.project(config, p, x, positions), p, x

  def test_position_0_is_not_rotated(self):
    (q, k, v), p, x = self._project(qk_norm=None)
    flat = (q[0, 0].reshape(-1), k[0, 0].reshape(-1), v[0, 0].reshape(-1))
    for got, name in zip(flat, ('wq', 'wk', 'wv'), strict=True):
      np.testing.assert_allclose(got, x[0, 0] @ p[name], rtol=1e-4, atol=1e-4)
    # Later ones are, and keep their length; values never are.
    np.testing.assert_allclose(
      v[0, 1].reshape(-1), x[0, 1] @ p['wv'], rtol=1e-4, atol=1e-4
    )
    plain = np.asarray(x[0, 1] @ p['wk']).reshape(2, 8)
    self.assertGreater(np.abs(np.asarray(k[0, 1]) - plain).max(), 0.1)
    np.testing.assert_allclose(
      np.linalg.norm(k[0, 1], axis=-1),
      np.linalg.norm(plain, axis=-1),
      rtol=1e-4,
    )

  @parameterized.parameters('head', 'full')
  def test_norms_of_queries_and_keys(self, kind: str):
    (q, k, _), _, _ = self._project(qk_norm=kind)
    axes = -1 if kind == 'head' else (-2, -1)
    for a, weight in ((q, 2), (k, 3)):
      mean = np.mean(np.asarray(a) ** 2, axis=axes)
      np.testing.assert_allclose(mean, weight**2, rtol=1e-3)

  def test_bias_and_clip(self):
    (q, _, v), p, x = self._project(qk_norm=None, qkv_bias=True)
    wanted = x[0, 0] @ p['wv'] + p['bv']
    np.testing.assert_allclose(
      v[0, 0].reshape(-1), wanted, rtol=1e-4, atol=1e-4
    )
    (q, _, v), _, _ = self._project(qk_norm=None, clip_qkv=0.5)
    self.assertEqual(float(jnp.abs(v).max()), 0.5)
    self.assertLessEqual(float(jnp.abs(q[0, 0]).max()), 0.5)

  def test_output_bias(self):
    config = config_lib.tiny(out_bias=True)
    p = {'wo': _random(0, 32, 32), 'bo': _random(1, 32)}
    mixed = _random(2, 2, 3, 32)
    got = attention.output(config, p, mixed)
    np.testing.assert_allclose(
      got[1, 2], mixed[1, 2] @ p['wo'] + p['bo'], rtol=1e-4, atol=1e-4
    )


if __name__ == '__main__':
  absltest.main()
