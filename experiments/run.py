"""Runs a decode experiment: builds it, drives it, reports on it."""

import dataclasses
import importlib.metadata
import pathlib
import platform
import shlex
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import rich.console

from bevy_jax import compiled, events, loading, policies, spelled, storage
from bevy_jax import config as config_lib
from bevy_jax import engine as engine_lib
from bevy_jax import llm as llm_lib
from bevy_jax import report as report_lib
from bevy_jax import request as request_lib
from bevy_jax import text as text_lib
from bevy_jax.experiments import configs, display, interrupt

_BALANCE_TOKENS = 24  # Decoded to see how fast this machine computes.
_ROUND = 64  # The context is rounded up to this.


class Run(NamedTuple):
  """One variant's outcome.

  Attributes:
    report: see WORKSPACE.md; empty where nothing was decoded.
    log: its events.
    outputs: what each request generated; 'interrupted' where it had to stop.
    interrupted: whether Ctrl-C ended the run.
  """

  report: dict[str, Any]
  log: list[events.Event]
  outputs: list[llm_lib.Output]
  interrupted: bool = False


class Bench:
  """A model on a device with requests to serve, again and again.

  Attributes:
    config: the experiment.
    llm: the model.
    requests: what is asked of every run.
    link: what carries the loads to the device.
  """

  def __init__(self, config: configs.Decode, say: Callable[[str], None]):
    self.config = config
    config.variants()
    texts = config.texts()
    request_lib.SamplingParams(
      temperature=config.temperature, top_p=config.top_p, seed=config.seed
    )
    dtype = config_lib.param_dtype(config.engine)
    say(f'loading {config.model}')
    model = loading.load(config.model, param_dtype=dtype, engine=config.engine)
    engine = dataclasses.replace(
      config.engine, context=_context(config, model, texts)
    )
    say('compiling')
    self.llm = llm_lib.LLM(model, engine)
    self.requests = self._ask(texts, config.new_tokens)
    if config.balance:
      say('measuring how fast this machine computes, to choose the link')
      self.set_link(self._balanced(texts))

  @property
  def link(self) -> str:
    """What carries the loads to the device."""
    return self.llm.executor.link.words

  @property
  def exact(self) -> bool:
    """Whether every scheduler must give the same tokens."""
    float32 = self.llm.model.params['embed'].dtype == jnp.float32
    return bool(float32) or self.llm.config.strict

  def set_link(self, link: str) -> None:
    """Changes the link for the runs to come."""
    self.llm.executor.drain(link)
    self.llm.config = dataclasses.replace(self.llm.config, link=link)

  def set_cache(self, cache: float | int) -> None:
    """Lets the runs to come use so many of the slots that there are.

    Nothing is compiled for it: programs know the pool and not how much of it
    is used. ValueError where there are not so many.
    """
    config = dataclasses.replace(self.llm.config, cache=cache)
    slots = config_lib.slots(config, self.llm.model.config)
    if slots > self.llm.executor.slots:
      raise ValueError(
        f'cache {cache} is {slots} slots, but the device has '
        f'{self.llm.executor.slots}; open it with the largest cache first.'
      )
    self.llm.config, self.llm.slots = config, slots

  def run(
    self,
    scheduler: policies.Scheduler,
    eviction: policies.Eviction,
    prefetch: policies.Prefetcher = 'none',
    console: rich.console.Console | None = None,
  ) -> Run:
    """One variant from a cold cache; shows itself on `console`."""
    engine = self.llm.engine(scheduler, eviction, prefetch)
    if console is None:
      outputs = self._drive(engine, self.requests, lambda: None)
    else:
      title = configs.title(spelled.spell_all(scheduler, eviction, prefetch))
      with display.Display(console, title, engine) as shown:
        outputs = self._drive(engine, self.requests, shown.tick)
    interrupted = any(o.reason == 'interrupted' for o in outputs)
    try:
      facts = self._facts(scheduler, eviction, prefetch)
      report = report_lib.make(engine.log, facts)
    except ValueError:
      # All may have ended before anything could be measured.
      if not interrupted and all(o.reason != 'error' for o in outputs):
        raise
      report = {}
    return Run(report, engine.log, outputs, interrupted)

  def _drive(
    self,
    engine: engine_lib.Engine,
    requests: list[request_lib.Request],
    tick: Callable[[], None],
  ) -> list[llm_lib.Output]:
    """Runs the requests; Ctrl-C ends them where they stand."""
    ends = {r.number: ('interrupted', '') for r in requests}
    with interrupt.Interrupt() as interrupted:
      for piece in self.llm.run(engine, requests):
        tick()
        if piece.reason is not None:
          ends[piece.number] = piece.reason, piece.detail
        if interrupted.asked:
          break
    return [self.llm.output(number, *why) for number, why in ends.items()]

  def _ask(
    self, texts: list[str], new_tokens: int
  ) -> list[request_lib.Request]:
    c = self.config
    sampling = [
      request_lib.SamplingParams(
        temperature=c.temperature, top_p=c.top_p, seed=c.seed + n
      )
      for n in range(len(texts))
    ]
    return self.llm.requests(
      texts, new_tokens, sampling, ignore_eos=c.ignore_eos
    )

  def _balanced(self, texts: list[str]) -> str:
    """A throttled link with which lockstep computes the asked share.

    Lockstep never computes and loads at once, so with g seconds of device
    time, and n bytes loaded, a share s needs n / (g * (1 / s - 1)) bytes/s.
    """
    few = min(_BALANCE_TOKENS, self.config.new_tokens)
    variant = ('lockstep', self.config.variants()[0][1], 'none')
    engine = self.llm.engine(*variant)
    outputs = self._drive(engine, self._ask(texts, few), lambda: None)
    if any(o.reason == 'interrupted' for o in outputs):
      raise KeyboardInterrupt
    report = report_lib.make(engine.log, self._facts(*variant))
    busy = report['gpu_busy'] * report['decode_seconds']
    share = self.config.balance
    speed = report['load_bytes'] / (busy * (1 / share - 1)) / 1e9
    if speed <= 0:
      raise ValueError(
        'the link cannot be balanced: nothing is loaded with this cache; '
        'set --cache lower or give --link.'
      )
    return f'throttled:{speed:.4g}'

  def _facts(
    self,
    scheduler: policies.Scheduler,
    eviction: policies.Eviction,
    prefetch: policies.Prefetcher,
  ) -> report_lib.Facts:
    llm, model = self.llm, self.llm.model
    names = spelled.spell_all(scheduler, eviction, prefetch)
    engine = dataclasses.replace(
      llm.config, scheduler=names[0], eviction=names[1], prefetch=names[2]
    )
    config = dataclasses.asdict(dataclasses.replace(self.config, engine=engine))
    stored = storage.name(model.format or model.experts.dtype)
    return report_lib.Facts(
      config=config | {'command': command(), 'experts': stored},
      versions=versions(),
      device=device(),
      link=llm.executor.link.words,
      rows=engine.requests,
      layers=len(model.config.moe_ids),
      experts=model.config.num_experts,
      top_k=model.config.top_k,
      slots=llm.slots,
      block_bytes=model.experts.block_bytes,
      cache_bytes=llm.executor.pool_bytes // llm.executor.slots * llm.slots,
      eviction=llm.eviction(eviction),
      warmup=engine.warmup,
      host_blocks=model.experts.capacity,
      remark=model.experts.remark,
      quota=config_lib.quota(engine, len(model.config.moe_ids), llm.slots),
    )


def command() -> str:
  """The command line that started this process."""
  program = pathlib.Path(sys.argv[0]).stem
  flags = shlex.join(sys.argv[1:])
  return f'python -m bevy_jax.experiments.{program} {flags}'.strip()


def versions() -> dict[str, str]:
  """Of Python and the packages that decide a result, and what the engine is."""
  names = ('bevy-jax', 'jax', 'jaxlib', 'numpy', 'flax')
  found = {'python': platform.python_version()}
  for name in names:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = 'not installed'
  found['engine'] = 'compiled' if compiled.used() else 'python'
  return found


def _context(
  config: configs.Decode, model: loading.Loaded, texts: list[str]
) -> int:
  """Positions that the longest request needs, rounded up."""
  if config.engine.context:
    return config.engine.context
  tokenizer = text_lib.Text(model.directory)
  longest = max((len(tokenizer.encode(t)) for t in texts), default=0)
  need = -(-(longest + config.new_tokens) // _ROUND) * _ROUND
  return min(need, model.config.context)


def device() -> str:
  """The device and the host's processors in words."""
  found = jax.devices()[0]
  return f'{found.platform}: {found.device_kind}, {host()}'


def host() -> str:
  """The host's processors in words; takes no accelerator."""
  try:
    with open('/proc/cpuinfo', encoding='utf-8') as file:
      models = [x.split(':')[1].strip() for x in file if 'model name' in x]
  except OSError:
    models = []
  return f'{len(models)} x {models[0]}' if models else platform.processor()
