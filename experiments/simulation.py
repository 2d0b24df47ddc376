"""Recorded routing on a simulated machine: the engine itself, another clock."""

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from bevy_jax import config as config_lib
from bevy_jax import costs as costs_lib
from bevy_jax import engine as engine_lib
from bevy_jax import (
  events,
  foresight,
  hops,
  platforms,
  policies,
  protocols,
  shapes,
  spelled,
  synthetic,
  timeline,
  virtual,
)
from bevy_jax import report as report_lib
from bevy_jax import trace as trace_lib
from bevy_jax.experiments import run
from bevy_jax.offload import eviction as eviction_lib

_MB = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
  """One simulated experiment.

  Attributes:
    trace: a routing trace, 'bundled', or 'zipf[:EXPONENT]' for a synthetic
      one of the shape's layers and experts.
    platform: see `platforms.find`.
    model_shape: see `shapes.parse`; it says what experts and layers weigh,
      the trace how many there are.
    expert_mb: MB (1e6 bytes) of an expert where there is no model_shape.
    layer_mb: MB of a layer's shared weights then.
    head_mb: MB of the head then.
    requests: R, rows that decode together.
    cache: see `EngineConfig.cache`.
    scheduler: a name of `config.SCHEDULERS`, or see `policies`.
    eviction: a name of `config.names()`, or see `policies`; 'static' keeps
      what is popular among requests of the trace that do not decode here.
    prefetch: see `config.parse_prefetch`; an oracle is told the trace, and
      next_gate needs a model. 'auto' is `mixture` for runahead, started from
      what other requests of the trace used if it has any, and none for others.
    hops: see `EngineConfig.hops`.
    compare: scheduler:eviction:prefetch variants, each from a cold cache.
    first: first request of the trace.
    count: how many are admitted one after another; 0 for R.
    skip: tokens that every request does before the window opens.
    tokens: that each decodes at most, the skipped ones included; 0: all.
    link: '' for the platform's own, or 'throttled:GB_PER_S[:LATENCY_US]'.
    link_depth: loads on the link at once.
    priority: whether loads that somebody awaits overtake queued prefetches on
      the link; a device's link carries them in their order.
    bounds: whether the report has its bounds, which cost time.
    told: see `VirtualExecutor`; False to be as blind as a device.
  """

  trace: str = 'bundled'
  platform: str = 'rtx4090'
  model_shape: str = ''
  expert_mb: float = 0.0
  layer_mb: float = 40.0
  head_mb: float = 0.0
  requests: int = 8
  cache: float | int = 0.5
  scheduler: policies.Scheduler = 'runahead'
  eviction: policies.Eviction = 'lfu_decayed'
  prefetch: policies.Prefetcher = 'auto'
  hops: int | str = 1
  compare: tuple[str, ...] = ()
  first: int = 0
  count: int = 0
  skip: int = 32
  tokens: int = 0
  link: str = ''
  link_depth: int = 4
  priority: bool = False
  bounds: bool = True
  told: bool = True

  def __post_init__(self) -> None:
    for name in ('first', 'count', 'skip', 'tokens'):
      if getattr(self, name) < 0:
        raise ValueError(f'{name} is {getattr(self, name)}; 0 is the least.')
    for name in ('expert_mb', 'layer_mb', 'head_mb'):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(
          f'{name} is {getattr(self, name)}; it must be finite and not below 0.'
        )
    if bool(self.model_shape) == bool(self.expert_mb):
      raise ValueError(
        f'model_shape is {self.model_shape!r} and expert_mb {self.expert_mb}; '
        'give exactly one of them, to say how large an expert is.'
      )
    if self.model_shape:
      shapes.parse(self.model_shape)
    _linked(platforms.find(self.platform), self.link)
    self.variants()
    # Ranges of what an engine has are checked where an engine is described.
    config_lib.EngineConfig(
      cache=self.cache,
      requests=self.requests,
      link=self.link or 'device_put',
      link_depth=self.link_depth,
      hops=self.hops,
    )

  def variants(self) -> list[tuple[str, str, str]]:
    """Scheduler, eviction, prefetch of each run; ValueError if unknown."""
    found = policies.variants(
      self.compare, self.scheduler, self.eviction, self.prefetch
    )
    for scheduler, eviction, prefetch in found:
      policies.scheduler(scheduler)
      policies.check_eviction(eviction, self.trace)
      if prefetch != 'auto':
        policies.parse_prefetch(prefetch)
    return found


class Run(NamedTuple):
  """One variant's outcome."""

  report: dict[str, Any]
  log: list[events.Event]


class _Awaited:
  """Whether somebody who waits needs a key, as the engine sees it.

  Attributes:
    view: the engine's.
  """

  view: protocols.View

  def __init__(self, experts: int):
    self._experts = experts

  def __call__(self, key: int) -> bool:
    layer, expert = divmod(key, self._experts)
    return any(
      p.layer == layer and p.need >> expert & 1 for p in self.view.waiting
    )


class Simulation:
  """A trace on a machine, to be run with any scheduler.

  Attributes:
    config: the experiment.
    trace: the routing.
    costs: what things take.
    expert_bytes: of one expert.
    slots: size of the cache.
  """

  def __init__(self, config: Replay, trace: trace_lib.Trace | None = None):
    """Args: `trace` is used instead of the one that `config` names."""
    self.config = config
    shape, form = None, ''
    if config.model_shape:
      shape, form = shapes.parse(config.model_shape)
    self.trace = trace or _routing(config, shape)
    self._model = virtual.shape(self.trace)
    self._platform = _linked(platforms.find(config.platform), config.link)
    if shape is None:
      self.expert_bytes = max(1, round(config.expert_mb * _MB))
      layer = round(config.layer_mb * _MB)
      head = round(config.head_mb * _MB)
    else:
      self.expert_bytes = shape.expert_bytes(form)
      layer, head = shape.layer_bytes, shape.head_bytes
    self.costs: costs_lib.Costs = self._platform.costs(
      self.expert_bytes, layer, head
    )
    engine = config_lib.EngineConfig(cache=config.cache)
    self.slots = config_lib.slots(engine, self._model)
    self._requests = virtual.requests(
      self.trace, config.first, config.count or config.requests, config.tokens
    )

  def engine(
    self,
    scheduler: policies.Scheduler,
    eviction: policies.Eviction,
    prefetch: policies.Prefetcher = 'none',
  ) -> engine_lib.Engine:
    """An engine with a cold cache and all requests submitted.

    Args:
      scheduler: a name, an object, or text that names your own.
      eviction: likewise; 'static' as in `Replay`.
      prefetch: likewise; an oracle is told the trace.

    Raises:
      ValueError: no such policy, or one that only a model can run.
    """
    config = self.config
    prefetcher = self._prefetcher(prefetch)
    asked = hops.resolve(config.hops, kernels=False)
    chosen = hops.give(policies.scheduler(scheduler), asked, self.trace.layers)
    awaited = _Awaited(self.trace.num_experts)
    executor = virtual.VirtualExecutor(
      virtual.Recorded(self.trace),
      self.costs,
      self.trace.layers,
      urgent=awaited if config.priority else None,
      gates=prefetcher.gates,
      hops=getattr(chosen, 'hops', 1),
      told=config.told,
    )
    found = engine_lib.Engine(
      self._model,
      executor,
      chosen,
      self._eviction(eviction),
      rows=config.requests,
      slots=self.slots,
      link_depth=config.link_depth,
      prefetcher=prefetcher,
    )
    awaited.view = found.view
    for request in self._requests:
      found.submit(request)
    return found

  def run(
    self,
    scheduler: policies.Scheduler,
    eviction: policies.Eviction,
    prefetch: policies.Prefetcher = 'none',
  ) -> Run:
    """One variant from a cold cache: its report and its event log.

    Args:
      scheduler: see `engine`.
      eviction: see `engine`.
      prefetch: see `engine`; 'auto' as in `Replay`.

    Raises:
      ValueError: no such policy, or no tokens behind the skipped ones.
    """
    if prefetch == 'auto':
      others = len(self.trace.lengths) > len(self._requests)
      mixture = 'mixture:warm=true' if others else 'mixture'
      prefetch = mixture if scheduler == 'runahead' else 'none'
    engine = self.engine(scheduler, eviction, prefetch)
    while engine.busy:
      engine.step()
    facts = self._facts(scheduler, eviction, prefetch)
    report = report_lib.make(engine.log, facts, bounds=self.config.bounds)
    return Run(report, engine.log)

  def _eviction(self, asked: policies.Eviction) -> protocols.Eviction:
    if asked != 'static':
      return policies.eviction(asked)
    return eviction_lib.Static(
      popularity=self._others("eviction 'static'").popularity()
    )

  def _prefetcher(self, asked: policies.Prefetcher) -> protocols.Prefetcher:
    found, warm = policies.parse_prefetch(asked)
    foresight.check(found)
    if not warm:
      return found
    return policies.warmed(found, self._others(f'prefetch {asked!r}').counts())

  def _others(self, what: str) -> trace_lib.Trace:
    """Requests that do not decode: their own routing would tell the future."""
    return self.trace.without(self.config.first, len(self._requests), what)

  def _facts(
    self,
    scheduler: policies.Scheduler,
    eviction: policies.Eviction,
    prefetch: policies.Prefetcher,
  ) -> report_lib.Facts:
    names = spelled.spell_all(scheduler, eviction, prefetch)
    config = dataclasses.replace(
      self.config, scheduler=names[0], eviction=names[1], prefetch=names[2]
    )
    platform, trace = self._platform, self.trace
    kind = 'synthetic' if trace.meta.get('synthetic') else 'recorded'
    return report_lib.Facts(
      config=dataclasses.asdict(config) | {'command': run.command()},
      versions=run.versions(),
      device=f'simulated {platform.name}: {platform.source}',
      link=config.link or f'simulated: {platform.link} bytes and GB/s',
      rows=config.requests,
      layers=trace.layers,
      experts=trace.num_experts,
      top_k=self._model.top_k,
      slots=self.slots,
      block_bytes=self.expert_bytes,
      cache_bytes=self.slots * self.expert_bytes,
      eviction=self._eviction(eviction),
      warmup=config.skip,
      remark=f'simulated on {platform.name} with {kind} routing: no device ran',
    )


def main(
  config: Replay, say: Callable[[str], None], picture: str = ''
) -> list[Run]:
  """Every variant of an experiment; `say` hears what runs.

  `picture` is the path of a timeline of each, empty for none.
  """
  if not pathlib.Path(picture or '.').resolve().parent.is_dir():
    raise ValueError(f'{picture}: make its folder first.')
  found = []
  simulation = Simulation(config)
  for variant in config.variants():
    say(' / '.join(variant))
    found.append(simulation.run(*variant))
  if picture:
    logs, experts = [run.log for run in found], simulation.trace.num_experts
    say(f'timeline: {", ".join(timeline.save_all(picture, logs, experts))}')
  return found


def _routing(config: Replay, shape: shapes.Shape | None) -> trace_lib.Trace:
  name, _, exponent = config.trace.partition(':')
  if name != 'zipf':
    return trace_lib.load(config.trace)
  if shape is None:
    raise ValueError(
      'trace zipf has the layers and experts of a model: give model_shape.'
    )
  try:
    power = float(exponent or 0.8)
  except ValueError:
    power = -1.0
  return synthetic.zipf(
    layers=shape.layers,
    experts=shape.experts,
    top_k=shape.top_k,
    requests=config.first + (config.count or config.requests),
    tokens=config.tokens or 96,
    exponent=power,
  )


def _linked(platform: platforms.Platform, link: str) -> platforms.Platform:
  """The platform with the link that is asked for instead of its own."""
  kind, rate, latency = config_lib.parse_link(link or 'device_put')
  if kind != 'throttled':
    return platform
  return dataclasses.replace(platform, link=((1, rate),), latency_us=latency)
