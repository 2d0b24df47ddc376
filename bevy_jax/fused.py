"""Decode launches through the GPU kernels: as `steps`, seven a layer.

A layer is gate and up, down, the sum of choices with the next norm, queries
with keys and values, attention, its output with the router's product, and the
choice of experts with their norm.
"""

from typing import Any

import jax
import jax.numpy as jnp

from bevy_jax import segments, steps
from bevy_jax.layers import (
  experts,
  forced,
  kernel_attention,
  kernel_dense,
  kernel_experts,
  kernel_router,
  kv_cache,
  norm,
)
from bevy_jax.layers import config as config_lib


def decode(
  config: config_lib.ModelConfig,
  hops: tuple[segments.Segment, ...],
  group: int,
  weights: tuple[segments.Weights, ...],
  pool: experts.Pool,
  caches: tuple[kv_cache.LayerCache, ...],
  state: steps.State,
  control: jax.Array,
) -> tuple[steps.State, tuple[kv_cache.LayerCache, ...], jax.Array]:
  """As `steps.decode`, for layers that `params.merged` has laid out."""
  asked = steps.read_control(
    config, group, len(hops), steps.to_device(control)
  )
  real = asked.rows < state.x.shape[0]
  mine = state.replace(
    **{
      name: getattr(state, name).at[asked.rows].get(mode='clip')
      for name in ('x', 'ids', 'weights', 'registers')
    }
  )
  h = norm.rms_norm(mine.x, weights[0].mlp['mlp_norm'], config.norm_eps)
  going, replies, kept = real, [], list(caches)
  for hop, segment in enumerate(hops):
    table = asked.tables[hop]
    slots = table.at[mine.ids].get(mode='clip')
    if hop:
      going &= jnp.all(slots >= 0, axis=1)
      going &= ~asked.together | jnp.all(going | ~real)
    slots = jnp.where(going[:, None], slots, -1)
    y = kernel_experts.apply(pool, h, slots, table)
    came = _Came(config, segment, weights[hop], asked.rows, going)
    mine, h, reply, sound, kept[hop] = came.on(mine, y, slots, kept[hop])
    replies.append(jnp.where(going[:, None], reply, -1))
    going &= sound
  answer = jnp.concatenate(replies, axis=1)
  return steps.put(state, asked.rows, mine), tuple(kept), answer


def wave(
  config: config_lib.ModelConfig,
  group: int,
  mlp: dict[str, Any],
  pool: experts.Pool,
  state: steps.State,
  control: jax.Array,
) -> tuple[steps.State, jax.Array]:
  """As `steps.wave`."""
  asked = steps.read_control(config, group, 1, steps.to_device(control))
  rows = asked.rows
  x, ids, partial = (
    a.at[rows].get(mode='clip') for a in (state.x, state.ids, state.partial)
  )
  table = asked.tables[0]
  slots = table.at[ids].get(mode='clip')
  slots = jnp.where((rows < state.x.shape[0])[:, None], slots, -1)
  h = norm.rms_norm(x, mlp['mlp_norm'], config.norm_eps)
  y = kernel_experts.apply(pool, h, slots, table)
  y = jnp.where((slots >= 0)[:, :, None], y, partial)
  kept = state.partial.at[rows].set(y, mode='drop')
  return state.replace(partial=kept), rows


class _Came:
  """Rows behind the experts of a layer, on their way to the next router."""

  def __init__(
    self,
    config: config_lib.ModelConfig,
    segment: segments.Segment,
    weights: segments.Weights,
    rows: jax.Array,
    going: jax.Array,
  ):
    self._config, self._segment, self._weights = config, segment, weights
    self._rows, self._going = rows, going
    self._go = going.astype(jnp.int32)
    self._p = weights.layers[0]

  def on(
    self,
    mine: steps.State,
    y: jax.Array,
    slots: jax.Array,
    cache: kv_cache.LayerCache,
  ) -> tuple[steps.State, jax.Array, jax.Array, jax.Array, kv_cache.LayerCache]:
    """The rows at the next router.

    Returns:
      The rows, those that do not go on as they were; their stream behind the
      norm of the experts; the answer; who is sound; the layer's cache.
    """
    config, p, go = self._config, self._p, self._go
    mine, h, token, sound = self._enter(mine, y, slots)
    made = kernel_dense.project(config, p, h)
    positions = mine.registers[:, steps.POSITION]
    mixed, cache = kernel_attention.attend(
      config, p, cache, self._segment.windows[0], made, self._rows, positions, go
    )
    x, logits, squares = kernel_dense.output(config, p, mixed, mine.x, go)
    given = forced.ids(p, mine.registers[:, steps.SEED], positions)
    routing, h = kernel_router.choose(
      config, logits, squares, x, p['mlp_norm'], given
    )
    sound &= routing.sound
    reply = steps.answer(token, sound, routing)
    if self._segment.gates:
      guessed = steps.guesses(config, self._weights, x)
      reply = jnp.concatenate([reply, *guessed], axis=1)
    mine = mine.replace(
      x=x,
      ids=steps.where(self._going, routing.ids, mine.ids),
      weights=steps.where(self._going, routing.weights, mine.weights),
    )
    return mine, h, reply, sound, cache

  def _enter(
    self, mine: steps.State, y: jax.Array, slots: jax.Array
  ) -> tuple[steps.State, jax.Array, jax.Array, jax.Array]:
    """Sums the experts; draws a token where that was the last layer."""
    config, weights = self._config, self._weights
    last = self._segment.head is not None
    scale = weights.top['final_norm'] if last else self._p['attn_norm']
    x, h = kernel_experts.combine(
      mine.x,
      y,
      mine.weights,
      slots,
      mine.partial,
      self._rows,
      self._go,
      scale,
      config.norm_eps,
    )
    if not last:
      token = jnp.full_like(self._rows, -1)
      sound = jnp.ones(self._rows.shape, bool)
      return mine.replace(x=x), h, token, sound
    new, registers, token, sound = steps.next_token(
      config, weights, x, mine.registers, drawn=self._segment.drawn
    )
    x = steps.where(self._going, new, x)
    registers = steps.where(self._going, registers, mine.registers)
    h = norm.rms_norm(x, self._p['attn_norm'], config.norm_eps)
    return mine.replace(x=x, registers=registers), h, token, sound
