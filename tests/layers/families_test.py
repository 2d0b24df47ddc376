"""Hugging Face configs map to ours; what is not supported is named."""

import json
import pathlib

from absl.testing import absltest, parameterized

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import families

GOLDEN = pathlib.Path(__file__).parent.parent / 'golden'

SIZES = {
  'vocab_size': 100,
  'hidden_size': 32,
  'num_hidden_layers': 4,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'num_experts_per_tok': 2,
  'max_position_embeddings': 64,
}

# As the releases of these models keep them, with small numbers.
MIXTRAL = SIZES | {
  'architectures': ['MixtralForCausalLM'],
  'model_type': 'mixtral',
  'attention_dropout': 0.0,
  'bos_token_id': 1,
  'eos_token_id': 2,
  'hidden_act': 'silu',
  'initializer_range': 0.02,
  'intermediate_size': 48,
  'num_local_experts': 8,
  'output_router_logits': False,
  'rms_norm_eps': 1e-05,
  'rope_theta': 1000000.0,
  'router_aux_loss_coef': 0.02,
  'sliding_window': None,
  'tie_word_embeddings': False,
  'torch_dtype': 'bfloat16',
  'transformers_version': '4.36.0.dev0',
  'use_cache': True,
}
QWEN3 = SIZES | {
  'architectures': ['Qwen3MoeForCausalLM'],
  'model_type': 'qwen3_moe',
  'attention_bias': False,
  'decoder_sparse_step': 1,
  'eos_token_id': 45,
  'head_dim': 16,
  'hidden_act': 'silu',
  'intermediate_size': 96,
  'max_window_layers': 4,
  'mlp_only_layers': [],
  'moe_intermediate_size': 24,
  'norm_topk_prob': True,
  'num_experts': 8,
  'rms_norm_eps': 1e-06,
  'rope_scaling': None,
  'rope_theta': 1000000.0,
  'sliding_window': None,
  'use_sliding_window': False,
}
OLMOE = SIZES | {
  'architectures': ['OlmoeForCausalLM'],
  'model_type': 'olmoe',
  'attention_bias': False,
  'clip_qkv': None,
  'intermediate_size': 24,
  'norm_topk_prob': False,
  'num_experts': 8,
  'pad_token_id': 1,
  'rope_scaling': None,
  'rope_theta': 10000.0,
}
QWEN2 = SIZES | {
  'architectures': ['Qwen2MoeForCausalLM'],
  'model_type': 'qwen2_moe',
  'decoder_sparse_step': 1,
  'intermediate_size': 96,
  'max_window_layers': 21,
  'moe_intermediate_size': 24,
  'norm_topk_prob': False,
  'num_experts': 8,
  'rope_theta': 1000000.0,
  'shared_expert_intermediate_size': 40,
  'sliding_window': 32,
  'use_sliding_window': False,
}
ALL = (MIXTRAL, QWEN3, OLMOE, QWEN2)


class MappingTest(parameterized.TestCase):
  def test_mixtral(self):
    expected = config_lib.ModelConfig(
      family='mixtral',
      vocab_size=100,
      num_layers=4,
      model_dim=32,
      num_heads=4,
      num_kv_heads=2,
      head_dim=8,
      num_experts=8,
      top_k=2,
      expert_dim=48,
      moe_layers=(True,) * 4,
      norm_topk=True,
      norm_eps=1e-5,
      rope=config_lib.RopeConfig(theta=1e6),
      context=64,
      eos_ids=(2,),
    )
    self.assertEqual(families.from_hf(MIXTRAL), expected)

  def test_qwen3_moe(self):
    expected = config_lib.ModelConfig(
      family='qwen3_moe',
      vocab_size=100,
      num_layers=4,
      model_dim=32,
      num_heads=4,
      num_kv_heads=2,
      head_dim=16,
      num_experts=8,
      top_k=2,
      expert_dim=24,
      moe_layers=(True,) * 4,
      norm_topk=True,
      qk_norm='head',
      norm_eps=1e-6,
      rope=config_lib.RopeConfig(theta=1e6),
      context=64,
      eos_ids=(45,),
    )
    self.assertEqual(families.from_hf(QWEN3), expected)

  def test_olmoe(self):
    c = families.from_hf(OLMOE | {'clip_qkv': 8.0})
    self.assertEqual(c.family, 'olmoe')
    self.assertEqual((c.qk_norm, c.clip_qkv), ('full', 8.0))
    self.assertEqual((c.expert_dim, c.norm_eps), (24, 1e-5))
    self.assertFalse(c.norm_topk or c.qkv_bias or c.out_bias or c.shared_dim)
    # The default end token, 50279, is beyond this vocabulary.
    self.assertEqual(c.eos_ids, ())

  def test_qwen2_moe(self):
    c = families.from_hf(QWEN2)
    self.assertEqual(c.family, 'qwen2_moe')
    self.assertEqual((c.shared_dim, c.shared_gate), (40, True))
    self.assertEqual((c.qkv_bias, c.out_bias), (True, False))
    self.assertEqual((c.expert_dim, c.qk_norm, c.windows), (24, None, ()))
    self.assertFalse(families.from_hf(QWEN2 | {'qkv_bias': False}).qkv_bias)

  def test_attention_bias_is_on_all_four_projections(self):
    for base in (QWEN3, OLMOE):
      c = families.from_hf(base | {'attention_bias': True})
      self.assertTrue(c.qkv_bias and c.out_bias)

  def test_dense_layers(self):
    for base in (QWEN3, QWEN2):
      c = families.from_hf(base)
      self.assertEqual((c.moe_ids, c.dense_dim), ((0, 1, 2, 3), 0))
      c = families.from_hf(base | {'decoder_sparse_step': 2})
      self.assertEqual((c.moe_ids, c.dense_dim), ((1, 3), 96))
      both = {'decoder_sparse_step': 2, 'mlp_only_layers': [1]}
      self.assertEqual(families.from_hf(base | both).moe_ids, (3,))

  def test_defaults_are_those_of_transformers(self):
    names = ('max_position_embeddings', 'num_key_value_heads', 'rope_theta')
    expected = {
      'mixtral': (131072, 8, 1e6),
      'qwen3_moe': (32768, 4, 1e4),
      'olmoe': (4096, 32, 1e4),
      'qwen2_moe': (32768, 16, 1e4),
    }
    for base in ALL:
      less = {k: v for k, v in base.items() if k not in names}
      less |= {'num_attention_heads': 32, 'hidden_size': 256, 'head_dim': 8}
      c = families.from_hf(less)
      seen = (c.context, c.num_kv_heads, c.rope.theta)
      self.assertEqual(seen, expected[c.family], c.family)

  def test_model_type_stands_in_for_architectures(self):
    for base in ALL:
      less = {k: v for k, v in base.items() if k != 'architectures'}
      self.assertEqual(families.from_hf(less), families.from_hf(base))

  def test_both_names_of_the_number_of_experts(self):
    for base in ALL:
      renamed = dict(base)
      number = renamed.pop('num_experts', None)
      number = renamed.pop('num_local_experts', number)
      for name in ('num_experts', 'num_local_experts'):
        c = families.from_hf(renamed | {name: number})
        self.assertEqual(c.num_experts, 8)

  def test_harmless_fields_change_nothing(self):
    harmless = {
      '_name_or_path': 'somewhere',
      'attention_dropout': 0.1,
      'router_aux_loss_coef': 0.5,
      'output_router_logits': True,
      'use_cache': False,
      'temperature': 0.7,
      'quantization_config': None,
      'hidden_act': 'swish',
    }
    for base in ALL:
      self.assertEqual(
        families.from_hf(base | harmless), families.from_hf(base)
      )

  @parameterized.parameters(
    (None, None, ()),
    (2, None, (2,)),
    ([7, 2], {'eos_token_id': 9}, (2, 7, 9)),
    (2, {'eos_token_id': [2, 5]}, (2, 5)),
    (None, {'temperature': 1.0}, ()),
    (-1, {'eos_token_id': [3, 100]}, (3,)),
  )
  def test_end_tokens(self, ids, generation, expected):
    c = families.from_hf(QWEN3 | {'eos_token_id': ids}, generation)
    self.assertEqual(c.eos_ids, expected)

  def test_golden_configs_of_transformers_are_read(self):
    seen = {
      families.from_hf(json.loads(file.read_text())).family
      for file in sorted(GOLDEN.glob('*/config.json'))
    }
    self.assertEqual(seen, {'mixtral', 'qwen3_moe', 'olmoe', 'qwen2_moe'})


class WindowTest(parameterized.TestCase):
  def test_mixtral_has_it_everywhere(self):
    c = families.from_hf(MIXTRAL | {'sliding_window': 9})
    self.assertEqual(c.windows, (9, 9, 9, 9))

  def test_qwen3_moe_has_it_everywhere(self):
    on = {'use_sliding_window': True, 'sliding_window': 9}
    less = {k: v for k, v in QWEN3.items() if k != 'max_window_layers'}
    self.assertEqual(families.from_hf(less | on).windows, (9, 9, 9, 9))

  def test_qwen2_moe_has_it_on_every_other_of_the_first_layers(self):
    on = QWEN2 | {'use_sliding_window': True}
    self.assertEqual(families.from_hf(on).windows, (32, 0, 32, 0))
    few = on | {'max_window_layers': 2}
    self.assertEqual(families.from_hf(few).windows, (32, 0, 0, 0))

  def test_layer_types_say_it_exactly(self):
    kinds = ['full_attention', *['sliding_attention'] * 3]
    on = {'use_sliding_window': True, 'layer_types': kinds}
    self.assertEqual(families.from_hf(QWEN2 | on).windows, (0, 32, 32, 32))

  def test_off(self):
    for base in (QWEN3, QWEN2):
      off = base | {'sliding_window': 9, 'use_sliding_window': False}
      self.assertEqual(families.from_hf(off).windows, ())


class RopeTest(parameterized.TestCase):
  @parameterized.parameters('type', 'rope_type')
  def test_old_and_new_places(self, name):
    old = {'rope_theta': 5e5, 'rope_scaling': {name: 'linear', 'factor': 4.0}}
    new = {
      'rope_parameters': {name: 'linear', 'factor': 4.0, 'rope_theta': 5e5}
    }
    expected = config_lib.RopeConfig(kind='linear', theta=5e5, factor=4.0)
    less = {k: v for k, v in QWEN3.items() if not k.startswith('rope')}
    self.assertEqual(families.from_hf(less | old).rope, expected)
    self.assertEqual(families.from_hf(less | new).rope, expected)

  def test_llama3(self):
    scaling = {
      'rope_type': 'llama3',
      'factor': 8,
      'low_freq_factor': 1,
      'high_freq_factor': 2,
      'original_max_position_embeddings': 16,
    }
    expected = config_lib.RopeConfig(
      kind='llama3',
      theta=1e6,
      factor=8.0,
      original_context=16,
      low_freq_factor=1.0,
      high_freq_factor=2.0,
    )
    rope = families.from_hf(QWEN3 | {'rope_scaling': scaling}).rope
    self.assertEqual(rope, expected)

  def test_yarn_with_every_option(self):
    scaling = {
      'type': 'yarn',
      'factor': 4.0,
      'original_max_position_embeddings': 32,
      'beta_fast': 16,
      'beta_slow': 2,
      'attention_factor': 1.5,
      'mscale': 0.7,
      'mscale_all_dim': 0.6,
      'truncate': False,
    }
    expected = config_lib.RopeConfig(
      kind='yarn',
      theta=1e6,
      factor=4.0,
      original_context=32,
      beta_fast=16.0,
      beta_slow=2.0,
      attention_factor=1.5,
      mscale=0.7,
      mscale_all_dim=0.6,
      truncate=False,
    )
    rope = families.from_hf(QWEN3 | {'rope_scaling': scaling}).rope
    self.assertEqual(rope, expected)

  def test_original_context_from_three_places(self):
    bare = {'rope_type': 'yarn', 'factor': 2.0}
    rope = families.from_hf(QWEN3 | {'rope_scaling': bare}).rope
    self.assertEqual(rope.original_context, 64)
    inside = bare | {'original_max_position_embeddings': 32}
    rope = families.from_hf(QWEN3 | {'rope_scaling': inside}).rope
    self.assertEqual(rope.original_context, 32)
    outside = {'original_max_position_embeddings': 16, 'rope_scaling': inside}
    rope = families.from_hf(QWEN3 | outside).rope
    self.assertEqual(rope.original_context, 16)

  def test_yarn_factor_null_is_the_ratio_of_contexts(self):
    scaling = {
      'rope_type': 'yarn',
      'factor': None,
      'original_max_position_embeddings': 16,
    }
    rope = families.from_hf(QWEN3 | {'rope_scaling': scaling}).rope
    self.assertEqual(rope.factor, 4.0)

  @parameterized.parameters(
    ({'rope_type': 'longrope', 'factor': 2.0}, 'longrope'),
    ({'rope_type': 'dynamic', 'factor': 2.0}, 'dynamic'),
    ({'type': 'mrope', 'mrope_section': [1]}, 'mrope'),
    ({'rope_type': 'linear'}, 'factor'),
    ({'rope_type': 'linear', 'factor': -1.0}, 'factor'),
    ({'rope_type': 'linear', 'factor': '2'}, 'factor'),
    ({'rope_type': 'llama3', 'factor': 2.0}, 'low_freq_factor'),
    ({'rope_type': 'default', 'partial_rotary_factor': 0.5}, 'partial_rotary'),
    ({'rope_type': 'default', 'sections': 2}, 'sections'),
    ({'rope_theta': 'big'}, 'rope_theta'),
    ({'full_attention': {'rope_type': 'default'}}, 'full_attention'),
    ('yarn', 'rope_scaling'),
  )
  def test_refused(self, scaling, named):
    with self.assertRaisesRegex(ValueError, named):
      families.from_hf(QWEN3 | {'rope_scaling': scaling})


class RefusedTest(parameterized.TestCase):
  @parameterized.parameters(
    (MIXTRAL, {'architectures': ['LlamaForCausalLM']}, 'LlamaForCausalLM'),
    (MIXTRAL, {'architectures': ['MixtralModel']}, 'MixtralModel'),
    (MIXTRAL, {'architectures': ['GptOssForCausalLM']}, 'GptOssForCausalLM'),
    (MIXTRAL, {'model_type': 'olmoe'}, 'olmoe'),
    (MIXTRAL, {'hidden_act': 'gelu'}, 'hidden_act.*gelu'),
    (MIXTRAL, {'attention_bias': True}, 'attention_bias'),
    (MIXTRAL, {'sliding_window': 0}, 'sliding_window'),
    (MIXTRAL, {'num_experts': 9}, 'num_experts'),
    (QWEN3, {'partial_rotary_factor': 0.5}, 'partial_rotary_factor'),
    (QWEN3, {'quantization_config': {'bits': 4}}, 'quantization_config'),
    (QWEN3, {'attention_sinks': 4}, 'attention_sinks'),
    (QWEN3, {'per_layer_config': {'0': {}}}, 'per_layer_config'),
    (QWEN3, {'clip_qkv': 8.0}, 'clip_qkv'),
    (QWEN3, {'shared_expert_intermediate_size': 8}, 'shared_expert'),
    (QWEN3, {'num_key_value_heads': 3}, 'num_key_value_heads'),
    (QWEN3, {'head_dim': 15}, 'head_dim'),
    (QWEN3, {'num_experts_per_tok': 9}, 'num_experts_per_tok'),
    (QWEN3, {'hidden_size': '32'}, 'hidden_size'),
    (QWEN3, {'norm_topk_prob': 1}, 'norm_topk_prob'),
    (QWEN3, {'rms_norm_eps': None}, 'rms_norm_eps'),
    (QWEN3, {'eos_token_id': ['end']}, 'eos_token_id'),
    (QWEN3, {'decoder_sparse_step': 0}, 'decoder_sparse_step'),
    (QWEN3, {'mlp_only_layers': [0, 1, 2, 3]}, 'mlp_only_layers'),
    (QWEN3, {'mlp_only_layers': 1}, 'mlp_only_layers'),
    (
      QWEN3,
      {'use_sliding_window': True, 'sliding_window': 9},
      'max_window_layers',
    ),
    (OLMOE, {'sliding_window': 9}, 'sliding_window'),
    (OLMOE, {'head_dim': 16}, 'head_dim'),
    (OLMOE, {'clip_qkv': 0}, 'clip_qkv'),
    (QWEN2, {'attention_bias': True}, 'attention_bias'),
    (QWEN2, {'layer_types': ['sliding_attention'] * 4}, 'layer_types'),
    (QWEN2, {'layer_types': ['full_attention']}, 'layer_types'),
    (QWEN2, {'layer_types': ['linear_attention'] * 4}, 'layer_types'),
    (QWEN2, {'shared_expert_intermediate_size': 0}, 'shared_expert'),
  )
  def test_the_field_is_named(self, base, change, named):
    families.from_hf(base)
    with self.assertRaisesRegex(ValueError, named):
      families.from_hf(base | change)

  def test_missing_fields_are_named_together(self):
    less = dict(QWEN3)
    del less['hidden_size'], less['moe_intermediate_size']
    with self.assertRaisesRegex(
      ValueError, 'hidden_size, moe_intermediate_size'
    ):
      families.from_hf(less)

  def test_missing_number_of_experts(self):
    less = {k: v for k, v in QWEN3.items() if k != 'num_experts'}
    with self.assertRaisesRegex(ValueError, 'num_experts'):
      families.from_hf(less)

  def test_dense_layers_need_their_width(self):
    less = {k: v for k, v in QWEN3.items() if k != 'intermediate_size'}
    families.from_hf(less)
    with self.assertRaisesRegex(ValueError, 'intermediate_size'):
      families.from_hf(less | {'decoder_sparse_step': 2})


if __name__ == '__main__':
  absltest.main()
