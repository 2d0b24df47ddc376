"""Cells on simulated machines: recorded routing, stated costs."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from bevy_jax import config as config_lib
from bevy_jax import events, protocols
from bevy_jax import trace as trace_lib
from bevy_jax.experiments import cell_figures, simulation, study

# Prefetchers that may start from what other requests used.
_COUNTING = ('transition', 'popularity', 'mixture')
# Tokens of a part of a request: the fewer there are, the less is measured, but
# many requests fill a cache within few of them.
_LEAST, _PART = 4, 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What all cells of an experiment have in common.

  Attributes:
    trace: see `Replay.trace`.
    first: first request of it that decodes.
    skip: tokens of every request before the measured window.
    tokens: of every request in all.
    model_shape: see `shapes.parse`; what experts and layers weigh.
  """

  trace: str = 'bundled'
  first: int = 0
  skip: int = 14
  tokens: int = 32
  model_shape: str = 'gpt-oss-20b:int4'

  def __post_init__(self) -> None:
    if not 0 <= self.skip < self.tokens:
      raise ValueError(
        f'skip is {self.skip} and tokens {self.tokens}; skip must be at least '
        '0 and below tokens.'
      )


DEFAULT = Settings()


def measure(key: study.Row, settings: Settings) -> study.Row:
  """A cell of `cell_figures.KEY`; its place is a platform's name.

  A cache of 0 is room for the experts of one layer and no more, so that
  nearly all that a step uses is loaded for it.
  """
  sim, note = simulate(key, settings)
  variant = key['scheduler'], key['eviction'], key['prefetch']
  return figure(sim, log(sim, variant), note)


def simulate(
  key: study.Row, settings: Settings
) -> tuple[simulation.Simulation, str]:
  """The machine of a cell, and a note where requests are parts of others."""
  trace, part = _routing(settings, key['requests'])
  config = simulation.Replay(
    trace=settings.trace,
    platform=key['place'],
    model_shape=settings.model_shape,
    requests=key['requests'],
    cache=key['cache'] or trace.num_experts,
    first=0 if part else settings.first,
    skip=part // 3 if part else settings.skip,
    tokens=part or settings.tokens,
    bounds=False,
  )
  note = f'parts of {part} tokens of recorded requests' if part else ''
  return simulation.Simulation(config, trace), note


def log(
  sim: simulation.Simulation,
  variant: tuple[str | protocols.Scheduler, str, str],
) -> list[events.Event]:
  """The events of a whole run: scheduler, eviction and prefetch."""
  scheduler, eviction, prefetch = variant
  engine = sim.engine(
    scheduler,
    eviction,
    prefetcher(prefetch, sim.trace, sim.config.first, sim.config.requests),
  )
  while engine.busy:
    engine.step()
  return engine.log


def figure(
  sim: simulation.Simulation, log: list[events.Event], note: str = ''
) -> study.Row:
  """The figures of a run's window."""
  return cell_figures.figure(
    log,
    rows=sim.config.requests,
    skip=sim.config.skip,
    layers=sim.trace.layers,
    experts=sim.trace.num_experts,
    expert_bytes=sim.expert_bytes,
    note=note,
  )


def prefetcher(
  text: str, trace: trace_lib.Trace, first: int, count: int
) -> protocols.Prefetcher:
  """By its name; one that counts starts from what others used, if any."""
  found, _ = config_lib.parse_prefetch(text)
  if text.partition(':')[0] in _COUNTING and len(trace.lengths) > count:
    others = trace.without(first, count, text)
    found = config_lib.warmed(found, others.counts())
  return found


@functools.lru_cache(maxsize=4)
def _routing(settings: Settings, requests: int) -> tuple[trace_lib.Trace, int]:
  """The routing of so many requests, and the tokens of a part of one.

  Parts are what decodes where fewer were recorded; else 0.
  """
  trace = trace_lib.load(settings.trace)
  count = len(trace.lengths)
  if settings.first + requests <= count:
    return trace, 0
  parts = -(-requests // count)
  tokens = min(_PART, settings.tokens, int(trace.lengths.min()) // parts)
  if tokens < _LEAST:
    raise ValueError(
      f'{settings.trace} has {count} requests, the shortest of '
      f'{trace.lengths.min()} tokens: too few to cut {requests} from them; '
      'ask for fewer requests, or name a longer trace.'
    )
  cut = trace.experts[:, : parts * tokens]
  shape = (count * parts, tokens, *cut.shape[2:])
  lengths = np.full(count * parts, tokens, np.int32)
  return dataclasses.replace(
    trace, experts=cut.reshape(shape), lengths=lengths
  ), tokens


def seconds(requests: int, variant: Sequence[str]) -> float:
  """What a cell takes a processor, roughly: to tell the time that is left."""
  scheduler, _, prefetch = variant
  each = 0.06 if prefetch == 'none' else 0.1
  rows = min(requests, 32)  # More of them decode fewer tokens.
  return (0.15 if scheduler == 'runahead' else each) * (2 + rows)
