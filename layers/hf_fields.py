"""Fields of Hugging Face configs: which mean something, and their defaults."""

import dataclasses
from typing import Any

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """What the config class of one architecture knows.

  Attributes:
    name: our name, which is also the `model_type`.
    experts_dim: the field that holds the width of a routed expert.
    defaults: the fields that the class reads, with the class's defaults.
    theta: the class's default base of the rotary embedding.
  """

  name: str
  experts_dim: str
  defaults: Json
  theta: float = 10000.0


_SHARED: Json = {'attention_bias': False, 'tie_word_embeddings': False}
_QWEN: Json = _SHARED | {
  'max_position_embeddings': 32768,
  'rms_norm_eps': 1e-6,
  'eos_token_id': None,
  'norm_topk_prob': False,
  'decoder_sparse_step': 1,
  'mlp_only_layers': None,
  'use_sliding_window': False,
  'sliding_window': 4096,
  'layer_types': None,
}

FAMILIES: dict[str, Family] = {
  'MixtralForCausalLM': Family(
    name='mixtral',
    experts_dim='intermediate_size',
    defaults={
      'max_position_embeddings': 131072,
      'rms_norm_eps': 1e-5,
      'eos_token_id': 2,
      'num_key_value_heads': 8,
      'sliding_window': None,
      'tie_word_embeddings': False,
    },
    theta=1e6,
  ),
  'Qwen3MoeForCausalLM': Family(
    name='qwen3_moe',
    experts_dim='moe_intermediate_size',
    # max_window_layers was read by early releases only.
    defaults=_QWEN | {'num_key_value_heads': 4, 'max_window_layers': 0},
  ),
  'OlmoeForCausalLM': Family(
    name='olmoe',
    experts_dim='intermediate_size',
    defaults=_SHARED
    | {
      'max_position_embeddings': 4096,
      'rms_norm_eps': 1e-5,
      'eos_token_id': 50279,
      'num_key_value_heads': None,
      'norm_topk_prob': False,
      'clip_qkv': None,
    },
  ),
  'Qwen2MoeForCausalLM': Family(
    name='qwen2_moe',
    experts_dim='moe_intermediate_size',
    defaults={k: v for k, v in _QWEN.items() if k != 'attention_bias'}
    | {
      'num_key_value_heads': 16,
      'max_window_layers': 28,
      'qkv_bias': True,
      'shared_expert_intermediate_size': 5632,
    },
  ),
}

# Without these there is no model; transformers would fill in the sizes of one
# particular model, which fits no other checkpoint.
_SIZES = (
  'vocab_size',
  'hidden_size',
  'num_hidden_layers',
  'num_attention_heads',
  'num_experts_per_tok',
)

# Read by all families under these names, wherever they stand.
_COMMON = frozenset(
  'architectures model_type num_experts num_local_experts intermediate_size '
  'head_dim rope_parameters rope_scaling rope_theta '
  'original_max_position_embeddings'.split()
)

# Fields with a value that changes nothing; any other value is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  'hidden_act': ('silu', 'swish'),
  'partial_rotary_factor': (None, 1),
  'quantization_config': (None,),
  'compression_config': (None,),
  'per_layer_config': (None, {}),
  'pruned_heads': (None, {}),
  'is_encoder_decoder': (None, False),
  'add_cross_attention': (None, False),
  'attention_bias': (None, False),
  'qkv_bias': (None, False),
  'mlp_bias': (None, False),
  'clip_qkv': (None,),
  'sliding_window': (None,),
  'use_sliding_window': (None, False),
  'shared_expert_intermediate_size': (None, 0),
}

# Training, generation defaults and bookkeeping: no effect on the logits.
_IGNORED = frozenset(
  'attention_dropout hidden_dropout resid_pdrop embd_pdrop dropout '
  'router_aux_loss_coef output_router_logits router_jitter_noise '
  'router_z_loss_coef initializer_range use_cache pretraining_tp '
  'gradient_checkpointing use_flash_attention_2 max_window_layers '
  'bos_token_id pad_token_id sep_token_id unk_token_id mask_token_id '
  'decoder_start_token_id return_dict return_dict_in_generate '
  'output_hidden_states output_attentions output_scores torchscript '
  'torch_dtype dtype use_bfloat16 tf_legacy_loss chunk_size_feed_forward '
  'is_decoder cross_attention_hidden_size tie_encoder_decoder '
  'tie_last_hidden_states max_length min_length max_new_tokens do_sample '
  'early_stopping num_beams num_beam_groups diversity_penalty temperature '
  'top_k top_p min_p typical_p repetition_penalty length_penalty '
  'no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids '
  'num_return_sequences forced_bos_token_id forced_eos_token_id '
  'remove_invalid_values exponential_decay_length_penalty suppress_tokens '
  'begin_suppress_tokens finetuning_task id2label label2id num_labels '
  'tokenizer_class prefix task_specific_params problem_type auto_map '
  'transformers_version name_or_path attn_implementation '
  'experts_implementation'.split()
)


@dataclasses.dataclass(frozen=True)
class Reader:
  """Reads typed fields; ones of another type are a ValueError.

  Attributes:
    config: a parsed config.json.
    family: gives the fields that are absent.
  """

  config: Json
  family: Family

  def get(self, name: str) -> Any:
    """Any field, unchecked; None where there is neither field nor default."""
    return self.config.get(name, self.family.defaults.get(name))

  def size(self, name: str, absent: int | None = None) -> int:
    """An integer of at least 1; `absent` stands for a missing or null one."""
    value = self.get(name)
    value = absent if value is None else value
    if type(value) is not int or value < 1:
      raise bad(name, value, 'an integer of at least 1')
    return value

  def number(self, name: str) -> float:
    """Any number."""
    value = self.get(name)
    if type(value) not in (int, float):
      raise bad(name, value, 'a number')
    return float(value)

  def positive(self, name: str) -> float | None:
    """A number above 0, or None where the field is null or absent."""
    if self.get(name) is None:
      return None
    value = self.number(name)
    if value <= 0:
      raise bad(name, value, 'null or a number above 0')
    return value

  def flag(self, name: str) -> bool:
    """A truth value; null is False."""
    value = self.get(name)
    if value is not None and type(value) is not bool:
      raise bad(name, value, 'true or false')
    return bool(value)


def bad(name: str, value: object, wanted: str) -> ValueError:
  """The error of one field: its name, what was seen and what was wanted."""
  return ValueError(
    f'config.json: {name} is {value!r}; expected {wanted}. '
    'Correct the field, or use a checkpoint of a supported model.'
  )


def family_of(config: Json) -> Family:
  """The family by `architectures`, or by `model_type` where that is absent."""
  by_type: Json = {family.name: arch for arch, family in FAMILIES.items()}
  kind: Any = config.get('model_type')
  named = config.get('architectures') or [by_type.get(kind, kind)]
  known = [a for a in named if a in FAMILIES]
  if not known or kind not in (None, FAMILIES[known[0]].name):
    raise ValueError(
      f'config.json: architectures {named!r} with model_type {kind!r} is not '
      f'supported; supported are {", ".join(FAMILIES)}.'
    )
  return FAMILIES[known[0]]


def refuse(config: Json, family: Family) -> None:
  """Refuses missing fields, unsupported values and unknown names."""
  used = {*_SIZES, *_COMMON, *family.defaults, family.experts_dim}
  missing = [n for n in (*_SIZES, family.experts_dim) if config.get(n) is None]
  if missing:
    raise ValueError(
      f'config.json lacks {", ".join(missing)}, which a {family.name} model '
      'needs. Use the config.json that belongs to the checkpoint.'
    )
  for name, neutral in _NEUTRAL.items():
    if name in config and name not in used and config[name] not in neutral:
      wanted = ' or '.join(repr(value) for value in neutral)
      raise bad(name, config[name], f'{wanted} (others are not supported)')
  unknown = [
    name
    for name in config
    if name not in used
    and name not in _NEUTRAL
    and name not in _IGNORED
    and not name.startswith('_')
  ]
  if unknown:
    raise ValueError(
      f'config.json: {", ".join(unknown)} not known for a {family.name} '
      'model, so what it would change is not supported. If it changes '
      'nothing at inference, remove it from config.json.'
    )
