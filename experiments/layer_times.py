"""What launches of a model take, and what the host does for them."""

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bevy_jax import config as config_lib
from bevy_jax import (
  device,
  engine,
  events,
  figures,
  hops,
  loading,
  protocols,
  segments,
)
from bevy_jax import request as request_lib
from bevy_jax import window as window_lib

_LEAST, _SPEND = 3, 0.03  # Turns of each entry at least, seconds at most.


class Launch(NamedTuple):
  """A decode launch: mean over the layers of each layer's median time."""

  rows: int
  distinct: int
  us: float


class Host(NamedTuple):
  """Host time of a run, in microseconds.

  Attributes:
    launch: to decide on a launch and begin it.
    answer: to see that it has ended and what that means.
    load: of a load, slot write and choice of a victim included.
    loads: loads a launch that these were measured with.
  """

  launch: float
  answer: float
  load: float
  loads: float


class _Watched:
  """An executor with a watch on the polls in which loads land."""

  def __init__(self, executor: device.DeviceExecutor):
    self._executor, self._spent = executor, list[float]()
    self.chunk, self.hops = executor.chunk, executor.hops
    self.now = executor.now
    self.load, self.launch = executor.load, executor.launch
    self.wait, self.close = executor.wait, executor.close

  def poll(self) -> list[protocols.Happened]:
    """See `Executor`."""
    begun = self.now()
    found = self._executor.poll()
    landed = sum(isinstance(e, protocols.Landed) for e in found)
    if landed == len(found) > 0:
      self._spent += [(self.now() - begun) / landed] * landed
    return found

  def landing_us(self) -> float:
    """Mean host time of a load in polls that saw nothing else."""
    return statistics.mean(self._spent or [0.0]) * 1e-3


class Probe:
  """A model on a device whose launches are timed one by one.

  A time is that from the end of the call which begins a launch until its end
  is seen: with the host's part before it, what a round trip takes.
  """

  def __init__(self, model: loading.Loaded, config: config_lib.EngineConfig):
    self.config, self._model = config, model.config
    self._context = config.context or min(model.config.context, 256)
    self._layers = len(model.config.moe_ids)
    self.executor = device.DeviceExecutor(
      model.config,
      model.params,
      model.experts,
      config,
      self._context,
      model.format,
    )
    self._slots = min(self.executor.slots, model.config.num_experts)
    for slot in range(self._slots):
      self.executor.load(slot, slot)
      self._drain(1)

  def table(self) -> list[Launch]:
    """Decode launches by rows and distinct experts, one layer each."""
    return [
      Launch(rows, distinct, self._decode(rows, distinct))
      for rows in self._powers(self.config.requests)
      for distinct in self._counts(rows)
    ]

  def prefill_us(self) -> float:
    """Device time of one more prompt token in a layer."""
    one = self._prefill(1)
    if self.config.requests == 1:
      return one / self.config.chunk
    more = self._prefill(self.config.requests)
    tokens = (self.config.requests - 1) * self.config.chunk
    return max(0.0, more - one) / tokens

  def host(self, new_tokens: int) -> Host:
    """What the host does in a run with random prompts, from a cold cache."""
    config, model = self.config, self._model
    watched = _Watched(self.executor)
    run = engine.Engine(
      model,
      watched,
      hops.give(
        config_lib.SCHEDULERS[config.scheduler], config.hops, self._layers
      ),
      config_lib.make_eviction(
        config.eviction, config.trace, self._layers, model.num_experts
      ),
      rows=config.requests,
      slots=self.executor.slots,
      link_depth=config.link_depth,
    )
    rng = np.random.default_rng(0)
    for number in range(config.requests):
      prompt = tuple(rng.integers(0, model.vocab_size, 8).tolist())
      run.submit(
        request_lib.Request(
          number=number, prompt=prompt, new_tokens=new_tokens, eos_ids=()
        )
      )
    while run.busy:
      run.step()
    self.executor.close()
    window = window_lib.find(run.log, config.requests, min(4, new_tokens - 1))
    found = figures.launches(run.log, window)
    us, launches = found['host_us'], found['launches']
    issued = sum(
      isinstance(e, events.LoadIssued) for e in window.inside(run.log)
    )
    loads, write = issued / launches, watched.landing_us()
    return Host(
      launch=us['schedule'] + us['launch'],
      answer=max(0.0, us['poll'] - loads * write),
      load=(us['load'] / loads if loads else 0.0) + write,
      loads=loads,
    )

  def _decode(self, rows: int, distinct: int) -> float:
    k = self._model.top_k
    choices = [
      [
        (row * k + choice) % distinct if choice < distinct else distinct
        for choice in range(k)
      ]
      for row in range(rows)
    ]
    table = np.full((1, self._model.num_experts), -1, np.int32)
    table[0, :distinct] = range(distinct)  # Expert n lies in slot n.
    used = {e for line in choices for e in line if e < distinct}
    assert len(used) == distinct, 'the rows cannot use so many'
    batches = [
      protocols.Batch('decode', layer, rows=range(rows), tables=table)
      for layer in range(self._layers)
    ]
    self._enter(rows)
    return self._mean(batches, choices)

  def _enter(self, rows: int) -> None:
    """Rows in the middle of their context, so that attention has work."""
    nobody = request_lib.SamplingParams()
    entries = [
      protocols.Entry(row, row, self._context // 2, nobody)
      for row in range(rows)
    ]
    self.executor.launch(-1, protocols.Batch('enter', -1, entries=entries))
    self._drain(1)

  def _prefill(self, rows: int) -> float:
    chunk, k = self.config.chunk, self._model.top_k
    tokens = [[t % self._model.vocab_size for t in range(chunk)]] * rows
    first = protocols.Batch(
      'prefill',
      -1,
      chunk=protocols.Chunk(range(rows), tokens, [0] * rows),
    )
    distinct = min(self._slots, rows * chunk * k)
    slots = [
      [(t * k + c) % distinct for c in range(k)] for t in range(rows * chunk)
    ]
    self.executor.launch(-1, first)
    self._drain(1)
    following = segments.prefill_segments(self._model)
    batches = [
      protocols.Batch('prefill', layer, slots=slots, distinct=range(distinct))
      for layer in range(self._layers)
      if following[layer] is not None
    ]
    # Of the only layer's experts no later token reads what prompts write.
    return self._mean(batches) if batches else 0.0

  def _mean(
    self,
    batches: list[protocols.Batch],
    choices: Sequence[Sequence[int]] = (),
  ) -> float:
    """Microseconds: mean of each batch's median over some turns.

    `choices` are what the rows of each launch are said to have chosen.
    """
    spent: list[list[int]] = [[] for _ in batches]
    begun, turns = time.perf_counter(), 0
    while turns < _LEAST or time.perf_counter() - begun < _SPEND:
      for batch, times in zip(batches, spent, strict=True):
        self.executor.set_choices(choices)
        self.executor.launch(-1, batch)
        start = self.executor.now()
        times.append(self._drain(1) - start)
      turns += 1
    return statistics.mean(statistics.median(t) for t in spent) * 1e-3

  def _drain(self, count: int) -> int:
    """Waits for so many things to happen; when the last of them was seen."""
    seen, last = 0, 0
    while seen < count:
      self.executor.wait()
      for event in self.executor.poll():
        seen, last = seen + 1, event.time
    return last

  def _counts(self, rows: int) -> list[int]:
    """Numbers of distinct experts that so many rows may use."""
    k = self._model.top_k
    most = min(rows * k, self._slots)
    return sorted({min(n, most) for n in (1, k, 2 * k, 4 * k, most)})

  def _powers(self, rows: int) -> Iterable[int]:
    return sorted({*(2**i for i in range(rows.bit_length())), rows})
