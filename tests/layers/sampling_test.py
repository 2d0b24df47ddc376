"""Sampling: filters against plain numpy, the distribution, the seeds."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax.layers import sampling

_sample = jax.jit(sampling.sample)


def _settings(count: int, **changes: Any) -> sampling.Sampling:
  base = {'temperature': 1.0, 'top_k': 0, 'top_p': 1.0, 'min_p': 0.0, 'seed': 0}
  kinds = {'top_k': jnp.int32, 'seed': jnp.int32}
  return sampling.Sampling(
    **{
      name: jnp.broadcast_to(
        jnp.asarray(changes.get(name, value), kinds.get(name, jnp.float32)),
        (count,),
      )
      for name, value in base.items()
    }
  )


def _kept(ranked: np.ndarray, top_k: int, top_p: float, min_p: float):
  """The filters one after the other, as their names say."""
  ids = list(range(len(ranked)))
  if top_k:
    ids = ids[:top_k]
  p = np.exp(ranked[ids].astype(np.float64) - ranked[0])
  p /= p.sum()
  mass, kept = 0.0, []
  for i, share in zip(ids, p, strict=True):
    if mass >= top_p:
      break
    kept.append(i)
    mass += share
  return [i for i in kept if p[i] >= min_p * p[0]] or [0]


class KeepTest(parameterized.TestCase):
  @parameterized.product(
    top_k=(0, 1, 4, 100), top_p=(1.0, 0.9, 0.3, 1e-6), min_p=(0.0, 0.1, 1.0)
  )
  def test_against_numpy(self, top_k: int, top_p: float, min_p: float):
    rng = np.random.default_rng(top_k)
    for _ in range(5):
      ranked = -np.sort(-rng.normal(size=30).astype(np.float32) * 2)
      got = sampling.keep(
        jnp.asarray(ranked),
        jnp.int32(top_k),
        jnp.float32(top_p),
        jnp.float32(min_p),
      )
      wanted = np.zeros(30, bool)
      wanted[_kept(ranked, top_k, top_p, min_p)] = True
      np.testing.assert_array_equal(got, wanted)


class SampleTest(parameterized.TestCase):
  @functools.cached_property
  def logits(self) -> jax.Array:
    return jax.random.normal(jax.random.key(2), (1, 12)) * 1.5

  def _draws(self, count: int, **changes: Any) -> np.ndarray:
    logits = jnp.broadcast_to(self.logits, (count, 12))
    positions = jnp.arange(count, dtype=jnp.int32)
    return np.asarray(_sample(logits, _settings(count, **changes), positions))

  @parameterized.parameters(0.5, 1.0, 2.0)
  def test_draws_follow_the_distribution(self, temperature: float):
    count = 20_000
    got = np.bincount(self._draws(count, temperature=temperature), minlength=12)
    p = np.asarray(jax.nn.softmax(self.logits[0] / temperature))
    # Six standard deviations for each of the twelve.
    np.testing.assert_array_less(
      np.abs(got / count - p), 6 * np.sqrt(p * (1 - p) / count) + 1e-4
    )

  def test_filtered_draws_stay_among_the_kept(self):
    order = np.argsort(-np.asarray(self.logits[0]))
    got = self._draws(2000, top_k=3)
    self.assertEqual(set(got), set(order[:3].tolist()))
    got = self._draws(2000, min_p=1.0)
    self.assertEqual(set(got), {order[0]})

  def test_greedy_takes_the_first_of_the_best(self):
    logits = np.zeros((3, 9), np.float32)
    logits[1, [4, 7]] = 2
    logits[2, 8] = 1
    got = _sample(
      jnp.asarray(logits), _settings(3, temperature=0.0), jnp.arange(3)
    )
    np.testing.assert_array_equal(got, [0, 4, 8])

  def test_neighbours_change_nothing(self):
    """Same seed, same position, same logits: the same token, anywhere."""
    logits = jax.random.normal(jax.random.key(3), (6, 40))
    rows = dict(
      temperature=[1.0, 0.0, 0.7, 1.3, 0.0, 1.0],
      top_k=[0, 0, 5, 0, 3, 0],
      top_p=[1.0, 1.0, 0.8, 1.0, 1.0, 0.5],
      min_p=[0.0, 0.0, 0.0, 0.1, 0.0, 0.0],
      seed=[1, 2, 3, 4, 5, 2**31 - 1],
    )
    positions = jnp.array([9, 8, 7, 6, 5, 4], jnp.int32)
    together = _sample(logits, _settings(6, **rows), positions)
    for i in range(6):
      alone = {name: values[i] for name, values in rows.items()}
      got = _sample(
        logits[i : i + 1], _settings(1, **alone), positions[i : i + 1]
      )
      self.assertEqual(int(got[0]), int(together[i]))

  def test_seeds_and_positions_differ(self):
    flat = jnp.zeros((64, 1000))
    by_position = _sample(flat, _settings(64), jnp.arange(64))
    self.assertGreater(len(set(np.asarray(by_position).tolist())), 50)
    seeds = _settings(64, seed=list(range(64)))
    by_seed = _sample(flat, seeds, jnp.zeros(64, jnp.int32))
    self.assertGreater(len(set(np.asarray(by_seed).tolist())), 50)


if __name__ == '__main__':
  absltest.main()
