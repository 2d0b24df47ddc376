"""Embedding, final norm and head, tied and untied."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import embed


def _params() -> dict[str, jax.Array]:
  keys = jax.random.split(jax.random.key(0), 2)
  return {
    'embed': jax.random.normal(keys[0], (96, 32)),
    'head': jax.random.normal(keys[1], (32, 96)),
    'final_norm': jnp.full(32, 2.0),
  }


class EmbedTest(parameterized.TestCase):
  def test_rows_of_the_table(self):
    p = _params()
    got = embed.embed(p, jnp.array([[3, 95], [0, 3]]))
    np.testing.assert_array_equal(got[0, 1], p['embed'][95])
    np.testing.assert_array_equal(got[1, 1], got[0, 0])

  @parameterized.parameters(True, False)
  def test_logits(self, tied: bool):
    p = _params()
    x = jax.random.normal(jax.random.key(1), (5, 32))
    got = embed.logits(config_lib.tiny(tied=tied), p, x)
    head = np.asarray(p['embed']).T if tied else np.asarray(p['head'])
    unit = np.asarray(x) / np.sqrt(
      np.mean(np.asarray(x) ** 2, -1, keepdims=True)
    )
    np.testing.assert_allclose(got, 2 * unit @ head, rtol=1e-3, atol=1e-3)

  def test_logits_are_float32(self):
    p = jax.tree.map(lambda a: a.astype(jnp.bfloat16), _params())
    got = embed.logits(config_lib.tiny(), p, jnp.ones((1, 32), jnp.bfloat16))
    self.assertEqual(got.dtype, jnp.float32)


if __name__ == '__main__':
  absltest.main()
