"""Which tensors fill which weights."""

import dataclasses
import math

from absl.testing import absltest, parameterized

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import params as params_lib
from bevy_jax.layers import tensors

CONFIGS = {
  'mixtral': config_lib.tiny(family='mixtral', qk_norm=None, tied=False),
  'qwen3_moe': config_lib.tiny(out_bias=True, qkv_bias=True),
  'olmoe': config_lib.tiny(family='olmoe', qk_norm='full', tied=False),
  'qwen2_moe': config_lib.tiny(
    family='qwen2_moe',
    qk_norm=None,
    qkv_bias=True,
    moe_layers=(True, False, True, False),
    dense_dim=24,
    shared_dim=20,
    shared_gate=True,
  ),
}


def names_of(plan: tensors.Plan) -> set[str]:
  return {piece.name for piece in plan.pieces()}


class TensorsTest(parameterized.TestCase):
  @parameterized.named_parameters((f, f) for f in CONFIGS)
  def test_pieces_cover_each_leaf_and_lie_in_their_tensors(self, family):
    config = CONFIGS[family]
    plan = tensors.plan(config, ())
    shapes = tensors.flat_shapes(config)
    self.assertEqual(set(plan.shared), set(shapes))
    leaves = [(shapes[path], leaf) for path, leaf in plan.shared.items()]
    leaves += [(config.expert_shape, leaf) for leaf in plan.experts]
    for shape, leaf in leaves:
      part = shape if len(leaf) == 1 else shape[1:]
      self.assertEqual(len(leaf), shape[0] if len(leaf) > 1 else 1)
      for piece in leaf:
        filled = piece.shape[::-1] if piece.transpose else piece.shape
        self.assertEqual(filled, part, piece)
        end = piece.start + math.prod(piece.shape)
        self.assertLessEqual(end, math.prod(piece.tensor))

  def test_names_of_mixtral_as_released(self):
    found = names_of(tensors.plan(CONFIGS['mixtral'], ()))
    layer = 'model.layers.3.block_sparse_moe.'
    self.assertContainsSubset(
      {'lm_head.weight', layer + 'gate.weight', layer + 'experts.7.w2.weight'},
      found,
    )
    self.assertLen(found, 3 + 4 * (6 + 1 + 8 * 3))

  def test_gate_up_and_down_are_not_swapped(self):
    for family, ends in (
      ('mixtral', ('w1', 'w3', 'w2')),
      ('olmoe', ('gate_proj', 'up_proj', 'down_proj')),
    ):
      leaf = tensors.expert_pieces(CONFIGS[family], 2, 5)[0]
      got = tuple(piece.name.split('.')[-2] for piece in leaf)
      self.assertEqual(got, ends)
      self.assertEqual([p.transpose for p in leaf], [False, False, True])

  def test_only_moe_layers_have_experts_and_keys_count_them(self):
    config = CONFIGS['qwen2_moe']
    plan = tensors.plan(config, ())
    self.assertLen(plan.experts, 2 * 8)
    self.assertStartsWith(plan.experts[8][0].name, 'model.layers.2.mlp.')
    self.assertIn('layers.1.dense_in', plan.shared)
    self.assertIn('layers.2.shared_gate', plan.shared)

  def test_fused_experts_are_chosen_where_the_file_has_them(self):
    config = CONFIGS['qwen3_moe']
    prefix = 'model.layers.1.mlp.experts.'
    fused = {prefix + 'gate_up_proj', prefix + 'down_proj'}
    plan = tensors.plan(config, fused)
    gate, up, down = plan.experts[8 + 3]
    f, d = config.expert_dim, config.model_dim
    self.assertEqual({gate.name, up.name, down.name}, fused)
    self.assertEqual(gate.start, 3 * 2 * f * d)
    self.assertEqual(up.start, (3 * 2 + 1) * f * d)
    self.assertEqual(down.start, 3 * d * f)
    # The other layers keep the name that the error should give.
    self.assertEndsWith(plan.experts[0][0].name, 'experts.0.gate_proj.weight')

  def test_a_nearly_complete_alternative_names_what_it_lacks(self):
    config = CONFIGS['mixtral']
    prefix = 'model.layers.0.mlp.experts.0.'
    plan = tensors.plan(config, {prefix + 'w1.weight', prefix + 'w3.weight'})
    self.assertEqual(plan.experts[0][2].name, prefix + 'w2.weight')

  def test_a_router_of_mixtral_under_its_newer_name(self):
    name = 'model.layers.0.mlp.gate.weight'
    plan = tensors.plan(CONFIGS['mixtral'], {name})
    self.assertEqual(plan.shared['layers.0.router'][0].name, name)

  def test_a_head_may_lie_unused_only_where_it_is_tied(self):
    tied = CONFIGS['qwen3_moe']
    free = dataclasses.replace(tied, tied=False)
    self.assertTrue(tensors.ignorable(tied, 'lm_head.weight'))
    self.assertFalse(tensors.ignorable(free, 'lm_head.weight'))
    self.assertNotIn('lm_head.weight', names_of(tensors.plan(tied, ())))
    self.assertIn('lm_head.weight', names_of(tensors.plan(free, ())))
    buffer = 'model.layers.0.self_attn.rotary_emb.inv_freq'
    self.assertTrue(tensors.ignorable(free, buffer))
    self.assertFalse(tensors.ignorable(free, 'model.layers.9.mlp.gate.weight'))

  def test_unflatten_builds_the_tree_of_the_params(self):
    config = CONFIGS['qwen2_moe']
    tree = tensors.unflatten(config, tensors.flat_shapes(config))
    self.assertEqual(tree, params_lib.shapes(config))


if __name__ == '__main__':
  absltest.main()
