"""The jitted functions of a launch: one a kind, shared by all layers.

A segment is what one launch does: the experts of an MoE layer, then whole
layers without experts, up to the attention and the router of the next MoE
layer. Where it passes the end of the model it also runs the head, draws the
next token, embeds it and enters the first layers.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from bevy_jax.layers import (
  block,
  embed,
  experts,
  forced,
  kv_cache,
  router,
  sampling,
)
from bevy_jax.layers import config as config_lib

# Columns of the int32 registers of a row; floats are kept as their bits.
TOKEN, POSITION, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED = range(7)
REGISTERS = 7


class State(flax.struct.PyTreeNode):
  """What the device keeps of every request row between launches.

  Attributes:
    x: `[R, D]`, residual stream after the attention of the layer it is at.
    weights: float32 `[R, T]`, the router's weights there.
    partial: float32 `[R, T, D]`, expert outputs of earlier waves.
    registers: int32 `[R, 7]`: last token, its position, sampling settings.
  """

  x: jax.Array
  weights: jax.Array
  partial: jax.Array
  registers: jax.Array


@dataclasses.dataclass(frozen=True)
class Segment:
  """Static shape of the layers that a launch goes through after its experts.

  Attributes:
    moe: for each layer whether it has experts; only the last one may.
    windows: sliding window of each layer.
    head: how many of the layers come before the head; None without it.
    gates: how many MoE layers behind the last one are guessed.
  """

  moe: tuple[bool, ...]
  windows: tuple[int, ...]
  head: int | None
  gates: int = 0


class Weights(NamedTuple):
  """Shared weights of a segment.

  Attributes:
    mlp: the layer whose experts are applied; empty where none are.
    layers: the layers after it, one dict each.
    top: embedding, final norm and head where needed, else empty.
    gates: norm and router of the MoE layers that are guessed, in order.
  """

  mlp: dict[str, Any]
  layers: tuple[dict[str, Any], ...]
  top: dict[str, Any]
  gates: tuple[dict[str, Any], ...] = ()


def gates(config: config_lib.ModelConfig, layer: int, depth: int) -> list[int]:
  """MoE layers, `depth` at most, that a stream at an MoE layer comes to next.

  Not those of the next token: the stream knows nothing of it.
  """
  return list(range(layer + 1, min(layer + 1 + depth, len(config.moe_ids))))


def segments(
  config: config_lib.ModelConfig,
) -> list[tuple[Segment, tuple[int, ...]]]:
  """For each MoE layer what follows it, and the layer numbers of that."""
  out = []
  for this in config.moe_ids:
    order = [*range(this + 1, config.num_layers), *range(config.moe_ids[0] + 1)]
    stop = next(i for i, layer in enumerate(order) if config.moe_layers[layer])
    head = config.num_layers - this - 1
    out.append(_segment(config, order[: stop + 1], head))
  return out


def entry_segment(
  config: config_lib.ModelConfig,
) -> tuple[Segment, tuple[int, ...]]:
  """What a new token goes through before the first experts."""
  return _segment(config, list(range(config.moe_ids[0] + 1)), config.num_layers)


def prefill_segments(
  config: config_lib.ModelConfig,
) -> list[tuple[Segment, tuple[int, ...]] | None]:
  """As `segments`, without the head; None where nothing is left to write."""
  out: list[tuple[Segment, tuple[int, ...]] | None] = []
  for this in config.moe_ids:
    order = list(range(this + 1, config.num_layers))
    moe = [i for i, layer in enumerate(order) if config.moe_layers[layer]]
    order = order[: moe[0] + 1] if moe else order
    out.append(_segment(config, order, len(order) + 1) if order else None)
  return out


def _segment(
  config: config_lib.ModelConfig, order: list[int], head: int
) -> tuple[Segment, tuple[int, ...]]:
  moe = tuple(config.moe_layers[layer] for layer in order)
  windows = tuple(config.window(layer) for layer in order)
  return Segment(moe, windows, head if head < len(order) else None), tuple(
    order
  )


def decode(
  config: config_lib.ModelConfig,
  segment: Segment,
  group: int,
  weights: Weights,
  pool: experts.Pool,
  caches: tuple[kv_cache.LayerCache, ...],
  state: State,
  control: jax.Array,
) -> tuple[State, tuple[kv_cache.LayerCache, ...], jax.Array]:
  """Applies the last experts of a layer and goes on to the next router.

  `control` is the int32 vector of `work_size(group)`; padding rows are out
  of range, so nothing of theirs is written. Returns the new state, the
  caches, and the answer `[group, 2 + T]`: token or -1, soundness, ids; behind
  them T guessed ids for each of the segment's gates.
  """
  rows, todo = work(config, group, to_device(control))
  mine = jax.tree.map(lambda a: a.at[rows].get(mode='clip'), state)
  y = block.expert_outputs(
    config, weights.mlp, pool, mine.x, todo, mine.partial
  )
  x = block.finish_experts(config, weights.mlp, mine.x, mine.weights, y)
  mine = mine.replace(x=x)
  return _advance(config, segment, weights, caches, state, rows, mine)


def wave(
  config: config_lib.ModelConfig,
  group: int,
  mlp: dict[str, Any],
  pool: experts.Pool,
  state: State,
  control: jax.Array,
) -> tuple[State, jax.Array]:
  """Applies some experts of a layer and keeps their outputs for later."""
  rows, todo = work(config, group, to_device(control))
  mine = jax.tree.map(lambda a: a.at[rows].get(mode='clip'), state)
  y = block.expert_outputs(config, mlp, pool, mine.x, todo, mine.partial)
  partial = state.partial.at[rows].set(y, mode='drop')
  return state.replace(partial=partial), rows


def enter(
  config: config_lib.ModelConfig,
  segment: Segment,
  weights: Weights,
  caches: tuple[kv_cache.LayerCache, ...],
  state: State,
  control: jax.Array,
) -> tuple[State, tuple[kv_cache.LayerCache, ...], jax.Array]:
  """Requests enter their rows; `control` is int32 `[G, 1 + registers]`."""
  control = to_device(control)
  group = control.shape[0] // (1 + REGISTERS)
  control = control.reshape(group, 1 + REGISTERS)
  rows, registers = control[:, 0], control[:, 1:]
  mine = State(
    x=embed.embed(weights.top, registers[:, TOKEN]).astype(state.x.dtype),
    weights=jnp.zeros((group, config.top_k), jnp.float32),
    partial=jnp.zeros((group, *state.partial.shape[1:]), jnp.float32),
    registers=registers,
  )
  return _advance(config, segment, weights, caches, state, rows, mine)


def _advance(
  config: config_lib.ModelConfig,
  segment: Segment,
  weights: Weights,
  caches: tuple[kv_cache.LayerCache, ...],
  state: State,
  rows: jax.Array,
  mine: State,
) -> tuple[State, tuple[kv_cache.LayerCache, ...], jax.Array]:
  """Goes through a segment's layers and writes the rows back."""
  x, registers = mine.x, mine.registers
  new_caches, token, sound, routing = [], None, None, None
  for i, moe in enumerate(segment.moe):
    if segment.head == i:
      x, registers, token, sound = _next_token(config, weights, x, registers)
    positions = registers[:, POSITION, None]
    window, p = segment.windows[i], weights.layers[i]
    out, cache = block.attend(
      config, p, caches[i], window, x[:, None], rows, positions
    )
    x = out[:, 0]
    new_caches.append(cache)
    if moe:
      routing = block.route(config, p, x)
      routing = forced.apply(
        config, p, x, routing, registers[:, SEED], registers[:, POSITION]
      )
    else:
      x = block.dense(config, p, x)
  assert routing is not None, 'a segment ends at a router'
  if token is None or sound is None:
    token, sound = jnp.full_like(rows, -1), jnp.ones(rows.shape, bool)
  reply = answer(token, sound & routing.sound, routing)
  if segment.gates:
    reply = jnp.concatenate([reply, *guesses(config, weights, x)], axis=1)
  new = State(
    x=state.x.at[rows].set(x, mode='drop'),
    weights=state.weights.at[rows].set(routing.weights, mode='drop'),
    partial=state.partial,
    registers=state.registers.at[rows].set(registers, mode='drop'),
  )
  return new, tuple(new_caches), reply


def guesses(
  config: config_lib.ModelConfig, weights: Weights, x: jax.Array
) -> list[jax.Array]:
  """The routers of the next MoE layers on a stream that is not there yet.

  `x` is the stream after the attention of the layer that it is at: all that
  is known when that layer's router speaks. What its experts and the next
  attention will add is missing, so the ids are guesses, int32 `[N, T]` each.
  """
  with jax.named_scope('guess'):
    return [block.route(config, p, x).ids for p in weights.gates]


def _next_token(
  config: config_lib.ModelConfig,
  weights: Weights,
  x: jax.Array,
  registers: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Head, sampling and the embedding of the token drawn."""
  with jax.named_scope('head'):
    logits = embed.logits(config, weights.top, x)
    sound = jnp.all(jnp.isfinite(logits), axis=-1)
    token = sampling.sample(
      logits, _sampling(registers), registers[:, POSITION]
    )
  registers = registers.at[:, TOKEN].set(token)
  registers = registers.at[:, POSITION].add(1)
  return (
    embed.embed(weights.top, token).astype(x.dtype),
    registers,
    token,
    sound,
  )


def _sampling(registers: jax.Array) -> sampling.Sampling:
  def real(column: int) -> jax.Array:
    return jax.lax.bitcast_convert_type(registers[:, column], jnp.float32)

  return sampling.Sampling(
    temperature=real(TEMPERATURE),
    top_k=registers[:, TOP_K],
    top_p=real(TOP_P),
    min_p=real(MIN_P),
    seed=registers[:, SEED],
  )


def work_size(config: config_lib.ModelConfig, rows: int) -> int:
  """Integers of a control vector: count, distinct slots, rows, slots."""
  return 1 + distinct_limit(config, rows) + rows + rows * config.top_k


def distinct_limit(config: config_lib.ModelConfig, rows: int) -> int:
  """Most distinct experts that `rows` tokens can use at one layer."""
  return min(rows * config.top_k, config.num_experts)


def work(
  config: config_lib.ModelConfig, rows: int, control: jax.Array
) -> tuple[jax.Array, block.Work]:
  """Row numbers and expert work of a control vector."""
  m = distinct_limit(config, rows)
  distinct = control[1 : 1 + m]
  numbers = control[1 + m : 1 + m + rows]
  slots = control[1 + m + rows :].reshape(rows, config.top_k)
  return numbers, block.Work(slots, distinct, _count(control[0], m))


def _count(count: jax.Array, limit: int) -> jax.Array | int:
  # A GPU asks the host at every turn of a loop whose length is not static.
  return count if jax.default_backend() == 'cpu' else limit


def to_device(control: jax.Array) -> jax.Array:
  """The program's own copy of a pinned control vector."""
  out: jax.Array = jax.device_put(control, jax.memory.Space.Device)
  return out


def answer(
  token: jax.Array, sound: jax.Array, routing: router.Routing
) -> jax.Array:
  """What the host reads, int32 `[N, 2 + T]`: token, soundness, ids."""
  head = jnp.stack([token, sound.astype(jnp.int32)], axis=1)
  return jnp.concatenate([head, routing.ids], axis=1)


def read(
  config: config_lib.ModelConfig, table: np.ndarray
) -> tuple[
  list[int],
  list[bool],
  list[tuple[int, ...]],
  list[list[tuple[int, ...]]],
]:
  """An answer, int32 `[N, 2 + T + gates * T]`, on the host.

  Tokens, soundness, ids and, where there are gates, guessed ids of each.
  """
  lists, k = table.tolist(), config.top_k
  starts = range(2 + k, table.shape[1], k)
  guessed = [[tuple(r[at : at + k]) for at in starts] for r in lists]
  return (
    [r[0] for r in lists],
    [bool(r[1]) for r in lists],
    [tuple(r[2 : 2 + k]) for r in lists],
    guessed if starts else [],
  )
