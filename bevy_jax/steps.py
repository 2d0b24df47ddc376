"""The jitted functions of a launch: one a kind, shared by all layers.

See `segments` for what a launch goes through. A launch may cross several of
them: a row whose experts can be read at its next router goes on there.
"""

import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from bevy_jax import segments
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
# In a decode launch's control vector.
TOGETHER, LAYER, ROWS_START = range(3)


class State(flax.struct.PyTreeNode):
  """What the device keeps of every request row between launches.

  Attributes:
    x: `[R, D]`, residual stream after the attention of the layer it is at.
    ids: int32 `[R, T]`, the router's choices there.
    weights: float32 `[R, T]`, the router's weights there.
    partial: float32 `[R, T, D]`, expert outputs of earlier waves.
    registers: int32 `[R, 7]`: last token, its position, sampling settings.
  """

  x: jax.Array
  ids: jax.Array
  weights: jax.Array
  partial: jax.Array
  registers: jax.Array


def decode(
  config: config_lib.ModelConfig,
  hops: tuple[segments.Segment, ...],
  group: int,
  weights: tuple[segments.Weights, ...],
  pool: experts.Pool,
  caches: tuple[kv_cache.LayerCache, ...],
  state: State,
  control: jax.Array,
) -> tuple[State, tuple[kv_cache.LayerCache, ...], jax.Array]:
  """Applies the last experts of a layer and goes on to the next router.

  There a row goes on at once, `len(hops)` times in all, where it is sound and
  all its choices lie in slots that the launch may read. It is left as it is
  where it stops: at the router whose experts it awaits.

  `control` is the int32 vector of `control_parts`; padding rows are out of
  range, so they read no expert, and nothing of theirs is written. Returns the
  new state, the caches in the order of all hops' layers, and the answer: for
  each hop `[group, 2 + T]`, token or -1, soundness, ids, and T guessed ids
  for each of its segment's gates; -1 for rows that did not come so far.
  """
  asked = read_control(config, group, len(hops), to_device(control))
  nobody = state.x.shape[0]
  real = asked.rows < nobody
  mine = jax.tree.map(lambda a: a.at[asked.rows].get(mode='clip'), state)
  going, replies, kept = real, [], list(caches)
  done = 0
  for hop, segment in enumerate(hops):
    table = asked.tables[hop]
    if hop:
      going &= block.can_read(table, mine.ids)
      going &= ~asked.together | jnp.all(going | ~real)
    layers = slice(done, done + len(segment.moe))
    done = layers.stop
    rows = jnp.where(going, asked.rows, nobody)
    came = _apply(config, weights[hop], pool, table, mine, going)
    came, kept[layers], reply, sound = _advance(
      config, segment, weights[hop], tuple(kept[layers]), rows, came
    )
    replies.append(jnp.where(going[:, None], reply, -1))
    mine = jax.tree.map(functools.partial(where, going), came, mine)
    going &= sound
  answer = jnp.concatenate(replies, axis=1)
  return put(state, asked.rows, mine), tuple(kept), answer


def wave(
  config: config_lib.ModelConfig,
  group: int,
  mlp: dict[str, Any],
  pool: experts.Pool,
  state: State,
  control: jax.Array,
) -> tuple[State, jax.Array]:
  """Applies some experts of a layer and keeps their outputs for later."""
  asked = read_control(config, group, 1, to_device(control))
  rows = asked.rows
  mine = jax.tree.map(lambda a: a.at[rows].get(mode='clip'), state)
  todo = _work(config, asked.tables[0], mine.ids, rows < state.x.shape[0])
  y = block.expert_outputs(config, mlp, pool, mine.x, todo, mine.partial)
  partial = state.partial.at[rows].set(y, mode='drop')
  return state.replace(partial=partial), rows


def enter(
  config: config_lib.ModelConfig,
  segment: segments.Segment,
  weights: segments.Weights,
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
    ids=jnp.zeros((group, config.top_k), jnp.int32),
    weights=jnp.zeros((group, config.top_k), jnp.float32),
    partial=jnp.zeros((group, *state.partial.shape[1:]), jnp.float32),
    registers=registers,
  )
  mine, caches, reply, _ = _advance(
    config, segment, weights, caches, rows, mine
  )
  return put(state, rows, mine), caches, reply


def _apply(
  config: config_lib.ModelConfig,
  weights: segments.Weights,
  pool: experts.Pool,
  table: jax.Array,
  mine: State,
  going: jax.Array,
) -> State:
  """The rows that go on with their experts applied."""
  todo = _work(config, table, mine.ids, going)
  y = block.expert_outputs(
    config, weights.mlp, pool, mine.x, todo, mine.partial
  )
  x = block.finish_experts(config, weights.mlp, mine.x, mine.weights, y)
  return mine.replace(x=x)


def _work(
  config: config_lib.ModelConfig,
  table: jax.Array,
  ids: jax.Array,
  going: jax.Array,
) -> block.Work:
  most = distinct_limit(config, ids.shape[0])
  found = block.work(table, ids, going, most)
  return found._replace(reads=reads(found.reads, most))


def _advance(
  config: config_lib.ModelConfig,
  segment: segments.Segment,
  weights: segments.Weights,
  caches: tuple[kv_cache.LayerCache, ...],
  rows: jax.Array,
  mine: State,
) -> tuple[State, tuple[kv_cache.LayerCache, ...], jax.Array, jax.Array]:
  """Rows through a segment's layers, their answer, and who is sound."""
  x, registers = mine.x, mine.registers
  new_caches, token, sound, routing = [], None, None, None
  for i, moe in enumerate(segment.moe):
    if segment.head == i:
      x, registers, token, sound = next_token(
        config, weights.top, x, registers, drawn=segment.drawn
      )
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
  sound &= routing.sound
  reply = answer(token, sound, routing)
  if segment.gates:
    reply = jnp.concatenate([reply, *guesses(config, weights, x)], axis=1)
  mine = mine.replace(
    x=x, ids=routing.ids, weights=routing.weights, registers=registers
  )
  return mine, tuple(new_caches), reply, sound


def put(state: State, rows: jax.Array, mine: State) -> State:
  """Writes rows back; what waves have kept is used up by then."""

  def put(all_rows: jax.Array, some: jax.Array) -> jax.Array:
    return all_rows.at[rows].set(some, mode='drop')

  return State(
    x=put(state.x, mine.x),
    ids=put(state.ids, mine.ids),
    weights=put(state.weights, mine.weights),
    partial=state.partial,
    registers=put(state.registers, mine.registers),
  )


def where(going: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
  """Row by row."""
  shape = (-1,) + (1,) * (new.ndim - 1)
  return jnp.where(going.reshape(shape), new, old)


def guesses(
  config: config_lib.ModelConfig, weights: segments.Weights, x: jax.Array
) -> list[jax.Array]:
  """The routers of the next MoE layers on a stream that is not there yet.

  `x` is the stream after the attention of the layer that it is at: all that
  is known when that layer's router speaks. What its experts and the next
  attention will add is missing, so the ids are guesses, int32 `[N, T]` each.
  """
  with jax.named_scope('guess'):
    return [block.route(config, p, x).ids for p in weights.gates]


def next_token(
  config: config_lib.ModelConfig,
  top: dict[str, Any],
  x: jax.Array,
  registers: jax.Array,
  *,
  drawn: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Head, sampling and the embedding of the token drawn.

  Where it is known that nobody draws, the likeliest token is all.
  """
  with jax.named_scope('head'):
    logits = embed.logits(config, top, x)
    sound = jnp.all(jnp.isfinite(logits), axis=-1)
    if drawn:
      token = sampling.sample(
        logits, _sampling(registers), registers[:, POSITION]
      )
    else:
      token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  registers = registers.at[:, TOKEN].set(token)
  registers = registers.at[:, POSITION].add(1)
  return (
    embed.embed(top, token).astype(x.dtype),
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


class Asked(NamedTuple):
  """A decode launch's control vector, taken apart.

  Attributes:
    rows: int32 `[G]`; a row number out of range is padding.
    tables: int32 `[hops, E]`, see `protocols.Batch`.
    together: bool, see `protocols.Batch`.
  """

  rows: jax.Array
  tables: jax.Array
  together: jax.Array


def control_parts(
  config: config_lib.ModelConfig, group: int, hops: int
) -> list[tuple[int, ...]]:
  """Shapes in a control vector: `together`, first layer, rows, tables."""
  return [(1,), (1,), (group,), (hops, config.num_experts)]


def read_control(
  config: config_lib.ModelConfig, group: int, hops: int, control: jax.Array
) -> Asked:
  """Takes a vector of `control_parts` apart."""
  first = table_start(config, group, 0)
  tables = control[first:].reshape(hops, config.num_experts)
  return Asked(control[ROWS_START:first], tables, control[TOGETHER] > 0)


def table_start(config: config_lib.ModelConfig, group: int, hop: int) -> int:
  """Where a hop's table begins in such a vector."""
  return ROWS_START + group + hop * config.num_experts


def distinct_limit(config: config_lib.ModelConfig, rows: int) -> int:
  """Most distinct experts that `rows` tokens can use at one layer."""
  return min(rows * config.top_k, config.num_experts)


def reads(count: jax.Array | int, limit: int) -> jax.Array | int:
  """How many distinct slots to walk over, `count` of `limit` being there."""
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
