"""A run's event log -> the routing trace of what it decoded."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from bevy_jax import events
from bevy_jax import trace as trace_lib


@dataclasses.dataclass
class _Path:
  """What one request used, layers within tokens, and how it ended."""

  experts: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
  tokens: int = 0
  reason: str | None = None


def trace(
  log: Sequence[events.Event],
  *,
  layers: int,
  num_experts: int,
  meta: dict[str, Any],
) -> trace_lib.Trace:
  """The decode routing of one run, in order of requests and tokens.

  Row n has the request of n-th lowest number, and ids keep the router's
  order. Prompts are not in it, except for their last tokens, which decode. A
  pass that an error or an interruption cut short is left out.

  Args:
    log: all events of one run.
    layers: MoE layers of the model.
    num_experts: experts of a layer.
    meta: what else a reader should know: model, top_k, licence, source.

  Raises:
    ValueError: events are missing or come twice, or nothing was decoded.
  """
  paths: dict[int, _Path] = {}
  for index, event in enumerate(log):
    if isinstance(event, events.Admitted):
      if event.request in paths:
        raise ValueError(
          f'event {index} admits request {event.request} a second time, so the '
          'log holds more than one run; record one run alone.'
        )
      paths[event.request] = _Path()
    elif isinstance(event, events.Routed | events.Token | events.Finished):
      _follow(paths.get(event.request), event, index, layers)
  lengths = [_length(number, paths[number], layers) for number in sorted(paths)]
  if not any(lengths):
    raise ValueError(
      f'the log of {len(log)} events has no token whose routing is whole, so '
      'there is nothing to record; let every request generate a token.'
    )
  top_k = len(next(p.experts[0] for p in paths.values() if p.experts))
  shape = len(lengths), max(lengths), layers, top_k
  experts = np.full(shape, -1, np.int16)
  for row, number in enumerate(sorted(paths)):
    whole = paths[number].experts[: lengths[row] * layers]
    for at, ids in enumerate(whole):
      if len(ids) != top_k:
        raise ValueError(
          f'request {number}, token {at // layers}, layer {at % layers} uses '
          f'{len(ids)} experts, but others use {top_k}; the log is damaged.'
        )
    if whole:
      experts[row, : lengths[row]] = np.reshape(whole, (-1, layers, top_k))
  made = trace_lib.Trace(
    experts=experts,
    lengths=np.array(lengths, np.int32),
    num_experts=num_experts,
    meta={'phase': 'decode', 'top_k': top_k} | meta,
  )
  trace_lib.check(made)
  return made


def _follow(
  path: _Path | None,
  event: events.Routed | events.Token | events.Finished,
  index: int,
  layers: int,
) -> None:
  """Adds an event; a request reveals its layers in order, none left out."""
  if path is None:
    raise ValueError(
      f'event {index} is about request {event.request}, which was never '
      'admitted: the log has lost its beginning; record the run again.'
    )
  if isinstance(event, events.Finished):
    path.reason = event.reason
  elif isinstance(event, events.Token):
    path.tokens += 1
  else:
    token, layer = divmod(len(path.experts), layers)
    if (event.token, event.layer) != (token, layer):
      raise ValueError(
        f'event {index} routes token {event.token} of request {event.request} '
        f'at layer {event.layer}, but token {token} at layer {layer} should '
        'come next: the log has a hole; record the run again.'
      )
    path.experts.append(event.experts)


def _length(number: int, path: _Path, layers: int) -> int:
  """Tokens whose routing is whole; ValueError where some was lost."""
  length, rest = divmod(len(path.experts), layers)
  cut = path.reason in (None, 'error')
  if path.tokens > length or (not cut and (path.tokens < length or rest)):
    raise ValueError(
      f'request {number} ended with {path.reason!r} after {path.tokens} '
      f'tokens, but {len(path.experts)} routings at {layers} layers are known: '
      'the log has a hole; record the run again.'
    )
  return length


def licence(directory: pathlib.Path) -> str | None:
  """The licence that a model card's first lines name, None where none does."""
  card = directory / 'README.md'
  if not card.is_file():
    return None
  head, *rest = card.read_text('utf-8', errors='replace').split('\n---', 1)
  if not rest or not head.startswith('---'):
    return None
  for line in head.splitlines():
    name, _, value = line.partition(':')
    if name == 'license' and value.strip():
      return value.strip().strip('\'"')
  return None
