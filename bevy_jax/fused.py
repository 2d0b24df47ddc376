"""Decode launches through the GPU kernels: as `steps`, seven a layer.

A layer is gate and up, down, the sum of choices with the next norm, queries
with keys and values, attention, its output with the router's product, and the
choice of experts with their norm.
"""

from typing import Any

import jax
import jax.numpy as jnp

from bevy_jax import segments, steps
from bevy_jax.layers import config as config_lib
from bevy_jax.layers import (
  experts,
  forced,
  kernel_attention,
  kernel_dense,
  kernel_experts,
  kernel_router,
  kernel_rows,
  kv_cache,
  norm,
  rope,
)


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
  asked = steps.read_control(config, group, len(hops), steps.to_device(control))
  real = asked.rows < state.x.shape[0]
  rows = kernel_rows.take(
    config,
    weights[0].mlp['mlp_norm'],
    asked.rows,
    asked.tables[0],
    state.x,
    state.ids,
    state.weights,
    state.registers[:, steps.POSITION],
  )
  replies, kept = [], list(caches)
  for hop, segment in enumerate(hops):
    if hop:
      rows = _agree(rows, asked.together, real)
    y = kernel_experts.apply(pool, rows.h, rows.slots, asked.tables[hop])
    # What comes next may be read where there is a next hop.
    table = asked.tables[min(hop + 1, len(hops) - 1)]
    way = _Way(config, segment, weights[hop], asked.rows)
    state, rows, reply, kept[hop] = way.on(state, rows, y, table, kept[hop])
    replies.append(reply)
  answer = replies[0] if len(hops) == 1 else jnp.concatenate(replies, axis=1)
  return state, tuple(kept), answer


def _agree(
  rows: kernel_rows.Rows, together: jax.Array, real: jax.Array
) -> kernel_rows.Rows:
  """Rows that go on, or none of them where they go together or not at all."""
  going = rows.go > 0
  going &= ~together | jnp.all(going | ~real)
  slots = jnp.where(going[:, None], rows.slots, -1)
  return rows._replace(slots=slots, go=going.astype(jnp.int32))


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


class _Way:
  """From the experts of a layer to the next router."""

  def __init__(
    self,
    config: config_lib.ModelConfig,
    segment: segments.Segment,
    weights: segments.Weights,
    numbers: jax.Array,
  ):
    self._config, self._segment, self._weights = config, segment, weights
    self._numbers, self._p = numbers, weights.layers[0]

  def on(
    self,
    state: steps.State,
    rows: kernel_rows.Rows,
    y: jax.Array,
    table: jax.Array,
    cache: kv_cache.LayerCache,
  ) -> tuple[steps.State, kernel_rows.Rows, jax.Array, kv_cache.LayerCache]:
    """The state with the rows that came, who goes on, answer and cache."""
    config, p = self._config, self._p
    state, rows, token, sound = self._enter(state, rows, y)
    made = kernel_dense.project(config, p, rows.h)
    mixed, cache = kernel_attention.attend(
      config,
      p,
      cache,
      self._segment.windows[0],
      made,
      self._numbers,
      rows.positions,
      rows.go,
      rows.cos,
      rows.sin,
    )
    x, logits, squares = kernel_dense.output(config, p, mixed, rows.x, rows.go)
    given = None
    if 'forced' in p:
      seeds = state.registers[:, steps.SEED].at[self._numbers].get(mode='clip')
      given = forced.ids(p, seeds, rows.positions)
    came = kernel_router.Came(
      x, logits, squares, self._numbers, rows.go, token, sound, table, given
    )
    found = kernel_router.choose(
      config, p['mlp_norm'], came, state.x, state.ids, state.weights
    )
    state = state.replace(x=found.x_R, ids=found.ids_R, weights=found.weights_R)
    reply = found.answer
    if self._segment.gates:
      guessed = jnp.concatenate(steps.guesses(config, self._weights, x), axis=1)
      guessed = jnp.where(reply[:, 1:2] >= 0, guessed, -1)
      reply = jnp.concatenate([reply, guessed], axis=1)
    rows = rows._replace(
      x=x, h=found.h, slots=found.slots, weights=found.weights, go=found.go
    )
    return state, rows, reply, cache

  def _enter(
    self, state: steps.State, rows: kernel_rows.Rows, y: jax.Array
  ) -> tuple[steps.State, kernel_rows.Rows, jax.Array, jax.Array]:
    """Sums the experts; draws a token where that was the last layer."""
    config, weights = self._config, self._weights
    last = self._segment.head is not None
    scale = weights.top['final_norm'] if last else self._p['attn_norm']
    x, h = kernel_experts.combine(
      rows.x,
      y,
      rows.weights,
      rows.slots,
      state.partial,
      self._numbers,
      rows.go,
      scale,
      config.norm_eps,
    )
    rows = rows._replace(x=x, h=h)
    if not last:
      ones = jnp.ones(self._numbers.shape, jnp.int32)
      return state, rows, -ones, ones
    return self._draw(state, rows)

  def _draw(
    self, state: steps.State, rows: kernel_rows.Rows
  ) -> tuple[steps.State, kernel_rows.Rows, jax.Array, jax.Array]:
    config, nobody = self._config, state.x.shape[0]
    mine = state.registers.at[self._numbers].get(mode='clip')
    new, registers, token, sound = steps.next_token(
      config, self._weights, rows.x, mine, drawn=self._segment.drawn
    )
    going = rows.go > 0
    x = steps.where(going, new, rows.x)
    registers = steps.where(going, registers, mine)
    numbers = jnp.where(going, self._numbers, nobody)
    kept = state.registers.at[numbers].set(registers, mode='drop')
    positions = registers[:, steps.POSITION]
    cos, sin = rope.turn(config.rope, config.head_dim, positions)
    h = norm.rms_norm(x, self._p['attn_norm'], config.norm_eps)
    rows = rows._replace(x=x, h=h, positions=positions, cos=cos, sin=sin)
    state = state.replace(registers=kept)
    return state, rows, token, sound.astype(jnp.int32)
