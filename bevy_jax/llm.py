"""The five-line use: load a model, generate text.

from bevy_jax import LLM
llm = LLM.load('demo', cache=0.5)
for out in llm.generate(['Once upon a time', 'def fib(n):']):
  print(out.text)
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

from bevy_jax import (
  collector,
  device,
  events,
  hops,
  loading,
  policies,
  protocols,
)
from bevy_jax import config as config_lib
from bevy_jax import engine as engine_lib
from bevy_jax import request as request_lib
from bevy_jax import text as text_lib

_BEFORE = 4  # Prompt tokens that a first piece is decoded behind.
_CONTEXT = 1024  # Positions a row where neither model nor user says less.


# One for all prompts, one each, or the default: greedy.
Sampling = (
  request_lib.SamplingParams | Sequence[request_lib.SamplingParams] | None
)


class Piece(NamedTuple):
  """Text that a request has just gained.

  Attributes:
    number: index of its prompt.
    text: whole characters.
    reason: why the request ended, None while it goes on: 'eos', 'stop',
      'length' or 'error'.
    detail: what went wrong where it is 'error': a value in the model was not
      finite, or an expert could not be loaded.
  """

  number: int
  text: str
  reason: str | None = None
  detail: str = ''


class Output(NamedTuple):
  """A finished request.

  Attributes:
    number: index of its prompt.
    text: the generated text, without its ending token or stop string.
    tokens: the generated token ids, the ending one included.
    reason: see `Piece`.
    detail: see `Piece`.
  """

  number: int
  text: str
  tokens: tuple[int, ...]
  reason: str
  detail: str = ''


class LLM:
  """A model on a device, ready to serve several requests at once.

  The cache stays warm between calls. One call at a time.

  Attributes:
    model: a loaded model.
    config: how it runs.
    executor: the device's side.
    context: positions a row can hold.
  """

  def __init__(self, model: loading.Loaded, config: config_lib.EngineConfig):
    self.model, self.config = model, config
    self.context = config.context or min(model.config.context, _CONTEXT)
    if self.context > model.config.context:
      raise ValueError(
        f'context is {self.context}, but the model was made for '
        f'{model.config.context} positions; ask for at most that.'
      )
    self.executor = device.DeviceExecutor(
      model.config,
      model.params,
      model.experts,
      config,
      self.context,
      model.format,
    )
    self.slots = self.executor.slots
    self._engine: engine_lib.Engine | None = None  # Who has the device.
    self._own: engine_lib.Engine | None = None  # What `stream` made last.
    self._watches: dict[int, text_lib.Watch] = {}

  @functools.cached_property
  def text(self) -> text_lib.Text:
    """The model's tokenizer, read when it is first needed."""
    return text_lib.Text(self.model.directory)

  @classmethod
  def load(cls, path: str | pathlib.Path, **options: Any) -> 'LLM':
    """Loads 'demo', a Hugging Face directory or a converted one.

    Args:
      path: 'demo', or the directory.
      **options: fields of `EngineConfig`, for instance `cache=0.5`.

    Raises:
      ValueError: no such option, model or policy, or no room for it; says
        what would do.
    """
    known = [f.name for f in dataclasses.fields(config_lib.EngineConfig)]
    for name in options:
      config_lib.choose('option', name, known)
    config = config_lib.EngineConfig(**options)
    dtype = config_lib.param_dtype(config)
    return cls(loading.load(path, param_dtype=dtype, engine=config), config)

  def close(self) -> None:
    """Ends what runs, and threads that read the disk; safe to repeat."""
    self.executor.drain()
    self.model.experts.close()
    self._engine = None

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  def engine(
    self,
    scheduler: policies.Scheduler = '',
    eviction: policies.Eviction = '',
    prefetch: policies.Prefetcher = '',
  ) -> engine_lib.Engine:
    """A fresh engine with a cold cache on this device; ends any other.

    A policy is a name, an object or text that names one of your own, see
    `policies`; what is not given is the config's.

    Args:
      scheduler: who schedules.
      eviction: who makes room.
      prefetch: who guesses.

    Raises:
      ValueError: no such policy, or its trace is not of this model.
    """
    config = self.config
    prefetcher = self.prefetcher(prefetch or config.prefetch)
    self.executor.drain()
    self.executor.set_gates(prefetcher.gates)
    self._engine = engine_lib.Engine(
      self.model.config,
      self.executor,
      hops.give(
        policies.scheduler(scheduler or config.scheduler),
        self.executor.hops,
        len(self.model.config.moe_ids),
      ),
      self.eviction(eviction or config.eviction),
      rows=config.requests,
      slots=self.slots,
      link_depth=config.link_depth,
      quota=config_lib.quota(
        config, len(self.model.config.moe_ids), self.slots
      ),
      stop=self._on_token,
      prefetcher=prefetcher,
    )
    return self._engine

  def prefetcher(self, asked: policies.Prefetcher) -> protocols.Prefetcher:
    """A prefetcher by name and options, or itself; no oracle."""
    model, trace = self.model.config, self.config.trace
    policies.check_prefetch(asked, trace)
    return policies.make_prefetch(
      asked, trace, len(model.moe_ids), model.num_experts
    )

  def eviction(self, asked: policies.Eviction) -> protocols.Eviction:
    """An eviction by name, or itself; ValueError if its trace does not fit."""
    model, trace = self.model.config, self.config.trace
    return policies.make_eviction(
      asked, trace, len(model.moe_ids), model.num_experts
    )

  def requests(
    self,
    prompts: Sequence[str | Sequence[int]],
    new_tokens: int,
    sampling: Sampling = None,
    *,
    ignore_eos: bool = False,
  ) -> list[request_lib.Request]:
    """Prompts as requests for `run`.

    Args:
      prompts: texts or lists of token ids.
      new_tokens: that each generates at most.
      sampling: see `generate`.
      ignore_eos: whether ending tokens end nothing: equal lengths to measure.

    Raises:
      ValueError: a prompt that is empty, too long or of unknown tokens.
    """
    if not prompts or isinstance(prompts, str):
      raise ValueError(
        'there is nothing to generate: prompts must be a list of texts with '
        f'at least one entry, not {prompts!r}.'
      )
    if sampling is None:
      sampling = request_lib.SamplingParams()
    if isinstance(sampling, request_lib.SamplingParams):
      sampling = [sampling] * len(prompts)
    if len(sampling) != len(prompts):
      raise ValueError(
        f'there are {len(prompts)} prompts, but {len(sampling)} sampling '
        'settings; give one for all or one for each.'
      )
    eos = () if ignore_eos else self.model.config.eos_ids
    return [
      request_lib.Request(
        number=number,
        prompt=self._tokens(number, prompt, new_tokens),
        new_tokens=new_tokens,
        sampling=settings,
        eos_ids=eos,
      )
      for number, (prompt, settings) in enumerate(
        zip(prompts, sampling, strict=True)
      )
    ]

  def stream(
    self,
    prompts: Sequence[str | Sequence[int]],
    new_tokens: int = 64,
    sampling: Sampling = None,
    stop: Sequence[str] = (),
  ) -> Iterator[Piece]:
    """Generates, giving each piece of text as soon as it is certain.

    Args and errors are those of `generate`.
    """
    engine = self._own
    if engine is None or engine is not self._engine or engine.busy:
      engine = self._own = self.engine()
    engine.log.clear()  # Nobody asks this engine for a report.
    requests = self.requests(prompts, new_tokens, sampling)
    yield from self.run(engine, requests, stop)

  def generate(
    self,
    prompts: Sequence[str | Sequence[int]],
    new_tokens: int = 64,
    sampling: Sampling = None,
    stop: Sequence[str] = (),
  ) -> Iterator[Output]:
    """Generates, giving finished requests in the order of the prompts.

    Look at `reason`: where it is 'error' the text ends there, and `detail`
    says why.

    Args:
      prompts: texts or lists of token ids; more than rows wait their turn.
      new_tokens: that each generates at most.
      sampling: one for all, one for each, or None: greedy.
      stop: texts that end a request; they are not given.

    Raises:
      ValueError: a prompt that is empty, too long or of unknown tokens.
    """
    done: dict[int, Piece] = {}
    following = 0
    for piece in self.stream(prompts, new_tokens, sampling, stop):
      if piece.reason is not None:
        done[piece.number] = piece
      while following in done:
        end = done[following]
        yield self.output(following, end.reason or '', end.detail)
        following += 1

  def output(self, number: int, reason: str, detail: str = '') -> Output:
    """What a request that has ended has generated."""
    watch = self._watches[number]
    return Output(number, watch.text, tuple(watch.tokens), reason, detail)

  def run(
    self,
    engine: engine_lib.Engine,
    requests: Sequence[request_lib.Request],
    stop: Sequence[str] = (),
  ) -> Iterator[Piece]:
    """Drives this device's engine until the requests have ended.

    Args:
      engine: what `engine` gave last; its log grows.
      requests: what `requests` made.
      stop: see `generate`.

    Raises:
      ValueError: another engine has taken the device since.
    """
    if isinstance(stop, str):
      raise ValueError(f'stop must be a list of texts, not {stop!r}.')
    self._watches = {
      r.number: text_lib.Watch(self.text, stop, r.eos_ids, r.prompt[-_BEFORE:])
      for r in requests
    }
    shown = {r.number: 0 for r in requests}
    read = len(engine.log)
    for request in requests:
      engine.submit(request)
    with collector.rare():
      while engine.busy:
        if engine is not self._engine:
          raise ValueError(
            'another call has taken this LLM since: it serves one call at a '
            'time; finish one before the next, or give it all the prompts.'
          )
        engine.step()
        while read < len(engine.log):
          event = engine.log[read]
          read += 1
          if isinstance(event, events.Token | events.Finished):
            yield from self._news(event, shown)

  def _news(
    self, event: events.Token | events.Finished, shown: dict[int, int]
  ) -> Iterator[Piece]:
    number, reason, detail = event.request, None, ''
    watch = self._watches[number]
    if isinstance(event, events.Finished):
      watch.finish()
      reason, detail = event.reason, event.detail
    piece = watch.text[shown[number] :]
    shown[number] = len(watch.text)
    if piece or reason:
      yield Piece(number, piece, reason, detail)

  def _on_token(self, progress: request_lib.Progress, token: int) -> str | None:
    stopped = self._watches[progress.request.number].feed(token)
    return 'stop' if stopped else None

  def _tokens(
    self, number: int, prompt: str | Sequence[int], new_tokens: int
  ) -> tuple[int, ...]:
    ids = self.text.encode(prompt) if isinstance(prompt, str) else prompt
    vocab = self.model.config.vocab_size
    if not ids or new_tokens < 1:
      raise ValueError(
        f'prompt {number} has {len(ids)} tokens and {new_tokens} new ones '
        'are asked for; both must be at least 1.'
      )
    if not all(0 <= i < vocab for i in ids):
      raise ValueError(
        f'prompt {number} has token {max(ids)} (least {min(ids)}), but the '
        f'model knows 0 to {vocab - 1}.'
      )
    if len(ids) + new_tokens > self.context:
      raise ValueError(
        f'prompt {number} has {len(ids)} tokens and {new_tokens} new ones '
        f'are asked for, but a row holds {self.context} positions; shorten '
        f'it, or set context (the model allows {self.model.config.context}).'
      )
    return tuple(ids)
