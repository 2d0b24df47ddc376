"""The pytree of shared weights: which leaves there are, and their shapes."""

import jax
from absl.testing import absltest

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import params

_EVERYTHING = dict(
  moe_layers=(True, False, True, True),
  dense_dim=24,
  shared_dim=20,
  shared_gate=True,
  qkv_bias=True,
  out_bias=True,
  tied=False,
)


class ParamsTest(absltest.TestCase):
  def test_init_follows_shapes(self):
    for changes in ({}, _EVERYTHING, _EVERYTHING | {'qk_norm': 'full'}):
      config = config_lib.tiny(**changes)
      made = params.init(config, jax.random.key(0))
      shapes = jax.tree.map(lambda a: a.shape, made)
      self.assertEqual(shapes, params.shapes(config))

  def test_leaves_follow_the_config(self):
    plain = params.shapes(config_lib.tiny(qk_norm=None))
    self.assertNotIn('head', plain)
    self.assertCountEqual(
      plain['layers'][0],
      ('attn_norm', 'mlp_norm', 'wq', 'wk', 'wv', 'wo', 'router'),
    )
    rich = params.shapes(config_lib.tiny(**_EVERYTHING))
    self.assertEqual(rich['head'], (32, 96))
    moe, dense = rich['layers'][0], rich['layers'][1]
    self.assertEqual(moe['shared_gate'], (32, 1))
    self.assertEqual(moe['shared_in'], (2, 32, 20))
    self.assertEqual((moe['q_norm'], moe['bk']), ((8,), (16,)))
    self.assertEqual(dense['dense_in'], (2, 32, 24))
    self.assertNotIn('router', dense)
    full = params.shapes(config_lib.tiny(qk_norm='full'))['layers'][0]
    self.assertEqual((full['q_norm'], full['k_norm']), ((32,), (16,)))

  def test_experts_count_the_layers_that_have_them(self):
    config = config_lib.tiny(**_EVERYTHING)
    made = params.init_experts(config, jax.random.key(0))
    self.assertEqual(made.shape, (3, 8, 3, 16, 32))


if __name__ == '__main__':
  absltest.main()
