"""Hugging Face configs of the supported families, mapped to ModelConfig.

What a field means, and what it is when absent, follows the classes of
transformers 5, which define what the checkpoints mean. The fields themselves
are listed in hf_fields.py.
"""

import dataclasses
from typing import Any

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import hf_fields as fields

# Kind -> fields it cannot do without.
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
  'default': (),
  'linear': ('factor',),
  'llama3': ('factor', 'low_freq_factor', 'high_freq_factor'),
  'yarn': ('factor',),
}

# Fields of any kind; those that a kind does not read change nothing.
_ROPE_OPTIONS = frozenset(
  'rope_type type rope_theta partial_rotary_factor factor '
  'original_max_position_embeddings attention_factor beta_fast beta_slow '
  'low_freq_factor high_freq_factor mscale mscale_all_dim truncate'.split()
)


def from_hf(
  config: fields.Json, generation: fields.Json | None = None
) -> config_lib.ModelConfig:
  """The ModelConfig of a parsed `config.json` (and `generation_config.json`).

  Args:
    config: config of any 4.x or 5.x transformers.
    generation: generation config, whose end tokens are added to config's.

  Raises:
    ValueError: an unknown architecture, a missing or ill-typed field, a field
      that would change the result and is not supported, or one that is not
      known at all; the message names it.
  """
  family = fields.family_of(config)
  fields.refuse(config, family)
  c = fields.Reader(config, family)
  layers = c.size('num_hidden_layers')
  moe_layers = _moe_layers(c, layers)
  heads, width = c.size('num_attention_heads'), c.size('hidden_size')
  context = c.size('max_position_embeddings')
  built = config_lib.ModelConfig(
    family=family.name,
    vocab_size=c.size('vocab_size'),
    num_layers=layers,
    model_dim=width,
    num_heads=heads,
    num_kv_heads=c.size('num_key_value_heads', absent=heads),
    head_dim=c.size('head_dim', absent=width // heads),
    num_experts=_num_experts(config),
    top_k=c.size('num_experts_per_tok'),
    expert_dim=c.size(family.experts_dim),
    moe_layers=moe_layers,
    dense_dim=0 if all(moe_layers) else c.size('intermediate_size'),
    norm_topk=family.name == 'mixtral' or c.flag('norm_topk_prob'),
    qk_norm={'qwen3_moe': 'head', 'olmoe': 'full'}.get(family.name),
    qkv_bias=c.flag('qkv_bias') or c.flag('attention_bias'),
    out_bias=c.flag('attention_bias'),
    clip_qkv=c.positive('clip_qkv'),
    windows=_windows(c, layers),
    norm_eps=c.number('rms_norm_eps'),
    rope=_rope(config, family.theta, context),
    tied=c.flag('tie_word_embeddings'),
    context=context,
    **_shared_expert(c),
  )
  _check(built)
  eos_ids = _eos_ids(c.get('eos_token_id'), generation, built.vocab_size)
  return dataclasses.replace(built, eos_ids=eos_ids)


def _num_experts(config: fields.Json) -> int:
  # Older and newer versions write either name for the same thing.
  names = ('num_experts', 'num_local_experts')
  seen = {n: config[n] for n in names if config.get(n) is not None}
  if not seen:
    raise ValueError('config.json lacks num_experts (or num_local_experts).')
  name, value = next(iter(seen.items()))
  if type(value) is not int or value < 1 or len(set(seen.values())) > 1:
    raise fields.bad(name, seen, 'one integer of at least 1 in both places')
  return value


def _moe_layers(c: fields.Reader, layers: int) -> tuple[bool, ...]:
  if 'decoder_sparse_step' not in c.family.defaults:
    return (True,) * layers
  step = c.size('decoder_sparse_step')
  only = c.get('mlp_only_layers') or ()
  if not isinstance(only, list | tuple) or {type(i) for i in only} - {int}:
    raise fields.bad('mlp_only_layers', only, 'a list of layer numbers')
  flags = tuple(i not in only and (i + 1) % step == 0 for i in range(layers))
  if not any(flags):
    raise fields.bad(
      'decoder_sparse_step and mlp_only_layers',
      (step, only),
      f'at least one of the {layers} layers with experts',
    )
  return flags


def _windows(c: fields.Reader, layers: int) -> tuple[int, ...]:
  """One window a layer; empty where all layers attend to everything."""
  given = c.get('sliding_window') is not None
  if 'use_sliding_window' not in c.family.defaults:
    return (c.size('sliding_window'),) * layers if given else ()
  on = given and c.flag('use_sliding_window')
  slides = _sliding_layers(c, layers, on)
  if not any(slides):
    return ()
  if not on:
    kinds = c.get('layer_types')
    raise fields.bad('layer_types', kinds, 'full_attention without a window')
  return tuple(c.size('sliding_window') * slide for slide in slides)


def _sliding_layers(c: fields.Reader, layers: int, on: bool) -> list[bool]:
  """Which layers of a Qwen have a window; `on` is use_sliding_window."""
  kinds, last = c.get('layer_types'), c.get('max_window_layers')
  if type(last) is not int:
    raise fields.bad('max_window_layers', last, 'an integer')
  slides = [on] * layers
  if kinds is not None:
    allowed = ('full_attention', 'sliding_attention')
    if len(kinds) != layers or any(kind not in allowed for kind in kinds):
      raise fields.bad('layer_types', kinds, f'{layers} values of {allowed}')
    slides = [kind == 'sliding_attention' for kind in kinds]
  elif c.family.name == 'qwen2_moe':
    # Every other layer: what transformers says where layer_types is absent.
    slides = [on and i % 2 == 0 and i < last for i in range(layers)]
  if c.family.name == 'qwen3_moe' and on:
    # Releases differ in which layers these exempt, so neither may exempt any.
    if last:
      raise fields.bad('max_window_layers', last, '0 or no field')
    if not all(slides):
      raise fields.bad('layer_types', kinds, 'sliding_attention alone')
  return slides


def _shared_expert(c: fields.Reader) -> dict[str, Any]:
  if c.family.name != 'qwen2_moe':
    return {}
  size = c.size('shared_expert_intermediate_size')
  return {'shared_dim': size, 'shared_gate': True}


def _rope(
  config: fields.Json, theta: float, context: int
) -> config_lib.RopeConfig:
  # The older rope_scaling wins where both stand, as in transformers.
  place = 'rope_scaling' if config.get('rope_scaling') else 'rope_parameters'
  seen = config.get(place) or {}
  if not isinstance(seen, dict):
    raise fields.bad(place, seen, 'an object')
  kind = seen.get('rope_type', seen.get('type', 'default'))
  if kind not in _ROPE_NEEDS:
    known = ', '.join(_ROPE_NEEDS)
    raise fields.bad(f'{place}.rope_type', kind, f'one of {known}')
  for name in sorted(set(seen) - _ROPE_OPTIONS):
    raise fields.bad(f'{place}.{name}', seen[name], 'no such field')
  if seen.get('partial_rotary_factor') not in (None, 1):
    partial = seen['partial_rotary_factor']
    raise fields.bad(f'{place}.partial_rotary_factor', partial, '1')
  for name in _ROPE_NEEDS[kind]:
    if name not in seen:
      raise fields.bad(f'{place}.{name}', None, f'a number, for {kind} rope')
  # Wherever the theta stands; the object's own comes first.
  numbers = {'rope_theta': config.get('rope_theta')} | {
    name: value
    for name, value in seen.items()
    if value is not None and name not in ('rope_type', 'type')
  }
  for name, value in numbers.items():
    allowed = (bool,) if name == 'truncate' else (int, float)
    if value is not None and type(value) not in allowed:
      raise fields.bad(f'{place}.{name}', value, f'a {allowed[-1].__name__}')
  rope = config_lib.RopeConfig(
    kind=kind, theta=float(numbers['rope_theta'] or theta)
  )
  if kind == 'default':
    return rope
  original = config.get('original_max_position_embeddings')
  original = original or numbers.get('original_max_position_embeddings')
  return _scaled(rope, numbers, original or context, context)


def _scaled(
  rope: config_lib.RopeConfig, seen: fields.Json, original: int, context: int
) -> config_lib.RopeConfig:
  """`rope` with the fields of its kind; `seen` holds no nulls."""
  factor = seen.get('factor')
  if factor is None and rope.kind == 'yarn':
    factor = context / original
  if factor is None or factor <= 0:
    raise fields.bad('rope factor', factor, 'a number above 0')
  rope = dataclasses.replace(rope, factor=float(factor))
  if rope.kind == 'linear':
    return rope
  rope = dataclasses.replace(rope, original_context=original)
  if rope.kind == 'llama3':
    low, high = seen.get('low_freq_factor'), seen.get('high_freq_factor')
    if low is None or high is None or high <= low:
      wanted = 'numbers, the second above the first'
      name = 'rope low_freq_factor and high_freq_factor'
      raise fields.bad(name, (low, high), wanted)
    return dataclasses.replace(
      rope, low_freq_factor=float(low), high_freq_factor=float(high)
    )
  return dataclasses.replace(
    rope,
    beta_fast=float(seen.get('beta_fast') or 32),
    beta_slow=float(seen.get('beta_slow') or 1),
    attention_factor=seen.get('attention_factor'),
    mscale=seen.get('mscale'),
    mscale_all_dim=seen.get('mscale_all_dim'),
    truncate=seen.get('truncate', True),
  )


def _check(c: config_lib.ModelConfig) -> None:
  if c.num_heads % c.num_kv_heads:
    raise fields.bad(
      'num_key_value_heads', c.num_kv_heads, f'a divisor of {c.num_heads}'
    )
  if c.head_dim % 2:
    raise fields.bad(
      'head_dim', c.head_dim, 'an even number, to be rotated in pairs'
    )
  if c.top_k > c.num_experts:
    raise fields.bad('num_experts_per_tok', c.top_k, f'at most {c.num_experts}')
  if c.qk_norm == 'full' and c.num_heads * c.head_dim != c.model_dim:
    wanted = f'hidden_size / num_attention_heads = {c.model_dim // c.num_heads}'
    raise fields.bad('head_dim', c.head_dim, wanted)


def _eos_ids(
  ids: Any, generation: fields.Json | None, vocab_size: int
) -> tuple[int, ...]:
  """Union of both configs' end tokens; ids no token has are left out."""
  found: set[int] = set()
  for value in (ids, (generation or {}).get('eos_token_id')):
    values = value if isinstance(value, list) else [value]
    for one in values:
      if one is not None and type(one) is not int:
        raise fields.bad(
          'eos_token_id', value, 'an integer, a list of them or null'
        )
    found |= {one for one in values if one is not None}
  return tuple(sorted(i for i in found if 0 <= i < vocab_size))
