"""What each stream will use next, against the formula written out."""

import numpy as np
from absl.testing import absltest

from bevy_jax.offload import estimate as estimate_lib

_LAYERS, _EXPERTS, _TOP_K = 3, 5, 2


def plain(past, streams):
  """float[layer, expert] from [(layer, stream, experts), ...] in order."""
  weights = estimate_lib.WEIGHTS
  at = {}
  for layer, stream, _ in past:
    at[stream] = layer
  found = np.zeros((_LAYERS, _EXPERTS))
  for layer in range(_LAYERS):
    unused = np.ones(_EXPERTS)
    for stream in range(streams):
      mine = [e for where, s, e in past if (where, s) == (layer, stream)]
      if not mine:
        continue
      # Popularity as it was when the stream came here last.
      end = max(i for i, p in enumerate(past) if p[:2] == (layer, stream))
      seen = [e for where, _, e in past[: end + 1] if where == layer]
      for x in range(_EXPERTS):
        worth = [0.5 ** (age / 16) for age in range(len(mine))][::-1]
        p = (
          weights[0] * sum(x in e for e in seen) / len(seen)
          + weights[1]
          * sum(w for w, e in zip(worth, mine, strict=True) if x in e)
          / sum(worth)
          + weights[2] * (x in mine[-1])
        )
        unused[x] *= 1 - min(max(p, 1e-3), 1 - 1e-3)
    distance = np.mean([(layer - a - 1) % _LAYERS + 1 for a in at.values()])
    found[layer] = unused / np.maximum(1 - unused, 1e-3) + distance / _LAYERS
  return found.ravel()


class EstimateTest(absltest.TestCase):
  def test_equals_the_formula(self):
    rng = np.random.default_rng(0)
    streams = 3
    found = estimate_lib.Estimate(_LAYERS, _EXPERTS, streams)
    past, at = [], [-1] * streams
    for _ in range(60):
      # Streams run apart: each has its own layer.
      stream = int(rng.integers(streams))
      at[stream] = (at[stream] + 1) % _LAYERS
      chosen = rng.choice(_EXPERTS, _TOP_K, replace=False)
      found.reveal(at[stream], np.array([stream]), chosen[None])
      past.append((at[stream], stream, set(chosen.tolist())))
      np.testing.assert_allclose(found.next_use(), plain(past, streams))

  def test_who_leaves_counts_no_longer(self):
    both, one = (estimate_lib.Estimate(_LAYERS, _EXPERTS, 2) for _ in range(2))
    for layer in range(_LAYERS):
      chosen = np.array([[0, 1], [2, 3]])
      both.reveal(layer, np.array([0, 1]), chosen)
      one.reveal(layer, np.array([0]), chosen[:1])
    both.leave(1)
    self.assertEqual(both.next_use()[2], both.next_use()[3])
    self.assertLess(both.next_use()[0], both.next_use()[2])
    both.leave(0)
    np.testing.assert_array_equal(both.odds, 1000.0)


if __name__ == '__main__':
  absltest.main()
