"""Decode launches through the GPU kernels: as `steps`, seven a layer.

One more takes the rows out of the state. A layer is gate and up, down, the sum
of choices with the next norm, queries with keys and values, attention, its
output with the router's product, and the choice of experts with their norm.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bevy_jax import segments, stacked, steps
from bevy_jax.layers import config as config_lib
from bevy_jax.layers import (
  experts,
  kernel_attention,
  kernel_dense,
  kernel_experts,
  kernel_head,
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
  weights: stacked.Weights,
  pool: experts.Pool,
  caches: kv_cache.LayerCache,
  state: steps.State,
  control: jax.Array,
) -> tuple[steps.State, kv_cache.LayerCache, jax.Array]:
  """As `steps.decode`, on weights and caches of all layers.

  Where it begins is told by the control vector alone, so that one program
  serves every layer that no head follows too soon.
  """
  control = steps.to_device(control)
  begun = _Launch(config, group, len(hops), weights, pool, control)
  rows, replies = begun.take(state), []
  for hop, segment in enumerate(hops):
    if hop:
      rows = begun.agree(rows, hop, state)
    made = _cross(
      config, segment, (group, len(hops)), weights, pool, caches, state, rows,
      control, jnp.full((1,), hop, jnp.int32),
    )  # fmt: skip
    state, rows, reply, caches = made
    replies.append(reply)
  answer = replies[0] if len(hops) == 1 else jnp.concatenate(replies, axis=1)
  return state, caches, answer


def apart(
  config: config_lib.ModelConfig,
  hops: Sequence[segments.Segment],
  group: int,
  tables: int,
  weights: stacked.Weights,
  pool: experts.Pool,
  caches: kv_cache.LayerCache,
  state: steps.State,
  control: jax.Array,
  answers: jax.Array,
) -> Iterator[tuple[steps.State, kv_cache.LayerCache, jax.Array]]:
  """`decode` kernel by kernel, for a recorder; what is left after each hop.

  Between the kernels is nothing that computes: nobody draws or guesses.
  `control` is on the device and has room for so many `tables`; `answers`, int32
  `[tables, group, 2 + T]`, are written over hop by hop.
  """
  begun = _Launch(config, group, tables, weights, pool, control)
  rows = begun.take(state)
  for hop, segment in enumerate(hops):
    if hop:
      rows = begun.agree(rows, hop, state)
    made = _crossed(
      config, segment, (group, tables), weights, pool, caches, state, rows,
      control, jnp.full((1,), hop, jnp.int32), answers,
    )  # fmt: skip
    state, rows, answers, caches = made
    yield state, caches, answers


class _Launch(NamedTuple):
  """What kernels of all hops are given."""

  config: config_lib.ModelConfig
  group: int
  tables: int
  weights: stacked.Weights
  pool: experts.Pool
  control: jax.Array

  def place(self, hop: int) -> kernel_rows.Place:
    """Of the layer that many hops behind the first one."""
    place = _place(self.config, (self.group, self.tables), self.control)
    return place._replace(hop=jnp.full((1,), hop, jnp.int32))

  def take(self, state: steps.State) -> kernel_rows.Rows:
    """The rows out of the state, in front of the first layer's experts."""
    return kernel_rows.take(
      self.config,
      self.weights.layers['mlp_norm'],
      self.group,
      steps.ROWS_START,
      self.place(0),
      kernel_rows.Kept(state.x, state.ids, state.weights, state.registers),
      _COLUMNS,
    )

  def agree(
    self, rows: kernel_rows.Rows, hop: int, state: steps.State
  ) -> kernel_rows.Rows:
    """Those that go on, or none; see `protocols.Launch.together`."""
    nobody = state.x.shape[0]
    return kernel_rows.agree(rows, nobody, steps.TOGETHER, self.place(hop))


def _place(
  config: config_lib.ModelConfig, shape: tuple[int, int], control: jax.Array
) -> kernel_rows.Place:
  """Of the first layer of a launch of `shape`: its group and its hops."""
  return kernel_rows.Place(
    control,
    jnp.zeros((1,), jnp.int32),
    steps.LAYER,
    steps.table_start(config, shape[0], 0),
    shape[1],
    config.num_layers,
    config.num_experts,
  )


def wave(
  config: config_lib.ModelConfig,
  group: int,
  mlp: dict[str, Any],
  pool: experts.Pool,
  state: steps.State,
  control: jax.Array,
) -> tuple[steps.State, jax.Array]:
  """As `steps.wave`; `mlp` is of all layers."""
  control = steps.to_device(control)
  asked = steps.read_control(config, group, 1, control)
  rows = asked.rows
  x, ids, partial = (
    a.at[rows].get(mode='clip') for a in (state.x, state.ids, state.partial)
  )
  table = asked.tables[0]
  slots = table.at[ids].get(mode='clip')
  slots = jnp.where((rows < state.x.shape[0])[:, None], slots, -1)
  scale = mlp['mlp_norm'][control[steps.LAYER]]
  h = norm.rms_norm(x, scale, config.norm_eps)
  place = _place(config, (group, 1), control)
  y = kernel_experts.apply(pool, h, slots, place)
  y = jnp.where((slots >= 0)[:, :, None], y, partial)
  kept = state.partial.at[rows].set(y, mode='drop')
  return state.replace(partial=kept), rows


def _crossed(
  config: config_lib.ModelConfig,
  segment: segments.Segment,
  shape: tuple[int, int],
  weights: stacked.Weights,
  pool: experts.Pool,
  caches: kv_cache.LayerCache,
  state: steps.State,
  rows: kernel_rows.Rows,
  control: jax.Array,
  hop: jax.Array,
  answers: jax.Array | None = None,
) -> tuple[steps.State, kernel_rows.Rows, jax.Array, kv_cache.LayerCache]:
  """From the experts of one layer to the router of the next; see `_Way`."""
  here = _place(config, shape, control)._replace(hop=hop)
  y = kernel_experts.apply(pool, rows.h, rows.slots, here)
  way = _Way(config, segment, weights, here._replace(hop=hop + 1))
  return way.on(state, rows, y, caches, answers)


# A program of its own, so that it is traced once for all hops of a launch.
_cross = jax.jit(_crossed, static_argnums=(0, 1, 2))


class _Way:
  """From the experts of a layer to the next router."""

  def __init__(
    self,
    config: config_lib.ModelConfig,
    segment: segments.Segment,
    weights: stacked.Weights,
    place: kernel_rows.Place,
  ):
    self._config, self._segment, self._weights = config, segment, weights
    self._place, self._p = place, weights.layers

  def on(
    self,
    state: steps.State,
    rows: kernel_rows.Rows,
    y: jax.Array,
    caches: kv_cache.LayerCache,
    answers: jax.Array | None,
  ) -> tuple[steps.State, kernel_rows.Rows, jax.Array, kv_cache.LayerCache]:
    """The state with the rows that came, who goes on, answer and caches.

    The answer is what a hop tells, or `answers` of all hops with its own.
    """
    config, p, place = self._config, self._p, self._place
    state, rows, drawn = self._enter(state, rows, y)
    made = kernel_dense.project(config, p, place, rows)
    mixed, caches = kernel_attention.attend(
      config, p, place, caches, made, rows
    )
    parts = kernel_dense.output(config, p, place, mixed, rows)
    kept = kernel_rows.Kept(state.x, state.ids, state.weights, state.registers)
    found = kernel_router.choose(
      config, p, place, parts, rows, drawn, kept, answers
    )
    state = state.replace(
      x=found.kept_x, ids=found.kept_ids, weights=found.kept_weights
    )
    reply = found.answers[0] if answers is None else found.answers
    if self._segment.gates:
      here = place.layer(*place.operands)
      gates = stacked.plain(self._weights, self._segment, None, here)
      guessed = jnp.concatenate(steps.guesses(config, gates, parts.x), axis=1)
      guessed = jnp.where(reply[:, 1:2] >= 0, guessed, -1)
      reply = jnp.concatenate([reply, guessed], axis=1)
    rows = rows._replace(
      x=parts.x,
      h=found.h,
      slots=found.slots,
      weights=found.weights,
      go=found.go,
    )
    return state, rows, reply, caches

  def _enter(
    self, state: steps.State, rows: kernel_rows.Rows, y: jax.Array
  ) -> tuple[steps.State, kernel_rows.Rows, kernel_router.Drawn | None]:
    """Sums the experts; draws a token where that was the last layer."""
    last = self._segment.head is not None
    scale, place = self._p['attn_norm'], self._place
    if last:
      scale = self._weights.top['final_norm'][None]
      place = place._replace(layers=1)
    x, h = kernel_experts.combine(
      self._config, rows, y, state.partial, scale, place
    )
    rows = rows._replace(x=x, h=h)
    return self._draw(state, rows) if last else (state, rows, None)

  def _draw(
    self, state: steps.State, rows: kernel_rows.Rows
  ) -> tuple[steps.State, kernel_rows.Rows, kernel_router.Drawn]:
    """The first layer is come to, whatever the launch began with."""
    config, nobody = self._config, state.x.shape[0]
    if not self._segment.drawn:
      top, norms = self._weights.top, self._p['attn_norm']
      found = kernel_head.best(top, rows.h, rows.go)
      rows, drawn, registers = kernel_head.draw(
        config, top, norms, found, rows, state.registers, _TAKEN
      )
      return state.replace(registers=registers), rows, drawn
    mine = state.registers.at[rows.numbers].get(mode='clip')
    new, registers, token, sound = steps.next_token(
      config, self._weights.top, rows.x, mine
    )
    going = rows.go > 0
    x = steps.where(going, new, rows.x)
    registers = steps.where(going, registers, mine)
    numbers = jnp.where(going, rows.numbers, nobody)
    kept = state.registers.at[numbers].set(registers, mode='drop')
    positions = registers[:, steps.POSITION]
    cos, sin = rope.turn(config.rope, config.head_dim, positions)
    h = norm.rms_norm(x, self._p['attn_norm'][0], config.norm_eps)
    rows = rows._replace(x=x, h=h, positions=positions, cos=cos, sin=sin)
    drawn = kernel_router.Drawn(token, sound.astype(jnp.int32))
    return state.replace(registers=kept), rows, drawn


_COLUMNS = steps.POSITION, steps.SEED
_TAKEN = steps.TOKEN, steps.POSITION
