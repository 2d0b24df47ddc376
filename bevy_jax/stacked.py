"""Launches of the plain form on weights and caches stacked for the kernels.

The GPU kernels find a layer in arrays that hold all of them, so that every
launch is given the same arrays: addresses that change from launch to launch
cost the host as much again as the launch. Where such a model enters requests
or reads prompts, which has no kernels, its layer is cut out first.
"""

from typing import Any, NamedTuple

import jax

from bevy_jax import prompt_steps, segments, steps
from bevy_jax.layers import config as config_lib
from bevy_jax.layers import experts, kv_cache, params

_KEPT = ('mlp_norm', 'router')


class Weights(NamedTuple):
  """Shared weights of a model whose layers are `params.stacked`.

  Attributes:
    layers: of all layers, each leaf `[L, ...]`.
    top: embedding, final norm and head where needed, else empty.
  """

  layers: dict[str, Any]
  top: dict[str, Any]


def enter(
  config: config_lib.ModelConfig,
  segment: segments.Segment,
  weights: Weights,
  caches: kv_cache.LayerCache,
  state: steps.State,
  control: jax.Array,
) -> tuple[steps.State, kv_cache.LayerCache, jax.Array]:
  """As `steps.enter`; caches are `[L, R, K, C, dh]`."""
  own = plain(weights, segment, None, 0)
  state, (new,), answer = steps.enter(
    config, segment, own, (_cache_of(caches, 0),), state, control
  )
  return state, _put(caches, 0, new), answer


def prefill_begin(
  config: config_lib.ModelConfig,
  segment: segments.Segment,
  shape: tuple[int, int],
  weights: Weights,
  caches: kv_cache.LayerCache,
  control: jax.Array,
) -> tuple[prompt_steps.Prompt, kv_cache.LayerCache, jax.Array]:
  """As `prompt_steps.prefill_begin`."""
  own = plain(weights, segment, None, 0)
  prompt, (new,), answer = prompt_steps.prefill_begin(
    config, segment, shape, own, (_cache_of(caches, 0),), control
  )
  return prompt, _put(caches, 0, new), answer


def prefill(
  config: config_lib.ModelConfig,
  segment: segments.Segment,
  weights: Weights,
  pool: experts.Pool,
  caches: kv_cache.LayerCache,
  prompt: prompt_steps.Prompt,
  control: jax.Array,
) -> tuple[prompt_steps.Prompt, kv_cache.LayerCache, jax.Array]:
  """As `prompt_steps.prefill`; the control vector tells the layer."""
  control = steps.to_device(control)
  this = control[prompt_steps.LAYER]
  own = plain(weights, segment, this, this + 1)
  prompt, (new,), answer = prompt_steps.prefill(
    config, segment, own, pool, (_cache_of(caches, this + 1),), prompt, control
  )
  return prompt, _put(caches, this + 1, new), answer


def prefill_wave(
  config: config_lib.ModelConfig,
  mlp: dict[str, Any],
  pool: experts.Pool,
  prompt: prompt_steps.Prompt,
  control: jax.Array,
) -> tuple[prompt_steps.Prompt, jax.Array]:
  """As `prompt_steps.prefill_wave`; `mlp` is of all layers."""
  control = steps.to_device(control)
  own = params.layer_of(mlp, control[prompt_steps.LAYER])
  return prompt_steps.prefill_wave(config, own, pool, prompt, control)


def plain(
  weights: Weights, segment: segments.Segment, this: Any, there: Any
) -> segments.Weights:
  """What a segment of one layer multiplies with.

  Args:
    weights: of all layers.
    segment: from behind the experts of layer `this` to the router of `there`.
    this: None where nobody comes from experts.
    there: the layer that is come to.
  """
  layers = weights.layers
  return segments.Weights(
    mlp={} if this is None else {'mlp_norm': layers['mlp_norm'][this]},
    layers=(params.layer_of(layers, there),),
    top=weights.top,
    gates=tuple(
      params.layer_of({k: layers[k] for k in _KEPT}, there + 1 + ahead)
      for ahead in range(segment.gates)
    ),
  )


def _cache_of(caches: kv_cache.LayerCache, layer: Any) -> kv_cache.LayerCache:
  return kv_cache.LayerCache(*(a[layer] for a in caches))


def _put(
  caches: kv_cache.LayerCache, layer: Any, new: kv_cache.LayerCache
) -> kv_cache.LayerCache:
  return kv_cache.LayerCache(
    *(a.at[layer].set(b) for a, b in zip(caches, new, strict=True))
  )
