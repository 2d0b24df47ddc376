"""The demo model: its shape, its first weights, its Hugging Face directory."""

import json
import math
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors_numpy

from bevy_jax.experiments import forward
from bevy_jax.layers import config as config_lib
from bevy_jax.layers import params as params_lib

# Our attention leaf -> Hugging Face's module; ours is [in, out].
_LINEAR = {
  'wq': 'self_attn.q_proj',
  'wk': 'self_attn.k_proj',
  'wv': 'self_attn.v_proj',
  'wo': 'self_attn.o_proj',
  'router': 'mlp.gate',
}
_VECTOR = {
  'attn_norm': 'input_layernorm',
  'mlp_norm': 'post_attention_layernorm',
  'q_norm': 'self_attn.q_norm',
  'k_norm': 'self_attn.k_norm',
}
_EXPERT = ('gate_proj', 'up_proj', 'down_proj')


def demo() -> config_lib.ModelConfig:
  """16 million parameters: 8 layers of 32 experts, 4 a token."""
  return config_lib.ModelConfig(
    family='qwen3_moe',
    vocab_size=8192,
    num_layers=8,
    model_dim=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    num_experts=32,
    top_k=4,
    expert_dim=64,
    moe_layers=(True,) * 8,
    norm_topk=True,
    qk_norm='head',
    tied=True,
    context=1024,
    eos_ids=(0,),
  )


def micro() -> config_lib.ModelConfig:
  """The demo's architecture, small enough to train in a test."""
  return config_lib.tiny(
    vocab_size=512, num_layers=2, moe_layers=(True,) * 2, eos_ids=(0,)
  )


CONFIGS = {'demo': demo, 'micro': micro}


def init(config: config_lib.ModelConfig, key: jax.Array) -> forward.Weights:
  """Float32 `{'shared': tree, 'experts': [L, E, 3, F, D]}`; consumes `key`.

  Norms are one; projections into the residual stream start smaller, so that
  its variance does not grow with depth.
  """
  shapes = params_lib.shapes(config)
  residual = 1 / math.sqrt(2 * config.num_layers)
  paths, treedef = jax.tree_util.tree_flatten_with_path(
    shapes, is_leaf=lambda x: isinstance(x, tuple)
  )
  *keys, expert_key = jax.random.split(key, len(paths) + 1)
  leaves = []
  for leaf_key, (path, shape) in zip(keys, paths, strict=True):
    name = path[-1].key
    if len(shape) == 1:
      leaves.append(jnp.ones(shape))
      continue
    scale = 0.02 if name == 'embed' else 0.5 / math.sqrt(config.model_dim)
    scale *= residual if name == 'wo' else 1.0
    leaves.append(scale * jax.random.normal(leaf_key, shape))
  parts = jnp.asarray([1.0, 1.0, residual]).reshape(1, 1, 3, 1, 1)
  shape = (config.num_layers, config.num_experts, *config.expert_shape)
  scale = 0.5 / math.sqrt(config.model_dim)
  experts = scale * parts * jax.random.normal(expert_key, shape)
  return {
    'shared': jax.tree.unflatten(treedef, leaves),
    'experts': experts,
  }


def tensors(
  config: config_lib.ModelConfig, weights: forward.Weights
) -> Iterator[tuple[str, np.ndarray]]:
  """Every tensor by its Hugging Face name, bfloat16, linear ones [out, in]."""
  shared = weights['shared']
  yield 'model.embed_tokens.weight', _bf16(shared['embed'])
  yield 'model.norm.weight', _bf16(shared['final_norm'])
  for i, layer in enumerate(shared['layers']):
    prefix = f'model.layers.{i}.'
    for ours, theirs in _VECTOR.items():
      yield f'{prefix}{theirs}.weight', _bf16(layer[ours])
    for ours, theirs in _LINEAR.items():
      yield f'{prefix}{theirs}.weight', _bf16(np.asarray(layer[ours]).T)
    experts = np.asarray(weights['experts'][i])
    for e in range(config.num_experts):
      for part, name in enumerate(_EXPERT):
        w = experts[e, part].T if name == 'down_proj' else experts[e, part]
        yield f'{prefix}mlp.experts.{e}.{name}.weight', _bf16(w)


def from_tensors(
  config: config_lib.ModelConfig, named: dict[str, np.ndarray]
) -> forward.Weights:
  """The inverse of `tensors`, in float32."""
  wide = {k: np.asarray(v).astype(np.float32) for k, v in named.items()}
  layers = []
  for i in range(config.num_layers):
    prefix = f'model.layers.{i}.'
    layer = {k: wide[f'{prefix}{v}.weight'] for k, v in _VECTOR.items()}
    layer |= {k: wide[f'{prefix}{v}.weight'].T for k, v in _LINEAR.items()}
    layers.append(layer)
  experts = np.empty(
    (config.num_layers, config.num_experts, *config.expert_shape), np.float32
  )
  for i, e, part in np.ndindex(*experts.shape[:3]):
    name = _EXPERT[part]
    w = wide[f'model.layers.{i}.mlp.experts.{e}.{name}.weight']
    experts[i, e, part] = w.T if name == 'down_proj' else w
  shared = {
    'embed': wide['model.embed_tokens.weight'],
    'final_norm': wide['model.norm.weight'],
    'layers': layers,
  }
  return {'shared': shared, 'experts': experts}


def rounded(weights: forward.Weights) -> forward.Weights:
  """Float32 weights with the values that the exported bfloat16 ones have."""
  weights = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), weights
  )
  return weights


def export(
  config: config_lib.ModelConfig,
  weights: forward.Weights,
  folder: pathlib.Path,
  shards: int = 1,
) -> None:
  """Writes the Hugging Face directory, without the tokenizer."""
  folder.mkdir(parents=True, exist_ok=True)
  named = dict(tensors(config, jax.device_get(weights)))
  total = sum(x.nbytes for x in named.values())
  parts: list[dict[str, np.ndarray]] = [{} for _ in range(shards)]
  filled = 0
  for name, tensor in named.items():
    parts[min(filled * shards // total, shards - 1)][name] = tensor
    filled += tensor.nbytes
  names = ['model.safetensors']
  if shards > 1:
    names = [
      f'model-{i + 1:05d}-of-{shards:05d}.safetensors' for i in range(shards)
    ]
    index = {
      'metadata': {'total_size': total},
      'weight_map': {
        k: n for n, p in zip(names, parts, strict=True) for k in p
      },
    }
    _write_json(folder / 'model.safetensors.index.json', index)
  for name, part in zip(names, parts, strict=True):
    # Written aside, so that a killed run leaves the last whole file.
    aside = folder / f'.{name}.partial'
    safetensors_numpy.save_file(part, aside, {'format': 'pt'})
    aside.chmod(0o644)
    aside.replace(folder / name)
  _write_json(folder / 'config.json', hf_config(config))
  _write_json(folder / 'generation_config.json', generation_config(config))


def hf_config(config: config_lib.ModelConfig) -> dict[str, object]:
  """config.json of a Qwen3MoeForCausalLM, every field spelled out."""
  c = config
  return {
    'architectures': ['Qwen3MoeForCausalLM'],
    'attention_bias': False,
    'attention_dropout': 0.0,
    'bos_token_id': c.eos_ids[0],
    'decoder_sparse_step': 1,
    'dtype': 'bfloat16',
    'eos_token_id': c.eos_ids[0],
    'head_dim': c.head_dim,
    'hidden_act': 'silu',
    'hidden_size': c.model_dim,
    'initializer_range': 0.02,
    'intermediate_size': c.num_experts * c.expert_dim,
    'max_position_embeddings': c.context,
    'max_window_layers': c.num_layers,
    'mlp_only_layers': [],
    'model_type': 'qwen3_moe',
    'moe_intermediate_size': c.expert_dim,
    'norm_topk_prob': c.norm_topk,
    'num_attention_heads': c.num_heads,
    'num_experts': c.num_experts,
    'num_experts_per_tok': c.top_k,
    'num_hidden_layers': c.num_layers,
    'num_key_value_heads': c.num_kv_heads,
    'output_router_logits': False,
    'pad_token_id': c.eos_ids[0],
    'rms_norm_eps': c.norm_eps,
    'rope_scaling': None,
    'rope_theta': c.rope.theta,
    'router_aux_loss_coef': 0.01,
    'sliding_window': None,
    'tie_word_embeddings': c.tied,
    'torch_dtype': 'bfloat16',
    'use_cache': True,
    'use_sliding_window': False,
    'vocab_size': c.vocab_size,
  }


def generation_config(config: config_lib.ModelConfig) -> dict[str, object]:
  """generation_config.json: where texts end, and how to sample."""
  return {
    'bos_token_id': config.eos_ids[0],
    'do_sample': True,
    'eos_token_id': config.eos_ids[0],
    'pad_token_id': config.eos_ids[0],
    'temperature': 0.8,
    'top_p': 0.95,
  }


def _bf16(x: object) -> np.ndarray:
  return np.ascontiguousarray(np.asarray(x).astype(jnp.dtype(jnp.bfloat16)))


def _write_json(path: pathlib.Path, value: object) -> None:
  path.write_text(json.dumps(value, indent=2) + '\n', encoding='utf-8')
