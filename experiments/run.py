"""Runs a decode experiment: builds it, drives it, reports on it."""

import dataclasses
import importlib.metadata
import json
import pathlib
import platform
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import rich.console
import rich.markup

from bevy_jax import config as config_lib
from bevy_jax import engine as engine_lib
from bevy_jax import events, loading, storage
from bevy_jax import llm as llm_lib
from bevy_jax import report as report_lib
from bevy_jax import request as request_lib
from bevy_jax import text as text_lib
from bevy_jax.experiments import configs, display

_BALANCE_TOKENS = 24  # Decoded to see how fast this machine computes.
_ROUNDED = (
  'other tokens (groups of other sizes round differently in this type; '
  '--set=engine.strict=true makes them equal) than'
)
_ROUND = 64  # The context is rounded up to this.


class Run(NamedTuple):
  """One variant's outcome.

  Attributes:
    report: see design of the report in WORKSPACE.md.
    log: its events.
    outputs: what each request generated.
  """

  report: dict[str, Any]
  log: list[events.Event]
  outputs: list[llm_lib.Output]


class Bench:
  """A model on a device with requests to serve, again and again.

  Attributes:
    config: the experiment.
    llm: the model.
    requests: what is asked of every run.
    link: what the device's link is set to.
  """

  def __init__(self, config: configs.Decode, say: Callable[[str], None]):
    self.config = config
    config.variants()
    texts = config.texts()
    dtype = config_lib.param_dtype(config.engine)
    say(f'loading {config.model}')
    model = loading.load(config.model, param_dtype=dtype)
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
    """What the device's link is set to."""
    return self.llm.config.link

  def set_link(self, link: str) -> None:
    """Changes the link for the runs to come."""
    self.llm.executor.drain(link)
    self.llm.config = dataclasses.replace(self.llm.config, link=link)

  def run(
    self,
    scheduler: str,
    eviction: str,
    console: rich.console.Console | None = None,
  ) -> Run:
    """One variant from a cold cache; shows itself on `console`."""
    engine = self.llm.engine(scheduler, eviction)
    if console is None:
      outputs = self._drive(engine, self.requests, lambda: None)
    else:
      title = f'{scheduler} / {eviction}'
      with display.Display(console, title, engine) as shown:
        outputs = self._drive(engine, self.requests, shown.tick)
    facts = self._facts(scheduler, eviction)
    return Run(report_lib.make(engine.log, facts), engine.log, outputs)

  def _drive(
    self,
    engine: engine_lib.Engine,
    requests: list[request_lib.Request],
    tick: Callable[[], None],
  ) -> list[llm_lib.Output]:
    done = []
    for piece in self.llm.run(engine, requests):
      tick()
      if piece.reason is not None:
        done.append(self.llm.output(piece.number, piece.reason))
    return sorted(done)

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
    variant = ('lockstep', self.config.variants()[0][1])
    engine = self.llm.engine(*variant)
    self._drive(engine, self._ask(texts, few), lambda: None)
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

  def _facts(self, scheduler: str, eviction: str) -> report_lib.Facts:
    llm, model = self.llm, self.llm.model
    engine = dataclasses.replace(
      llm.config, scheduler=scheduler, eviction=eviction
    )
    config = dataclasses.asdict(dataclasses.replace(self.config, engine=engine))
    stored = storage.name(model.format or model.experts.dtype)
    device = jax.devices()[0]
    return report_lib.Facts(
      config=config | {'command': command(), 'experts': stored},
      versions=versions(),
      device=f'{device.platform}: {device.device_kind}, {_host()}',
      link=llm.config.link,
      rows=engine.requests,
      layers=len(model.config.moe_ids),
      experts=model.config.num_experts,
      top_k=model.config.top_k,
      slots=llm.slots,
      block_bytes=model.experts.block_bytes,
      cache_bytes=llm.executor.pool_bytes,
      eviction=config_lib.EVICTIONS[eviction],
      warmup=engine.warmup,
    )


def command() -> str:
  """The command line that started this process, without its paths."""
  program = pathlib.Path(sys.argv[0]).stem
  return ' '.join(['python -m bevy_jax.experiments.' + program, *sys.argv[1:]])


def versions() -> dict[str, str]:
  """Of Python and of the packages that decide a result."""
  names = ('bevy-jax', 'jax', 'jaxlib', 'numpy', 'flax')
  found = {'python': platform.python_version()}
  for name in names:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = 'not installed'
  return found


def main(config: configs.Decode, report: str, log: str) -> None:
  """The whole job: runs every variant, prints, writes what is asked for."""
  console = rich.console.Console()
  resolved = json.dumps(dataclasses.asdict(config) | {'versions': versions()})
  console.print(resolved, highlight=False, markup=False, soft_wrap=True)
  bench = Bench(config, lambda what: console.print(f'[dim]{what} ...[/dim]'))
  runs = [bench.run(*variant, console) for variant in config.variants()]
  _texts(console, bench, runs)
  reports = [run.report for run in runs]
  console.print(report_lib.table(reports))
  if 'note' in reports[0]:
    console.print(reports[0]['note'], highlight=False)
  if report:
    report_lib.save(report, reports)
    console.print(f'report: {report}', highlight=False)
  for number, run in enumerate(runs):
    if log:
      path = log if len(runs) == 1 else f'{log}.{number}'
      events.save(path, {'config': resolved}, run.log)
      console.print(f'events: {path}', highlight=False)


def _texts(
  console: rich.console.Console, bench: Bench, runs: list[Run]
) -> None:
  first = runs[0].outputs
  for output, text in zip(first, bench.config.texts(), strict=True):
    console.rule(f'request {output.number} ({output.reason})', align='left')
    shown = rich.markup.escape(text), rich.markup.escape(output.text)
    console.print(f'[bold]{shown[0]}[/bold]{shown[1]}', highlight=False)
  console.rule()
  for run in runs[1:]:
    same = [o.tokens for o in run.outputs] == [o.tokens for o in first]
    say = 'the same tokens as' if same else _ROUNDED
    names = [r.report['config']['engine']['scheduler'] for r in (run, runs[0])]
    console.print(f'{names[0]} gave {say} {names[1]}.')


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


def _host() -> str:
  try:
    with open('/proc/cpuinfo', encoding='utf-8') as file:
      models = [x.split(':')[1].strip() for x in file if 'model name' in x]
  except OSError:
    models = []
  return f'{len(models)} x {models[0]}' if models else platform.processor()
