"""The tiny checkpoints of tests/golden/, and what each flag must change."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers

Model = transformers.PreTrainedModel
Turn = Callable[[Model], Model]
Off = dict[str, dict[str, Any] | Turn]


@dataclasses.dataclass(frozen=True)
class Case:
  """One checkpoint.

  Attributes:
    family: prefix of the transformers classes.
    config: fields over those of `_base`.
    off: what to turn off, one by one, to see that each changes the logits;
      a dict of config fields or a function of a model's copy.
    dtype: type of the stored weights; the maths is float32 in any case.
    fused: whether the experts of a layer are one tensor on disk.
  """

  family: str
  config: dict[str, Any]
  off: Off
  dtype: torch.dtype = torch.bfloat16
  fused: bool = False


def _linear(**more: Any) -> dict[str, Any]:
  return {'rope_type': 'linear', 'factor': 3.0, 'rope_theta': 1e4, **more}


def _llama3(**more: Any) -> dict[str, Any]:
  scaling = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
  kind = {'rope_type': 'llama3', 'factor': 4.0, 'rope_theta': 5e3}
  original = {'original_max_position_embeddings': 16}
  return {**kind, **scaling, **original, **more}


def _yarn(**more: Any) -> dict[str, Any]:
  kind = {'rope_type': 'yarn', 'factor': 4.0, 'rope_theta': 1e3}
  return {**kind, 'original_max_position_embeddings': 32, **more}


def _ramp(**more: Any) -> dict[str, Any]:
  """A yarn whose ramp's ends are not integers."""
  ends = {'beta_fast': 1.0, 'beta_slow': 0.3, 'attention_factor': 1.4}
  return _yarn(**{**ends, **more})


def _without(**modules: torch.nn.Module) -> Turn:
  """A model whose submodules of these names are replaced."""

  def turn(model: Model) -> Model:
    for parent in list(model.modules()):
      for name, module in modules.items():
        if hasattr(parent, name):
          setattr(parent, name, module)
    return model

  return turn


class _Open(torch.nn.Module):
  """In place of the shared expert's gate: always open."""

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    return torch.full((*x.shape[:-1], 1), 1e4)


def _no_qk_norm(model: Model) -> Model:
  one = torch.nn.Identity()
  return _without(q_norm=one, k_norm=one)(model)


def _norm_each_head(model: Model) -> Model:
  """The 'full' norm taken over each head instead, as 'head' would."""

  class PerHead(torch.nn.Module):
    def __init__(self, norm: Any):
      super().__init__()
      self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
      heads = x.unflatten(-1, (-1, 8))
      scale = heads.pow(2).mean(-1, keepdim=True) + self.norm.variance_epsilon
      return (heads * scale.rsqrt()).flatten(-2) * self.norm.weight

  for layer in model.model.layers:
    layer.self_attn.q_norm = PerHead(layer.self_attn.q_norm)
    layer.self_attn.k_norm = PerHead(layer.self_attn.k_norm)
  return model


DEFAULT = {'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e4}}
ROPE: Off = {'rope kind': DEFAULT}
NORM_ON: Off = {'norm': {'norm_topk_prob': False}}
NORM_OFF: Off = {'norm': {'norm_topk_prob': True}}
THETA: Off = {
  'theta': {'rope_parameters': {'rope_type': 'default', 'rope_theta': 100.0}}
}
QK: Off = {'qk_norm': _no_qk_norm}
FULL: Off = QK | {'over heads': _norm_each_head}
SHARED: Off = {
  'shared gate': _without(shared_expert_gate=_Open()),
}
BIAS: Off = {'bias': {'attention_bias': False}}

CASES: dict[str, Case] = {
  'mixtral_default': Case(
    'Mixtral',
    {'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e6}},
    THETA,
    torch.float32,
  ),
  'mixtral_linear_window_fused': Case(
    'Mixtral',
    {'rope_parameters': _linear(), 'sliding_window': 7, 'head_dim': 16},
    ROPE | {'window': {'sliding_window': None}},
    fused=True,
  ),
  'mixtral_llama3_tied': Case(
    'Mixtral',
    {
      'rope_parameters': _llama3(),
      'num_key_value_heads': 1,
      'tie_word_embeddings': True,
    },
    ROPE,
  ),
  'mixtral_yarn': Case(
    'Mixtral',
    # Without head_dim transformers' own yarn fails on this family.
    {'rope_parameters': _yarn(), 'num_key_value_heads': 4, 'head_dim': 8},
    ROPE,
  ),
  'qwen3_moe_default_tied': Case(
    'Qwen3Moe',
    {'head_dim': 16, 'norm_topk_prob': True, 'tie_word_embeddings': True},
    THETA | QK | NORM_ON,
    torch.float32,
  ),
  'qwen3_moe_linear_bias': Case(
    'Qwen3Moe',
    {
      'rope_parameters': _linear(),
      'attention_bias': True,
      'num_key_value_heads': 4,
    },
    ROPE | QK | NORM_OFF | BIAS,
    torch.float16,
  ),
  'qwen3_moe_llama3_window_fused': Case(
    'Qwen3Moe',
    {
      'rope_parameters': _llama3(),
      'use_sliding_window': True,
      'sliding_window': 6,
      'num_key_value_heads': 1,
      'norm_topk_prob': True,
    },
    ROPE | QK | NORM_ON | {'window': {'use_sliding_window': False}},
    fused=True,
  ),
  'qwen3_moe_yarn_step': Case(
    'Qwen3Moe',
    {
      'rope_parameters': _yarn(mscale=1.3, mscale_all_dim=0.4),
      'num_hidden_layers': 4,
      'decoder_sparse_step': 2,
      'norm_topk_prob': True,
    },
    ROPE
    | {
      'mscale': {'rope_parameters': _yarn()},
      'step': {'decoder_sparse_step': 1},
    },
  ),
  'qwen3_moe_mlp_only': Case(
    'Qwen3Moe',
    {'num_hidden_layers': 3, 'mlp_only_layers': [1], 'norm_topk_prob': True},
    {'mlp_only': {'mlp_only_layers': []}},
  ),
  'olmoe_default': Case('Olmoe', {}, THETA | FULL | NORM_OFF, torch.float32),
  'olmoe_linear_clip_fused': Case(
    'Olmoe',
    {'rope_parameters': _linear(), 'clip_qkv': 0.8, 'norm_topk_prob': True},
    ROPE | FULL | NORM_ON | {'clip': {'clip_qkv': None}},
    fused=True,
  ),
  'olmoe_llama3_bias_tied': Case(
    'Olmoe',
    {
      'rope_parameters': _llama3(),
      'attention_bias': True,
      'num_key_value_heads': 1,
      'tie_word_embeddings': True,
    },
    ROPE | FULL | BIAS,
  ),
  'olmoe_yarn': Case(
    'Olmoe',
    {'rope_parameters': _ramp(truncate=False), 'num_key_value_heads': 2},
    ROPE
    | {
      'attention_factor': {
        'rope_parameters': _ramp(truncate=False, attention_factor=None)
      },
      'truncate': {'rope_parameters': _ramp()},
    },
  ),
  'qwen2_moe_default': Case(
    'Qwen2Moe',
    {},
    THETA | NORM_OFF | SHARED | {'bias': {'qkv_bias': False}},
    torch.float32,
  ),
  'qwen2_moe_linear_window_fused': Case(
    'Qwen2Moe',
    {
      'rope_parameters': _linear(),
      'use_sliding_window': True,
      'sliding_window': 5,
      'max_window_layers': 2,
      'num_hidden_layers': 3,
      'norm_topk_prob': True,
    },
    ROPE
    | NORM_ON
    | SHARED
    | {
      'window': {'use_sliding_window': False},
      'which layers': {'max_window_layers': 3},
    },
    fused=True,
  ),
  'qwen2_moe_llama3_step_tied': Case(
    'Qwen2Moe',
    {
      'rope_parameters': _llama3(),
      'qkv_bias': False,
      'num_key_value_heads': 1,
      'decoder_sparse_step': 2,
      'num_hidden_layers': 4,
      'tie_word_embeddings': True,
    },
    ROPE | SHARED | {'step': {'decoder_sparse_step': 1}},
  ),
  'qwen2_moe_yarn_mlp_only': Case(
    'Qwen2Moe',
    {
      'rope_parameters': _yarn(beta_fast=4.0, beta_slow=0.5),
      'mlp_only_layers': [1],
      'num_hidden_layers': 3,
      'num_key_value_heads': 4,
      'use_sliding_window': True,
      'sliding_window': 6,
      'layer_types': ['full_attention', *['sliding_attention'] * 2],
    },
    ROPE
    | {
      'betas': {'rope_parameters': _yarn()},
      'mlp_only': {'mlp_only_layers': []},
      'layer types': {'layer_types': ['full_attention'] * 3},
    },
  ),
}
