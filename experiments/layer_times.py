"""What launches of a model take, one by one, and short runs of it."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bevy_jax import config as config_lib
from bevy_jax import (
  device,
  engine,
  events,
  hops,
  loading,
  policies,
  protocols,
  segments,
)
from bevy_jax import request as request_lib
from bevy_jax import window as window_lib

_LEAST, _SPEND = 3, 0.06  # Turns of each entry at least, seconds at most.
_CONTEXT = 128  # Positions of a row; attention takes its time for all of them.


class Launch(NamedTuple):
  """A decode launch: mean over the layers of each layer's median time."""

  rows: int
  distinct: int
  us: float


class Decoded(NamedTuple):
  """A run, and what `Watched` saw of it."""

  log: list[events.Event]
  naps: list[int]
  awaited: dict[int, float]


class Watched:
  """An executor with a watch on when the host saw that a launch had ended.

  Attributes:
    naps: ns between two looks while both link and device were busy.
    awaited: launches that ended while the host waited, and by how many ns it
      saw that late: half of its nap, nothing where a launch alone wakes it.
  """

  def __init__(self, executor: protocols.Executor):
    self.naps, self.awaited = list[int](), dict[int, float]()
    self._executor, self._late = executor, -1.0
    self.chunk, self.hops = executor.chunk, executor.hops
    self.now, self.close = executor.now, executor.close
    self._loads = self._launches = 0

  def load(self, key: int, slot: int) -> None:
    """See `Executor`."""
    self._loads += 1
    self._executor.load(key, slot)

  def launch(self, number: int, batch: protocols.Batch) -> None:
    """See `Executor`."""
    self._launches += 1
    self._executor.launch(number, batch)

  def poll(self) -> list[protocols.Happened]:
    """See `Executor`."""
    found = self._executor.poll()
    ended = [e.launch for e in found if isinstance(e, protocols.Ended)]
    if self._late >= 0:
      self.awaited |= dict.fromkeys(ended, self._late)
    self._late = -1.0
    self._launches -= len(ended)
    self._loads -= len(found) - len(ended)
    return found

  def wait(self) -> None:
    """See `Executor`."""
    begun = self.now()
    self._executor.wait()
    self._late = 0.0
    if self._loads and self._launches:
      self.naps.append(self.now() - begun)
      self._late = self.naps[-1] / 2


class Probe:
  """A model on a device whose launches are timed one by one.

  A time is that from the end of the call which begins a launch until its end
  is seen: with the host's part before it, what a round trip takes.
  """

  def __init__(self, model: loading.Loaded, config: config_lib.EngineConfig):
    self.config, self._model = config, model.config
    self._nbytes = model.experts.block_bytes
    self._context = config.context or min(model.config.context, _CONTEXT)
    self._layers = len(model.config.moe_ids)
    self.executor = device.DeviceExecutor(
      model.config,
      model.params,
      model.experts,
      config,
      self._context,
      model.format,
    )
    # A launch may use as many experts as a layer has, and the next one others:
    # read again and again, the same few would lie in the processor's cache.
    self._most = min(self.executor.slots, model.config.num_experts)
    self._turn = 0
    keys = self._layers * model.config.num_experts
    for slot in range(self.executor.slots):
      self.executor.load(slot % keys, slot)
      self._drain(1)

  def table(self) -> tuple[list[Launch], list[tuple[int, float]]]:
    """Decode launches by rows and distinct experts, one layer each.

    Returns:
      The launches of all layers but the last one, and (rows, us): what the
      last layer's take more, with head and sampling behind it. A model of one
      layer has that in its launches, and nothing beside them.
    """
    launches, heads = [], []
    for rows in self._rows():
      more = []
      for distinct in self._counts(rows):
        *others, last = self._decode(rows, distinct)
        us = statistics.mean(others or [last])
        launches.append(Launch(rows, distinct, us))
        more.append(last - us)
      if self._layers > 1:
        heads.append((rows, max(0.0, statistics.median(more))))
    return launches, heads

  def prefill_us(self) -> float:
    """Device time of one more prompt token in a layer."""
    one = self._prefill(1)
    if self.config.requests == 1:
      return one / self.config.chunk
    more = self._prefill(self.config.requests)
    tokens = (self.config.requests - 1) * self.config.chunk
    return max(0.0, more - one) / tokens

  def runs(self, new_tokens: int, turns: int) -> list[Decoded]:
    """Lockstep and runahead in turn, with random prompts, from a cold cache.

    The link is slowed down until it takes as long as all else: then both are
    busy, as where it matters who waits for whom. A first run, which nobody
    hears of again, says how slow that is.
    """
    link = self._balanced(self._run(self.executor, 'runahead', new_tokens))
    found = []
    for scheduler in ('lockstep', 'runahead') * turns:
      self.executor.drain(link)
      watched = Watched(self.executor)
      log = self._run(watched, scheduler, new_tokens)
      found.append(Decoded(log, watched.naps, watched.awaited))
    self.executor.drain(self.config.link)
    return found

  def _balanced(self, log: Sequence[events.Event]) -> str:
    """A link whose loads take as long as a run on the plain one."""
    window = window_lib.find(log, self.config.requests, 0)
    loads = sum(isinstance(e, events.LoadLanded) for e in window.inside(log))
    if not loads:
      return self.config.link
    speed = self._nbytes * loads / window.seconds * 1e-9
    return f'throttled:{speed:.6g}'

  def _run(
    self, executor: protocols.Executor, scheduler: str, new_tokens: int
  ) -> list[events.Event]:
    config, model = self.config, self._model
    run = engine.Engine(
      model,
      executor,
      hops.give(
        config_lib.SCHEDULERS[scheduler], self.executor.hops, self._layers
      ),
      policies.make_eviction(
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
    return run.log

  def _decode(self, rows: int, distinct: int) -> list[float]:
    """Of each layer's launches, in passes through all of them."""
    k = self._model.top_k
    choices = [
      [
        (row * k + choice) % distinct if choice < distinct else distinct
        for choice in range(k)
      ]
      for row in range(rows)
    ]
    used = {e for line in choices for e in line if e < distinct}
    assert len(used) == distinct, 'the rows cannot use so many'
    self._enter(rows)

    def batches() -> Iterator[protocols.Batch]:
      for layer in range(self._layers):
        table = self._table(distinct)
        yield protocols.Batch('decode', layer, rows=range(rows), tables=table)

    return self._medians(batches, choices)

  def _table(self, distinct: int) -> np.ndarray:
    """Experts 0 and on in the slots behind those of the launch before."""
    first, self._turn = self._turn, self._turn + distinct
    table = np.full((1, self._model.num_experts), -1, np.int32)
    slots = np.arange(first, first + distinct) % self.executor.slots
    table[0, :distinct] = slots
    return table

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
    distinct = min(self._most, rows * chunk * k)
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
    return statistics.mean(self._medians(lambda: batches)) if batches else 0.0

  def _medians(
    self,
    batches: Callable[[], Iterable[protocols.Batch]],
    choices: Sequence[Sequence[int]] = (),
  ) -> list[float]:
    """Microseconds of each of the batches, which are run again and again.

    `choices` are what the rows of each launch are said to have chosen.
    """
    spent: list[list[int]] = []
    begun, turns = time.perf_counter(), 0
    while turns < _LEAST or time.perf_counter() - begun < _SPEND:
      for i, batch in enumerate(batches()):
        self.executor.set_choices(choices)
        self.executor.launch(-1, batch)
        start = self.executor.now()
        spent += [[]] if not turns else []
        spent[i].append(self._drain(1) - start)
      turns += 1
    return [statistics.median(t) * 1e-3 for t in spent]

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
    most = min(rows * k, self._most)
    return sorted({min(n, most) for n in (1, k, 2 * k, 4 * k, most)})

  @property
  def buckets(self) -> list[int]:
    """What numbers of rows are padded to, ascending."""
    rows = self.config.requests
    return sorted({*(2**i for i in range(rows.bit_length())), rows})

  def _rows(self) -> list[int]:
    """Where launches are padded to more rows: the least and the most of each.

    A launch of 5 rows is as long as one of 8, not half-way from 4 to it.
    """
    most = self.config.requests
    return sorted({n for b in self.buckets for n in (b, b + 1) if n <= most})
