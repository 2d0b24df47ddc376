"""The device's side of every kind of launch: what it begins and leaves."""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bevy_jax import (
  control,
  graphs,
  padding,
  prompt_steps,
  protocols,
  recorder,
  steps,
)
from bevy_jax import programs as programs_lib
from bevy_jax.layers import config as model_config
from bevy_jax.layers import experts, kv_cache

_MANY_CORES = 4


class Begun(NamedTuple):
  """A launch on the device.

  Attributes:
    answer: what it will answer; `graphs.Answer` where it is no launch of XLA.
    rows: of the answer that count; 0 for all.
    gates: how many layers each hop guesses; empty where nothing is answered.
  """

  answer: Any
  rows: int
  gates: tuple[int, ...]


class _Call(NamedTuple):
  """A launch that is about to be begun.

  Attributes:
    program: the jitted function.
    arguments: what it is given.
    left: the attribute of `Launches` that its first result replaces.
    order: the layers whose caches are its second one; None without.
  """

  program: Any
  arguments: tuple[Any, ...]
  left: str
  order: Sequence[int] | None = None


class Launches:
  """Begins launches; keeps the rows' state and caches between them.

  Attributes:
    programs: what is run.
  """

  def __init__(
    self,
    model: model_config.ModelConfig,
    programs: programs_lib.Programs,
    device: jax.Device,
    *,
    rows: int,
    chunk: int,
    context: int,
    room: int,
    ring: int,
  ):
    """Makes empty rows and caches on the device.

    Args:
      model: whose launches.
      programs: its programs; their shared weights tell the type of all this.
      device: where.
      rows: R; also the number of the row that is nobody's.
      chunk: prompt tokens a row that one prefill launch takes.
      context: positions of a row.
      room: slots for the experts of one layer.
      ring: more than there are ever launches in flight.
    """
    self.programs = programs
    self._model, self._nobody, self._chunk = model, rows, chunk
    self._context, self._room = context, room
    dtype = programs.dtype
    self._home = jax.sharding.SingleDeviceSharding(device)
    # Committed arrays: what a program returns is committed too, and a program
    # that gets both kinds is compiled twice.
    make = kv_cache.stacked if programs.kernels else kv_cache.init
    self._caches: Any
    self._caches, self._state = jax.device_put(
      (
        make(model, rows, context, dtype),
        _empty_state(model, rows, dtype),
      ),
      self._home,
    )
    self._prompt: prompt_steps.Prompt | None = None
    buckets = programs.buckets
    self._buckets = [
      next(n for n in buckets if n >= count) for count in range(rows + 1)
    ]
    # Whether each row draws its tokens; the last one is padding.
    self._draws = [False] * (rows + 1)
    self._warm_to_draw = not programs.kernels
    self._graphs: graphs.Graphs | None = None
    self._ring, self._device = ring, device
    self._controls = control.Controls(model, chunk, ring, device)

  def begin(self, batch: protocols.Batch, pool: experts.Pool) -> Begun:
    """Begins a launch that reads its experts from a pool."""
    if batch.kind == 'decode':
      found = self._graph_of(batch)
      if found is not None:
        return self._replay(found, batch)
      call, gates = self._decode(batch, pool)
      return Begun(self._run(call), len(batch.rows), gates)
    if batch.kind == 'enter':
      gates = (self.programs.enter.segment.gates,)
      answer = self._run(self._enter(batch.entries, pool))
      return Begun(answer, len(batch.entries), gates)
    if batch.chunk is not None:
      call = self._prefill_begin(batch.chunk)
    else:
      call = self._prefill(batch, pool)
    return Begun(self._run(call), 0, (0,) if batch.finish else ())

  def record(self, pool: experts.Pool, capture: recorder.Capture) -> None:
    """From now on decode launches are graphs of our own, where nobody draws.

    Nothing may be in flight.

    Args:
      pool: that all of them will read; it must stay where it is.
      capture: how their kernels are noted.
    """
    first, last = self.programs.decode[0], self.programs.decode[-1]
    longest: dict[int, int] = {}
    for layer, hops in self.programs.sizes():
      head = self._head_in(layer, hops)
      longest[head] = max(longest.get(head, 0), hops)
    kinds = recorder.Kinds(
      first.segment,
      dataclasses.replace(last.segment, drawn=False),
      longest,
      max(longest.values()),
      self.programs.buckets,
    )
    weights: Any = last.weights
    given = recorder.Given(weights, pool, self._caches, self._state)
    chains, given, held = recorder.record(self._model, kinds, given, capture)
    self._caches, self._state = given.caches, given.state
    self._graphs = capture.graphs(chains, held, self._ring, self._device)
    self._where = self._addresses(pool)

  def check(self, pool: experts.Pool) -> None:
    """Whether all that graphs are given lies where it did; nobody may run."""
    if self._graphs is not None:
      assert self._where == self._addresses(pool), 'an array has moved'

  def compile(
    self, batches: Iterable[protocols.Batch], pool: experts.Pool
  ) -> None:
    """Compiles what some decode launches run, several at a time.

    Nothing is run: the first launch of each still prepares its program, but
    does not wait for the compiler. Few cores are busy with one at a time.
    """
    if (os.cpu_count() or 1) < _MANY_CORES:
      return
    calls = [
      self._decode(batch, pool)[0]
      for batch in batches
      if batch.kind == 'decode' and self._graph_of(batch) is None
    ]
    with futures.ThreadPoolExecutor(os.cpu_count()) as threads:
      list(threads.map(_compile, calls))

  def fill_caches(self, seed: int) -> None:
    """Random keys and values at all positions: a context nobody computed."""
    self._caches = kv_cache.randomize(self._caches, seed)

  def set_choices(self, choices: Sequence[Sequence[int]]) -> None:
    """What the first rows are said to have chosen; for measurements."""
    ids = np.zeros((self._nobody, self._model.top_k), np.int32)
    ids[: len(choices)] = choices or 0
    # In place: graphs know where the state lies.
    ids = jax.jit(lambda old, new: old.at[:].set(new), donate_argnums=0)(
      self._state.ids, jax.device_put(ids, self._home)
    )
    self._state = self._state.replace(ids=ids)

  def _enter(
    self, entries: Sequence[protocols.Entry], pool: experts.Pool
  ) -> _Call:
    group = self._buckets[len(entries)]
    (table,), array = self._controls.take('enter', group)
    table[:, 0] = self._nobody
    for line, entry in zip(table, entries, strict=False):
      line[:] = [entry.row, *control.registers(entry)]
      draws = entry.sampling.temperature > 0
      self._draws[entry.row] = draws
      if draws and not self._warm_to_draw:
        self._warm_to_draw = True
        self._warm_draws(pool)
    stage = self.programs.enter
    program = self.programs.get('enter', stage.segment)
    caches = self._caches_of(stage.order)
    given = stage.weights, caches, self._state, array
    return _Call(program, given, '_state', stage.order)

  def _addresses(self, pool: experts.Pool) -> list[int]:
    leaves = jax.tree.leaves((pool, self._caches, self._state))
    return [leaf.unsafe_buffer_pointer() for leaf in leaves]

  def _graph_of(self, batch: protocols.Batch) -> graphs.Slot | None:
    """The graph that such a launch is, if any: nobody draws or guesses."""
    if self._graphs is None or not batch.finish or batch.tables is None:
      return None
    crossed = len(batch.tables)
    head = self._head_in(batch.layer, crossed)
    if head >= 0 and any([self._draws[row] for row in batch.rows]):
      return None
    if self.programs.decode[0].segment.gates:
      return None
    rows = len(batch.rows)
    # One row, or one layer: nothing to agree on, and the same graph.
    together = batch.together and crossed > 1 and rows > 1
    return self._graphs.take(self._buckets[rows], crossed, head, together)

  def _head_in(self, layer: int, hops: int) -> int:
    """The hop of a launch that passes the head; -1 where none does."""
    place = len(self.programs.decode) - 1 - layer
    return place if place < hops else -1

  def _replay(self, slot: graphs.Slot, batch: protocols.Batch) -> Begun:
    assert self._graphs is not None, 'there are no graphs'
    crossed = self._fill(slot.parts, batch)
    answer = self._graphs.launch(slot)
    return Begun(answer, len(batch.rows), (0,) * crossed)

  def _fill(self, parts: Sequence[np.ndarray], batch: protocols.Batch) -> int:
    """Writes a control vector; how many layers it tells of."""
    assert batch.tables is not None, 'no expert can be read'
    together, first, rows, tables = parts
    count = len(batch.rows)
    together[0], first[0] = batch.together, batch.layer
    rows[:count], rows[count:] = batch.rows, self._nobody
    tables[:] = batch.tables
    return len(tables)

  def _decode(
    self, batch: protocols.Batch, pool: experts.Pool
  ) -> tuple[_Call, tuple[int, ...]]:
    """What to run, and how many layers each hop of its answer guesses."""
    assert batch.tables is not None, 'no expert can be read'
    crossed, group = len(batch.tables), self._buckets[len(batch.rows)]
    parts, array = self._controls.take('decode', group, crossed)
    self._fill(parts, batch)
    if not batch.finish:
      wave = self.programs.wave('wave', group)
      given: Any = self.programs.mlp(batch.layer), pool, self._state, array
      return _Call(wave, given, '_state'), ()
    drawn = any([self._draws[row] for row in batch.rows])
    stage = self.programs.launcher(batch.layer, crossed, group, drawn)
    caches = self._caches_of(stage.order)
    given = stage.weights, pool, caches, self._state, array
    return _Call(stage.program, given, '_state', stage.order), stage.gates

  def _prefill_begin(self, chunk: protocols.Chunk) -> _Call:
    buckets, t = self.programs.prompt_buckets, self._chunk
    b = next(n for n in buckets if n >= len(chunk.rows))
    (rows, tokens, positions), array = self._controls.take('prompt', b)
    rows[:], tokens[:], positions[:] = self._nobody, 0, self._context
    for i, row in enumerate(chunk.rows):
      ids, start = chunk.tokens[i], chunk.starts[i]
      rows[i] = row
      tokens[i, : len(ids)] = ids
      positions[i, : len(ids)] = range(start, start + len(ids))
    stage = self.programs.entry
    program = self.programs.get('prefill_begin', stage.segment, (b, t))
    given = stage.weights, self._caches_of(stage.order), array
    return _Call(program, given, '_prompt', stage.order)

  def _prefill(self, batch: protocols.Batch, pool: experts.Pool) -> _Call:
    assert self._prompt is not None, 'no chunk has begun'
    tokens = self._prompt.weights.shape[0]
    parts, array = self._controls.take('prefill', tokens)
    count, layer, distinct, slots = parts
    count[0], layer[0] = len(batch.distinct), batch.layer
    distinct[: count[0]], distinct[count[0] :] = batch.distinct, -1
    slots[: len(batch.slots)] = batch.slots or -1
    slots[len(batch.slots) :] = -1
    if not batch.finish:
      wave = self.programs.wave('prefill_wave')
      given: Any = self.programs.mlp(batch.layer), pool, self._prompt, array
      return _Call(wave, given, '_prompt')
    stage = self.programs.prefill[batch.layer]
    assert stage is not None, 'nothing lies behind these experts'
    program = self.programs.get('prefill', stage.segment)
    caches = self._caches_of(stage.order)
    given = stage.weights, pool, caches, self._prompt, array
    return _Call(program, given, '_prompt', stage.order)

  def _run(self, call: _Call) -> jax.Array:
    """Begins it and keeps what it leaves; its answer comes last."""
    kept, *caches, answer = call.program(*call.arguments)
    setattr(self, call.left, kept)
    if call.order is not None:
      self._keep(call.order, caches[0])
    out: jax.Array = answer
    return out

  def _caches_of(self, order: Sequence[int]) -> Any:
    if self.programs.kernels:
      return self._caches  # All layers' in one.
    return tuple([self._caches[layer] for layer in order])

  def _keep(self, order: Sequence[int], caches: Any) -> None:
    if self.programs.kernels:
      self._caches = caches
      return
    for layer, cache in zip(order, caches, strict=True):
      self._caches[layer] = cache

  def _warm_draws(self, pool: experts.Pool) -> None:
    """Compiles what rows that draw need, when the first of them enters."""
    self._draws[self._nobody] = True
    batches = [
      batch
      for batch in padding.decode(
        self.programs, self._model, self._nobody, self._room
      )
      if batch.kind == 'decode' and batch.finish
    ]
    self.compile(batches, pool)
    for batch in batches:
      self.begin(batch, pool).answer.block_until_ready()
    self._draws[self._nobody] = False


def _compile(call: _Call) -> None:
  call.program.lower(*call.arguments).compile()


def _empty_state(
  model: model_config.ModelConfig, rows: int, dtype: jnp.dtype
) -> steps.State:
  k, d = model.top_k, model.model_dim
  return steps.State(
    x=jnp.zeros((rows, d), dtype),
    ids=jnp.zeros((rows, k), jnp.int32),
    weights=jnp.zeros((rows, k), jnp.float32),
    partial=jnp.zeros((rows, k, d), jnp.float32),
    registers=jnp.zeros((rows, steps.REGISTERS), jnp.int32),
  )
