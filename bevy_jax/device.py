"""The executor on a real device: JAX, pinned buffers, row buckets."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bevy_jax import config as config_lib
from bevy_jax import (
  graphs,
  hop_table,
  hops,
  launches,
  links,
  padding,
  protocols,
  recorder,
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
_LONG = 8  # Hops of an answer that is told in short where it can be.
_NAP = 30e-6  # Seconds between looks while both link and device are busy.


class DeviceExecutor:
  """See `protocols.Executor`; owns the pool and what fills it.

  Attributes:
    chunk: prompt tokens a row that one prefill launch takes.
    hops: layers that a launch can cross at most.
    rows: R, request rows.
    slots: size of the pool.
    pool_bytes: its bytes, scales included.
    kernels: whether decode launches go through the GPU kernels.
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
    self._model, self._store = model, store
    dtype = params['embed'].dtype
    self._device = jax.devices()[0]
    self._layout = quant.layout(form, model.expert_shape) if form else None
    # Packed experts lie in their slots as they are stored.
    kind = jnp.dtype(jnp.uint8) if form else dtype
    block = transfer_lib.pool_bytes(1, store.shape, kind)
    self.slots = config_lib.slots(config, model, block)
    self.kernels = kernels.chosen(config.kernels, model, dtype, form)
    asked = hops.resolve(config.hops, kernels=self.kernels)
    self.hops = hops.most(asked, len(model.moe_ids))
    if self.kernels:
      params = params_lib.stacked(params)
    quota = config_lib.quota(config, len(model.moe_ids), self.slots)
    self._room = min(quota, default=self.slots)  # For one layer's experts.
    room = self.slots
    if self.kernels:
      room = kernels.slots_of(room, block, form)
    self.pool_bytes = room * block
    kv = kv_cache.nbytes(model, self.rows, context, dtype)
    config_lib.check_memory(config, self.pool_bytes, kv, self._device)
    # Committed arrays: what a program returns is committed too, and a program
    # that gets both kinds is compiled twice.
    home = jax.sharding.SingleDeviceSharding(self._device)
    self._pool, params = jax.device_put(
      (jnp.zeros((room, *store.shape), kind), params), home
    )
    self._launches = self._make_launches(config, params, context)
    self._write = jax.jit(
      transfer_lib.write_slots,
      static_argnums=3,
      donate_argnums=0,
      out_shardings=home,
    )
    # Where the host block itself arrives, somebody must tell when it is read.
    self._told = self._device.platform == 'cpu'
    # A CPU computes on the cores that the host would look with.
    self._watches = self._device.platform != 'cpu'
    self._set_link(config.link)
    self._running: deque[tuple[int, launches.Begun]] = deque()
    self._warm_up()
    self._warm_gates = {0}

  def _make_launches(
    self,
    config: config_lib.EngineConfig,
    params: dict[str, Any],
    context: int,
  ) -> launches.Launches:
    programs = programs_lib.Programs(
      self._model,
      params,
      self.rows,
      config.strict,
      self._device,
      self.hops,
      self.kernels,
    )
    return launches.Launches(
      self._model,
      programs,
      self._device,
      rows=self.rows,
      chunk=self.chunk,
      context=context,
      room=self._room,
      ring=_RING,
    )

  # See `Executor`; it is asked 17 times a launch.
  now = staticmethod(time.perf_counter_ns)

  def load(self, key: int, slot: int) -> None:
    """See `Executor`."""
    self._transfer.begin(key, slot)

  def launch(self, number: int, batch: protocols.Batch) -> None:
    """See `Executor`."""
    assert len(self._running) < _RING, 'a control buffer would be in use'
    # Behind the launch, device_put would wait for it.
    self._transfer.flush()
    begun = self._launches.begin(batch, self._experts())
    self._running.append((number, begun))

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
    while self._running and transfer_lib.is_ready(self._running[0][1].answer):
      events.append(self._ended(*self._running.popleft()))
    return events

  def wait(self) -> None:
    """See `Executor`.

    Beside a GPU the host looks again at once: even to sleep for no time costs
    it more (60 us) than what it waits for. To yield costs 1 us; other threads
    have the interpreter while CUDA is asked.
    """
    if self._watches:
      self._transfer.flush()
      os.sched_yield()
      return
    if self._running and not self._transfer.pending():
      self._running[0][1].answer.block_until_ready()
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
    self._launches.programs.set_gates(depth)
    if depth not in self._warm_gates:
      self._warm_gates.add(depth)
      self._run_padding(padding.decode)

  def fill_caches(self, seed: int) -> None:
    """Random keys and values at all positions: a context nobody computed."""
    self._idle()
    self._launches.fill_caches(seed)
    self._launches.check(self._experts())

  def set_choices(self, choices: Sequence[Sequence[int]]) -> None:
    """What the first rows are said to have chosen; for measurements."""
    self._launches.set_choices(choices)

  def close(self) -> None:
    """See `Executor`."""
    self._idle()
    self._transfer.close()

  def _idle(self) -> None:
    while self._running:
      self._running.popleft()[1].answer.block_until_ready()
    jax.block_until_ready(self._pool)

  def compilations(self) -> int:
    """How many programs have been compiled so far."""
    return self._launches.programs.compilations() + programs_lib.compiled(
      self._write
    )

  def slot_bytes(self, slot: int) -> np.ndarray:
    """What lies in a slot now, in the stored type; for checks, it waits."""
    block = np.asarray(self._pool[slot])
    return block.astype(self._store.dtype)

  def _ended(self, number: int, begun: launches.Begun) -> protocols.Ended:
    if not begun.gates:
      return protocols.Ended(self.now(), number, ())
    told, k, passed = begun.answer, self._model.top_k, None
    hops: Sequence[protocols.Hop]
    if isinstance(told, jax.Array):
      table = np.asarray(told)[: begun.rows or None]
      some = hop_table.hop_by_hop(k, table, begun.gates)
      hops = hop_table.read(k, some, begun.gates)
    elif len(begun.gates) < _LONG:
      hops = hop_table.read(k, told.lines(begun.rows), begun.gates)
    else:
      table = told.table(begun.rows)
      hops = graphs.Told(k, table)
      passed = hop_table.passed(table, self._model.num_experts)
    return protocols.Ended(self.now(), number, hops, passed=passed)

  def _experts(self) -> experts.Pool:
    if self._layout is None:
      plain: jax.Array = self._pool
      return plain
    return quant.Packed(self._pool, self._layout)

  def _write_slots(self, moved: list[transfer_lib.Moved]) -> None:
    for i in range(0, len(moved), transfer_lib.BATCHES[-1]):
      some = moved[i : i + transfer_lib.BATCHES[-1]]
      size = next(n for n in transfer_lib.BATCHES if n >= len(some))
      whole = some + [some[-1]] * (size - len(some))
      slots = np.array([m.slot for m in whole], np.int32)
      blocks = [m.block for m in whole]
      self._pool, token = self._write(self._pool, slots, blocks, self._told)
      self._transfer.written(some, token)

  def _set_link(self, link: str) -> None:
    self._asked = link
    self.link = links.resolve(
      link, self._device, self._store.dtype, self._pool.dtype
    )
    self._transfer = staging.Staging(
      self._store,
      links.make(self.link, self._store, self._pool, self._device, self.now),
    )

  def _run_padding(
    self, make: Callable[..., Iterator[protocols.Batch]]
  ) -> None:
    """Compiles and runs what a function of `padding` makes."""
    programs = self._launches.programs
    batches = list(make(programs, self._model, self.rows, self._room))
    self._launches.compile(batches, self._experts())
    for batch in batches:
      self.launch(-1, batch)
      self._idle()

  def _warm_up(self) -> None:
    """Compiles every program by running it on padding alone."""
    capture = recorder.on(self._device) if self.kernels else None
    if capture:
      self._launches.record(self._experts(), capture)
    self._run_padding(padding.batches)
    self._launches.check(self._experts())
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
    self._launches.check(self._experts())
