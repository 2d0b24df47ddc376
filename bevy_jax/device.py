"""The executor on a real device: JAX, pinned buffers, row buckets."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bevy_jax import config as config_lib
from bevy_jax import (
  control,
  hops,
  links,
  padding,
  prompt_steps,
  protocols,
  steps,
)
from bevy_jax import programs as programs_lib
from bevy_jax.layers import config as model_config
from bevy_jax.layers import (
  experts,
  kernels,
  kv_cache,
  quant,
)
from bevy_jax.layers import (
  params as params_lib,
)
from bevy_jax.offload import pinned, staging
from bevy_jax.offload import store as store_lib
from bevy_jax.offload import transfer as transfer_lib

# Longer than any number of launches in flight that a scheduler may ask for.
_RING = 8
_NAP = 30e-6  # Seconds between looks while both link and device are busy.


class _Running(NamedTuple):
  number: int
  answer: jax.Array
  rows: int
  gates: tuple[int, ...]


class DeviceExecutor:
  """See `protocols.Executor`; owns the pool, the row state and the caches.

  Attributes:
    chunk: prompt tokens a row that one prefill launch takes.
    hops: layers that a launch can cross at most.
    rows: R, request rows.
    slots: size of the pool.
    pool_bytes: its bytes, scales included.
    link: what carries the loads.
  """

  def __init__(
    self,
    model: model_config.ModelConfig,
    params: dict[str, Any],
    store: store_lib.Store,
    config: config_lib.EngineConfig,
    context: int,
    form: quant.Format | None = None,
  ):
    self.rows, self.chunk = config.requests, config.chunk
    self.hops = hops.most(config.hops, len(model.moe_ids))
    self._model, self._context, self._store = model, context, store
    self._dtype = params['embed'].dtype
    self._device = jax.devices()[0]
    self._layout = quant.layout(form, model.expert_shape) if form else None
    # Packed experts lie in their slots as they are stored.
    kind = jnp.dtype(jnp.uint8) if form else self._dtype
    block = transfer_lib.pool_bytes(1, store.shape, kind)
    self.slots = config_lib.slots(config, model, block)
    self.kernels = _kernels(config.kernels, model, self._dtype, form)
    if self.kernels:
      layers = [_merged(layer) for layer in params['layers']]
      params = params | {'layers': layers}
    quota = config_lib.quota(config, len(model.moe_ids), self.slots)
    self._room = min(quota, default=self.slots)  # For one layer's experts.
    room = kernels.slots_of(self.slots, block, form)
    self.pool_bytes = room * block
    kv = kv_cache.nbytes(model, self.rows, context, self._dtype)
    config_lib.check_memory(config, self.pool_bytes, kv, self._device)
    # Committed arrays: what a program returns is committed too, and a program
    # that gets both kinds is compiled twice.
    home = jax.sharding.SingleDeviceSharding(self._device)
    self._pool, self._caches, self._state, params = jax.device_put(
      (
        jnp.zeros((room, *store.shape), kind),
        list(kv_cache.init(model, self.rows, context, self._dtype)),
        _empty_state(model, self.rows, self._dtype),
        params,
      ),
      home,
    )
    self._prompt: prompt_steps.Prompt | None = None
    self._programs = programs_lib.Programs(
      model,
      params,
      self.rows,
      config.strict,
      self._device,
      self.hops,
      self.kernels,
    )
    self._write = jax.jit(
      transfer_lib.write_slots,
      static_argnums=3,
      donate_argnums=0,
      out_shardings=home,
    )
    buckets = self._programs.buckets
    self._buckets = [
      next(n for n in buckets if n >= rows) for rows in range(self.rows + 1)
    ]
    # Where the host block itself arrives, somebody must tell when it is read.
    self._told = self._device.platform == 'cpu'
    self._set_link(config.link)
    self._running: deque[_Running] = deque()
    # Whether each row draws its tokens; the last one is padding.
    self._draws = [False] * (self.rows + 1)
    self._warm_to_draw = not self.kernels
    self._controls = control.Controls(model, self.chunk, _RING, self._device)
    self._warm_up()
    self._warm_gates = {0}

  def now(self) -> int:
    """See `Executor`."""
    return time.perf_counter_ns()

  def load(self, key: int, slot: int) -> None:
    """See `Executor`."""
    self._transfer.begin(key, slot)

  def launch(self, number: int, batch: protocols.Batch) -> None:
    """See `Executor`."""
    assert len(self._running) < _RING, 'a control buffer would be in use'
    # Behind the launch, device_put would wait for it.
    self._transfer.flush()
    gates: tuple[int, ...] = (0,) if batch.finish else ()
    rows = len(batch.rows)
    if batch.kind == 'decode':
      answer, gates = self._decode(batch)
    elif batch.kind == 'enter':
      answer, rows = self._enter(batch.entries), len(batch.entries)
      gates = (self._programs.enter.segment.gates,)
    elif batch.chunk is not None:
      answer = self._prefill_begin(batch.chunk)
    else:
      answer = self._prefill(batch)
    self._running.append(_Running(number, answer, rows, gates))

  def poll(
    self,
  ) -> list[protocols.Happened]:
    """See `Executor`."""
    events: list[protocols.Happened] = []
    moved = self._transfer.arrived()
    if moved:
      now = self.now()
      self._write_slots([m for m in moved if m.block is not None])
      for m in moved:
        failed = m.fault and protocols.Failed(now, m.key, m.fault)
        events.append(failed or protocols.Landed(now, m.key, m.read))
    while self._running and transfer_lib.is_ready(self._running[0].answer):
      events.append(self._ended(self._running.popleft()))
    return events

  def wait(self) -> None:
    """See `Executor`."""
    if self._running and not self._transfer.pending():
      self._running[0].answer.block_until_ready()
      return
    assert self._running or self._transfer.pending(), 'nothing to wait for'
    self._transfer.flush()
    due = self._transfer.due()
    if self._running or due is None:
      time.sleep(_NAP)
    else:
      time.sleep(max(0, due - self.now()) * 1e-9)

  def drain(self, link: str = '') -> None:
    """Forgets everything in flight; changes the link where one is given.

    What an abandoned engine began is of no use to the next one, which also
    begins with a cold cache in host memory.
    """
    self.close()
    self._store.clear()
    self._set_link(link or self._asked)

  def set_gates(self, depth: int) -> None:
    """Lets decode answers guess for so many MoE layers ahead; 0 for none.

    A number that was not asked for before is compiled first.
    """
    assert not self._running, 'launches in flight answer as they were begun'
    self._programs.set_gates(depth)
    if depth not in self._warm_gates:
      self._warm_gates.add(depth)
      for batch in padding.decode(
        self._programs, self._model, self.rows, self._room
      ):
        self._run_padding(batch)

  def fill_caches(self, seed: int) -> None:
    """Random keys and values at all positions: a context nobody computed."""
    self._idle()
    self._caches = kv_cache.randomize(self._caches, seed)

  def close(self) -> None:
    """See `Executor`."""
    self._idle()
    self._transfer.close()

  def _idle(self) -> None:
    while self._running:
      self._running.popleft().answer.block_until_ready()
    jax.block_until_ready(self._pool)

  def compilations(self) -> int:
    """How many programs have been compiled so far."""
    return self._programs.compilations() + programs_lib.compiled(self._write)

  def set_choices(self, choices: Sequence[Sequence[int]]) -> None:
    """What the first rows are said to have chosen; for measurements."""
    ids = np.zeros((self.rows, self._model.top_k), np.int32)
    ids[: len(choices)] = choices or 0
    home = jax.sharding.SingleDeviceSharding(self._device)
    self._state = self._state.replace(ids=jax.device_put(ids, home))

  def slot_bytes(self, slot: int) -> np.ndarray:
    """What lies in a slot now, in the stored type; for checks, it waits."""
    block = np.asarray(self._pool[slot])
    return block.astype(self._store.dtype)

  def _ended(self, running: _Running) -> protocols.Ended:
    if not running.gates:
      return protocols.Ended(self.now(), running.number, ())
    table = np.asarray(running.answer)
    if running.rows:
      table = table[: running.rows]
    answer = steps.read(self._model.top_k, table, running.gates)
    return protocols.Ended(self.now(), running.number, answer)

  def _enter(self, entries: Sequence[protocols.Entry]) -> jax.Array:
    group = self._buckets[len(entries)]
    (table,), array = self._controls.take('enter', group)
    table[:, 0] = self.rows
    for line, entry in zip(table, entries, strict=False):
      line[:] = [entry.row, *control.registers(entry)]
      draws = entry.sampling.temperature > 0
      self._draws[entry.row] = draws
      if draws and not self._warm_to_draw:
        self._warm_to_draw = True
        self._warm_draws()
    stage = self._programs.enter
    program = self._programs.get('enter', stage.segment)
    caches = self._caches_of(stage)
    self._state, caches, answer = program(
      stage.weights, caches, self._state, array
    )
    self._keep(stage, caches)
    return answer

  def _decode(
    self, batch: protocols.Batch
  ) -> tuple[jax.Array, tuple[int, ...]]:
    """The answer that will come, and how many layers each hop guesses."""
    assert batch.tables is not None, 'no expert can be read'
    count, crossed = len(batch.rows), len(batch.tables)
    group = self._buckets[count]
    (flags, rows, tables), array = self._controls.take('decode', group, crossed)
    flags[0] = batch.together
    rows[:count], rows[count:] = batch.rows, self.rows
    tables[:] = batch.tables
    if not batch.finish:
      wave = self._programs.wave('wave', group)
      self._state, answer = wave(
        self._programs.mlp(batch.layer), self._experts(), self._state, array
      )
      return answer, ()
    drawn = any([self._draws[row] for row in batch.rows])
    stage = self._programs.launcher(batch.layer, crossed, group, drawn)
    caches = [self._caches[i] for i in stage.order]
    self._state, caches, answer = stage.program(
      stage.weights, self._experts(), caches, self._state, array
    )
    for i, cache in zip(stage.order, caches, strict=True):
      self._caches[i] = cache
    return answer, stage.gates

  def _prefill_begin(self, chunk: protocols.Chunk) -> jax.Array:
    buckets, t = self._programs.prompt_buckets, self.chunk
    b = next(n for n in buckets if n >= len(chunk.rows))
    (rows, tokens, positions), array = self._controls.take('prompt', b)
    rows[:], tokens[:], positions[:] = self.rows, 0, self._context
    for i, row in enumerate(chunk.rows):
      ids, start = chunk.tokens[i], chunk.starts[i]
      rows[i] = row
      tokens[i, : len(ids)] = ids
      positions[i, : len(ids)] = range(start, start + len(ids))
    stage = self._programs.entry
    program = self._programs.get('prefill_begin', stage.segment, (b, t))
    caches = self._caches_of(stage)
    self._prompt, caches, answer = program(stage.weights, caches, array)
    self._keep(stage, caches)
    return answer

  def _prefill(self, batch: protocols.Batch) -> jax.Array:
    assert self._prompt is not None, 'no chunk has begun'
    tokens = self._prompt.weights.shape[0]
    (count, distinct, slots), array = self._controls.take('prefill', tokens)
    count[0] = len(batch.distinct)
    distinct[: count[0]], distinct[count[0] :] = batch.distinct, -1
    slots[: len(batch.slots)] = batch.slots or -1
    slots[len(batch.slots) :] = -1
    if not batch.finish:
      wave = self._programs.wave('prefill_wave')
      self._prompt, answer = wave(
        self._programs.mlp(batch.layer), self._experts(), self._prompt, array
      )
      return answer
    stage = self._programs.prefill[batch.layer]
    assert stage is not None, 'nothing lies behind these experts'
    program = self._programs.get('prefill', stage.segment)
    caches = self._caches_of(stage)
    self._prompt, caches, answer = program(
      stage.weights, self._experts(), caches, self._prompt, array
    )
    self._keep(stage, caches)
    return answer

  def _write_slots(self, moved: list[transfer_lib.Moved]) -> None:
    for i in range(0, len(moved), transfer_lib.BATCHES[-1]):
      some = moved[i : i + transfer_lib.BATCHES[-1]]
      size = next(n for n in transfer_lib.BATCHES if n >= len(some))
      whole = some + [some[-1]] * (size - len(some))
      slots = np.array([m.slot for m in whole], np.int32)
      blocks = [m.block for m in whole]
      self._pool, token = self._write(self._pool, slots, blocks, self._told)
      self._transfer.written(some, token)

  def _experts(self) -> experts.Pool:
    if self._layout is None:
      plain: jax.Array = self._pool
      return plain
    return quant.Packed(self._pool, self._layout)

  def _caches_of(self, stage: programs_lib.Stage) -> Any:
    return tuple(self._caches[layer] for layer in stage.order)

  def _keep(self, stage: programs_lib.Stage, caches: Any) -> None:
    for layer, cache in zip(stage.order, caches, strict=True):
      self._caches[layer] = cache

  def _set_link(self, link: str) -> None:
    self._asked = link
    self.link = links.resolve(
      link, self._device, self._store.dtype, self._pool.dtype
    )
    self._transfer = staging.Staging(
      self._store,
      links.make(self.link, self._store, self._pool, self._device, self.now),
    )

  def _run_padding(self, batch: protocols.Batch) -> None:
    self.launch(-1, batch)
    self._idle()

  def _warm_draws(self) -> None:
    """Compiles what rows that draw need, when the first of them enters."""
    self._draws[self.rows] = True
    for batch in padding.decode(
      self._programs, self._model, self.rows, self._room
    ):
      if batch.kind == 'decode' and batch.finish:
        self._decode(batch)[0].block_until_ready()
    self._draws[self.rows] = False

  def _warm_up(self) -> None:
    """Compiles every program by running it on padding alone."""
    for batch in padding.batches(
      self._programs, self._model, self.rows, self._room
    ):
      self._run_padding(batch)
    # Direct copies write no slots; who leaves them for device_put compiles.
    if self.link.transfer == 'cuda':
      return
    # Any block does, and those of the store may still be on disk.
    memory = pinned.JaxMemory(
      self._store.shape, self._store.dtype, self._device
    )
    block = memory.block()
    block.view[...] = 0
    transfer = transfer_lib.DevicePut(lambda key: block, self._device)
    for size in transfer_lib.BATCHES:
      for _ in range(size):
        transfer.begin(0, 0)
      moved: list[transfer_lib.Moved] = []
      while len(moved) < size:
        moved += transfer.arrived()
      self._write_slots(moved)
    self._idle()


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


def _kernels(
  asked: str,
  model: model_config.ModelConfig,
  dtype: jnp.dtype,
  form: quant.Format | None,
) -> bool:
  """Whether decode launches go through the GPU kernels.

  Raises:
    ValueError: they are asked for and cannot serve the model.
  """
  why = kernels.unfit(model, dtype, form)
  if asked == 'on' and why:
    raise ValueError(
      f'kernels is on, but {why}. Leave it at auto, which takes the plain form '
      'of such a model.'
    )
  on_gpu = jax.default_backend() == 'gpu' and dtype == jnp.bfloat16
  return asked == 'on' or (asked == 'auto' and on_gpu and not why)


_merged = jax.jit(params_lib.merged)
