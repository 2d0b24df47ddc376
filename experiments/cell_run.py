"""Runs cells of the benchmark: a model of random weights, many variants."""

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bevy_jax import config as config_lib
from bevy_jax import device as device_lib
from bevy_jax import engine as engine_lib
from bevy_jax import events, loading, policies, storage
from bevy_jax import hops as hops_lib
from bevy_jax import report as report_lib
from bevy_jax import request as request_lib
from bevy_jax import window as window_lib
from bevy_jax.experiments import (
  bench_models,
  calibration,
  cells,
  floors,
  run,
)
from bevy_jax.layers import forced, kv_cache
from bevy_jax.offload import patterns

_ROUND = 64  # Positions of a row are rounded up to this.
_SPARE = 6 * 2**30  # Bytes of the device that programs and answers may take.
STEPS = 16  # Tokens of each request that are compared with the resident run's.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """How cells are run.

  Attributes:
    new_tokens: measured tokens a request.
    warmup: tokens a request before them, in which the cache fills.
    context: positions of random keys and values before the first token.
    trace: what 'trace' routing replays; empty for the bundled one.
    eviction: of all variants but the one with 'lru'.
    link: see `EngineConfig`.
    link_depth: see there.
    hops: see there.
    strict: see there; float32 and one row bucket.
    kernels: see there.
    lru_turns: turns of the variant with 'lru', the slowest by far; 0 for all.
    threads: that fill host memory; 0 for as many as the machine has.
    seed: of weights, prompts and synthetic routing.
  """

  new_tokens: int = 64
  warmup: int = 32
  context: int = 512
  trace: str = ''
  eviction: str = cells.EVICTION
  link: str = 'auto'
  link_depth: int = 4
  hops: int | str = 'auto'
  strict: bool = False
  kernels: str = 'auto'
  lru_turns: int = 0
  threads: int = 0
  seed: int = 0

  def __post_init__(self) -> None:
    config_lib.check_eviction(self.eviction, '')
    config_lib.choose('kernels', self.kernels, config_lib.KERNELS)
    for name, least in (
      ('new_tokens', 1), ('warmup', 0), ('context', 0), ('threads', 0),
      ('lru_turns', 0), ('link_depth', 1),
    ):  # fmt: skip
      if getattr(self, name) < least:
        raise ValueError(
          f'{name} is {getattr(self, name)}; it must be at least {least}.'
        )

  @property
  def positions(self) -> int:
    """Positions that a row holds."""
    need = self.context + self.warmup + self.new_tokens + 1
    return -(-need // _ROUND) * _ROUND


class Ran(NamedTuple):
  """One run of one variant.

  Attributes:
    report: see WORKSPACE.md, with the floors of `floors.find`.
    tokens: generated ids of each request.
    compiled: programs that were compiled while it ran; 0 or it was slowed.
  """

  report: dict[str, Any]
  tokens: list[list[int]]
  compiled: int


class Machine:
  """A model on the device, for all cells with its requests and routing.

  The pool has room for the largest cell, and for everything where that fits:
  smaller caches use fewer of its slots, and nothing is compiled twice.

  Attributes:
    executor: the device's side.
    rates: what link and memory were measured to move.
    whole: whether every expert has a slot, so that there is a resident run.
  """

  def __init__(
    self,
    made: bench_models.Made,
    some: Sequence[cells.Cell],
    options: Options,
    say: Callable[[str], None],
  ):
    cell, model = some[0], made.model
    self._model, self._options, self._cell = model, options, cell
    self._layers, c = len(model.config.moe_ids), model.config
    self._pairs = self._layers * c.num_experts
    self._trace = cells.recording(
      cell.routing, options.trace, self._layers, c.num_experts, c.top_k,
      cell.requests,
    )  # fmt: skip
    params = model.params
    if self._trace is not None:
      table = cells.tables(
        self._trace, self._layers, options.context, options.positions
      )
      params = forced.attach(c, params, table)
    self._config = config_lib.EngineConfig(
      cache=self._room(max(each.cache for each in some)),
      requests=cell.requests,
      eviction=options.eviction,
      link=options.link,
      link_depth=options.link_depth,
      hops=options.hops,
      context=options.positions,
      chunk=1,
      strict=options.strict,
      kernels=options.kernels,
      warmup=options.warmup,
    )
    say('compiling')
    begun = time.perf_counter()
    self.executor = device_lib.DeviceExecutor(
      c, params, model.experts, self._config, options.positions, model.format
    )
    self._config = dataclasses.replace(self._config, hops=self.executor.hops)
    self.executor.fill_caches(options.seed)
    self.whole = self.executor.slots == self._pairs
    self._bytes = floors.count(c, params, model.experts.block_bytes)
    gpu = jax.default_backend() != 'cpu'
    self.rates = floors.Rates(
      calibration.memory_gb_per_s(2**29 if gpu else 2**25),
      floors.link_gb_per_s(
        self.executor, self._pairs, self._bytes.expert, 8,
        2**32 if gpu else 2**24,
      ),
    )  # fmt: skip
    # What is there now stays: looking through it would interrupt runs.
    gc.collect()
    gc.freeze()
    say(
      f'compiled in {time.perf_counter() - begun:.0f} s; memory '
      f'{self.rates.memory_gb_per_s:.0f} GB/s, {self.executor.link.words} '
      f'{self.rates.link_gb_per_s:.1f} GB/s'
    )

  @functools.cached_property
  def counts(self) -> patterns.Counts | None:
    """What requests that do not decode used; None where there are none."""
    first = self._cell.requests
    if self._trace is None or len(self._trace.lengths) <= first:
      return None
    if self._trace.layers != self._layers:
      return None
    return self._trace.without(0, first, 'prefetching').counts()

  def reference(self) -> list[list[int]] | None:
    """The first tokens with everything resident; None without the room."""
    if not self.whole:
      return None
    variant = ('lockstep', self._options.eviction, 'none')
    engine = self._engine(variant, self._pairs)
    return _tokens(_drive(engine, self._requests(STEPS)))

  def run(
    self, variant: tuple[str, str, str], cache: float, *, bounds: bool
  ) -> Ran:
    """One variant with a share of the slots; ValueError where it failed."""
    slots = int(cache * self._pairs)
    engine = self._engine(variant, slots)
    before = self.executor.compilations()
    options = self._options
    requests = self._requests(options.warmup + options.new_tokens)
    gc.collect()
    log = _drive(engine, requests)
    compiled = self.executor.compilations() - before
    facts = self._facts(variant, slots)
    report = report_lib.make(log, facts, bounds=bounds)
    window = window_lib.find(log, facts.rows, facts.warmup)
    report |= floors.find(
      log, window, self._bytes, self.rates, rows=facts.rows,
      layers=self._layers, past=options.context, loads=report['loads'],
    )  # fmt: skip
    return Ran(report, _tokens(log), compiled)

  def close(self) -> None:
    """Gives the device's memory back; the store stays."""
    self.executor.close()
    del self.executor
    gc.unfreeze()
    gc.collect()

  def _room(self, cache: float) -> int:
    """Slots: all where they fit the device beside the rest."""
    model, options = self._model, self._options
    block = model.experts.block_bytes
    if model.format is None:
      dtype = model.params['embed'].dtype
      block = block // model.experts.dtype.itemsize * dtype.itemsize
    kv = kv_cache.nbytes(
      model.config, self._cell.requests, options.positions,
      model.params['embed'].dtype,
    )  # fmt: skip
    have = config_lib.device_bytes(jax.devices()[0])
    fits = have is None or self._pairs * block + 2 * kv + _SPARE < have
    return self._pairs if fits else int(cache * self._pairs)

  def _engine(
    self, variant: tuple[str, str, str], slots: int
  ) -> engine_lib.Engine:
    scheduler, eviction, prefetch = variant
    prefetcher, warm = policies.parse_prefetch(prefetch)
    if warm:
      assert self.counts is not None, 'nothing to start from'
      prefetcher = policies.warmed(prefetcher, self.counts)
    self.executor.drain()
    self.executor.set_gates(prefetcher.gates)
    return engine_lib.Engine(
      self._model.config,
      self.executor,
      hops_lib.give(
        policies.scheduler(scheduler), self._config.hops, self._layers
      ),
      policies.eviction(eviction),
      rows=self._config.requests,
      slots=slots,
      link_depth=self._config.link_depth,
      prefetcher=prefetcher,
    )

  def _requests(self, new_tokens: int) -> list[request_lib.Request]:
    """One token each; its seed names the recording that it replays."""
    rng = np.random.default_rng(self._options.seed)
    vocab = self._model.config.vocab_size
    return [
      request_lib.Request(
        number=number,
        prompt=(int(rng.integers(vocab)),),
        new_tokens=new_tokens,
        sampling=request_lib.SamplingParams(seed=number),
        past=self._options.context,
      )
      for number in range(self._config.requests)
    ]

  def _facts(
    self, variant: tuple[str, str, str], slots: int
  ) -> report_lib.Facts:
    scheduler, eviction, prefetch = variant
    model, config = self._model, self._config
    settings = dataclasses.asdict(self._options)
    settings |= {
      'cell': self._cell.name, 'scheduler': scheduler, 'eviction': eviction,
      'prefetch': prefetch, 'experts': storage.name(_stored(model)),
    }  # fmt: skip
    return report_lib.Facts(
      config=settings,
      versions=run.versions(),
      device=run.device(),
      link=self.executor.link.words,
      rows=config.requests,
      layers=self._layers,
      experts=model.config.num_experts,
      top_k=model.config.top_k,
      slots=slots,
      block_bytes=model.experts.block_bytes,
      cache_bytes=slots * model.experts.block_bytes,
      eviction=policies.eviction(eviction),
      warmup=config.warmup,
      host_blocks=model.experts.capacity,
    )


def _stored(model: loading.Loaded) -> storage.Storage:
  return model.format or model.experts.dtype


def _drive(
  engine: engine_lib.Engine, requests: Sequence[request_lib.Request]
) -> list[events.Event]:
  for request in requests:
    engine.submit(request)
  while engine.busy:
    engine.step()
  for event in engine.log:
    if isinstance(event, events.Finished) and event.reason == 'error':
      raise ValueError(f'request {event.request} failed: {event.detail}.')
  return engine.log


def _tokens(log: Sequence[events.Event]) -> list[list[int]]:
  found: dict[int, list[int]] = {}
  for event in log:
    if isinstance(event, events.Token):
      found.setdefault(event.request, []).append(event.token)
  return [found[number] for number in sorted(found)]
