"""The jitted functions of a prefill launch; see `steps` for the words."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from bevy_jax import segments, steps
from bevy_jax.layers import block, embed, experts, kv_cache, router
from bevy_jax.layers import config as config_lib

LAYER = 1  # In the control vector of `prefill`: that of its experts.


class Prompt(flax.struct.PyTreeNode):
  """What the device keeps of a prompt chunk between its launches.

  Attributes:
    x: `[B, T, D]`, as in State, for T tokens of B rows.
    weights: float32 `[B * T, k]`.
    partial: float32 `[B * T, k, D]`.
    rows: int32 `[B]`; a row number out of range is padding.
    positions: int32 `[B, T]`; a position out of range is padding.
  """

  x: jax.Array
  weights: jax.Array
  partial: jax.Array
  rows: jax.Array
  positions: jax.Array


def prefill_begin(
  config: config_lib.ModelConfig,
  segment: segments.Segment,
  shape: tuple[int, int],
  weights: segments.Weights,
  caches: tuple[kv_cache.LayerCache, ...],
  control: jax.Array,
) -> tuple[Prompt, tuple[kv_cache.LayerCache, ...], jax.Array]:
  """Embeds a chunk of prompts and goes to the first router.

  `control` holds B rows, then B x T tokens, then B x T positions.
  """
  b, t = shape
  control = steps.to_device(control)
  rows, tokens, positions = jnp.split(control, [b, b + b * t])
  positions = positions.reshape(b, t)
  x = embed.embed(weights.top, tokens.reshape(b, t))
  k = config.top_k
  prompt = Prompt(
    x=x,
    weights=jnp.zeros((b * t, k), jnp.float32),
    partial=jnp.zeros((b * t, k, config.model_dim), jnp.float32),
    rows=rows,
    positions=positions,
  )
  return _prompt_advance(config, segment, weights, caches, prompt)


def prefill(
  config: config_lib.ModelConfig,
  segment: segments.Segment,
  weights: segments.Weights,
  pool: experts.Pool,
  caches: tuple[kv_cache.LayerCache, ...],
  prompt: Prompt,
  control: jax.Array,
) -> tuple[Prompt, tuple[kv_cache.LayerCache, ...], jax.Array]:
  """The last experts of a chunk's layer, then on to its next router."""
  x, work = _prompt_work(config, prompt, control)
  y = block.expert_outputs(config, weights.mlp, pool, x, work, prompt.partial)
  x = block.finish_experts(config, weights.mlp, x, prompt.weights, y)
  prompt = prompt.replace(x=x.reshape(prompt.x.shape))
  return _prompt_advance(config, segment, weights, caches, prompt)


def prefill_wave(
  config: config_lib.ModelConfig,
  mlp: dict[str, Any],
  pool: experts.Pool,
  prompt: Prompt,
  control: jax.Array,
) -> tuple[Prompt, jax.Array]:
  """Some experts of a chunk's layer; their outputs are kept."""
  x, work = _prompt_work(config, prompt, control)
  y = block.expert_outputs(config, mlp, pool, x, work, prompt.partial)
  return prompt.replace(partial=y), work.distinct


def _prompt_advance(
  config: config_lib.ModelConfig,
  segment: segments.Segment,
  weights: segments.Weights,
  caches: tuple[kv_cache.LayerCache, ...],
  prompt: Prompt,
) -> tuple[Prompt, tuple[kv_cache.LayerCache, ...], jax.Array]:
  x, new_caches, routing = prompt.x, [], None
  for i, moe in enumerate(segment.moe):
    p = weights.layers[i]
    x, cache = block.attend(
      config, p, caches[i], segment.windows[i], x, prompt.rows, prompt.positions
    )
    new_caches.append(cache)
    if moe:
      flat = x.reshape(-1, x.shape[-1])
      routing = block.route(config, p, flat)
    else:
      x = block.dense(config, p, x)
  count = prompt.weights.shape[0]
  nothing = jnp.full((count,), -1, jnp.int32)
  if routing is None:  # Trailing layers without experts: nothing is wanted.
    ids = jnp.zeros((count, config.top_k), jnp.int32)
    finite = jnp.all(jnp.isfinite(x), axis=-1).reshape(-1)
    routing = router.Routing(ids, prompt.weights, finite)
  reply = steps.answer(nothing, routing.sound, routing)
  return (
    prompt.replace(x=x, weights=routing.weights),
    tuple(new_caches),
    reply,
  )


def _prompt_work(
  config: config_lib.ModelConfig, prompt: Prompt, control: jax.Array
) -> tuple[jax.Array, block.Work]:
  x = prompt.x.reshape(-1, config.model_dim)
  return x, work(config, x.shape[0], steps.to_device(control))


def control_parts(
  config: config_lib.ModelConfig, tokens: int
) -> list[tuple[int, ...]]:
  """Shapes in a control vector: count, layer, distinct slots, slots."""
  distinct = steps.distinct_limit(config, tokens)
  return [(1,), (1,), (distinct,), (tokens, config.top_k)]


def work(
  config: config_lib.ModelConfig, tokens: int, control: jax.Array
) -> block.Work:
  """The expert work of a control vector."""
  m = steps.distinct_limit(config, tokens)
  distinct, slots = control[2 : 2 + m], control[2 + m :]
  slots = slots.reshape(tokens, config.top_k)
  return block.Work(slots, distinct, steps.reads(control[0], m))
