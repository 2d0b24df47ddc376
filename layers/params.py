"""The pytree of a model's shared weights: every leaf, its shape, its maker.

    embed       [V, D]
    final_norm  [D]
    head        [D, V]     absent where the head is tied to the embedding
    layers      one dict a layer:
      attn_norm [D]        mlp_norm [D]
      wq [D, H*dh]  wk [D, K*dh]  wv [D, K*dh]  wo [H*dh, D]
      bq [H*dh]  bk [K*dh]  bv [K*dh]   with qkv_bias
      bo [D]                            with out_bias
      q_norm, k_norm       [dh] with qk_norm 'head';
                           [H*dh] and [K*dh] with 'full'
      router [D, E]                     MoE layers
      shared_in [2, D, Fs]  shared_out [Fs, D]   with a shared expert:
                           shared_in[0] is its gate, shared_in[1] its up
      shared_gate [D, 1]                with the shared expert's sigmoid gate
      dense_in [2, D, Fd]  dense_out [Fd, D]     dense layers

Routed experts are not in it: an expert is one packed block `[3, F, D]` of
gate, up and transposed down projection, kept by `offload`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from bevy_jax.layers import config as config_lib

Params = dict[str, Any]
Shapes = dict[str, Any]


def shapes(config: config_lib.ModelConfig) -> Shapes:
  """The same tree with a shape tuple at every leaf."""
  c = config
  tree: Shapes = {
    'embed': (c.vocab_size, c.model_dim),
    'final_norm': (c.model_dim,),
    'layers': [_layer_shapes(c, i) for i in range(c.num_layers)],
  }
  if not c.tied:
    tree['head'] = (c.model_dim, c.vocab_size)
  return tree


def _layer_shapes(
  c: config_lib.ModelConfig, layer: int
) -> dict[str, tuple[int, ...]]:
  d, q = c.model_dim, c.num_heads * c.head_dim
  kv = c.num_kv_heads * c.head_dim
  tree: dict[str, tuple[int, ...]] = {
    'attn_norm': (d,),
    'mlp_norm': (d,),
    'wq': (d, q),
    'wk': (d, kv),
    'wv': (d, kv),
    'wo': (q, d),
  }
  if c.qkv_bias:
    tree |= {'bq': (q,), 'bk': (kv,), 'bv': (kv,)}
  if c.out_bias:
    tree['bo'] = (d,)
  if c.qk_norm == 'head':
    tree |= {'q_norm': (c.head_dim,), 'k_norm': (c.head_dim,)}
  elif c.qk_norm == 'full':
    tree |= {'q_norm': (q,), 'k_norm': (kv,)}
  if not c.moe_layers[layer]:
    tree |= {'dense_in': (2, d, c.dense_dim), 'dense_out': (c.dense_dim, d)}
    return tree
  tree['router'] = (d, c.num_experts)
  if c.shared_dim:
    tree |= {'shared_in': (2, d, c.shared_dim), 'shared_out': (c.shared_dim, d)}
    if c.shared_gate:
      tree['shared_gate'] = (d, 1)
  return tree


def init(config: config_lib.ModelConfig, key: jax.Array) -> Params:
  """Random float32 shared weights; consumes `key`."""
  tree = shapes(config)
  leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_shape)
  keys = jax.random.split(key, len(leaves))
  made = [_init_leaf(k, shape) for k, shape in zip(keys, leaves, strict=True)]
  params: Params = jax.tree.unflatten(treedef, made)
  return params


def init_experts(config: config_lib.ModelConfig, key: jax.Array) -> jax.Array:
  """Random float32 experts `[moe layers, E, 3, F, D]`; consumes `key`."""
  shape = (len(config.moe_ids), config.num_experts, *config.expert_shape)
  return jax.random.normal(key, shape) / math.sqrt(config.model_dim)


def _init_leaf(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  if len(shape) == 1:
    return jnp.ones(shape) + 0.1 * jax.random.normal(key, shape)
  return jax.random.normal(key, shape) / math.sqrt(shape[-2])


def _is_shape(x: object) -> bool:
  return isinstance(x, tuple)


def merged(layer: Params) -> Params:
  """A layer as the GPU kernels read it, with the same numbers.

  `wqkv [(H + 2K) * dh, D]` and `bqkv` stand for the three matrices and their
  biases, `wo_t [D, H * dh]` for `wo`: what a product sums over comes last.
  """
  out = {k: v for k, v in layer.items() if k not in _MERGED}
  out['wqkv'] = jnp.concatenate([layer[k].T for k in ('wq', 'wk', 'wv')])
  if 'bq' in layer:
    out['bqkv'] = jnp.concatenate([layer[k] for k in ('bq', 'bk', 'bv')])
  return out | {'wo_t': layer['wo'].T}


def stacked(params: Params) -> Params:
  """Shared weights whose layers are `merged` and lie in one array a kind.

  `layers` is one dict then, and each of its leaves `[layers, ...]`: a launch
  of any layer is given the same arrays. All layers must have the same leaves.
  """
  layers = params['layers']

  def put(whole: Params, layer: Params, at: jax.Array) -> Params:
    own = merged(layer)
    return {k: whole[k].at[at].set(own[k]) for k in whole}

  shapes = jax.eval_shape(merged, layers[0])
  whole = {
    k: jnp.zeros((len(layers), *v.shape), v.dtype) for k, v in shapes.items()
  }
  # One at a time and in place: there is never more than one layer twice.
  write = jax.jit(put, donate_argnums=0)
  for at, layer in enumerate(layers):
    whole = write(whole, layer, jnp.int32(at))
  return params | {'layers': whole}


def layer_of(whole: Params, at: Any) -> Params:
  """One layer of those that `stacked` has put together."""
  return {k: v[at] for k, v in whole.items()}


_MERGED = ('wq', 'wk', 'wv', 'bq', 'bk', 'bv', 'wo')
