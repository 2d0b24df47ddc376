"""Policies by name: what there is, and what a name stands for."""

import dataclasses
import difflib
from typing import Any

from bevy_jax import baselines, protocols, runahead
from bevy_jax import trace as trace_lib
from bevy_jax.offload import eviction, patterns, prefetch

SCHEDULERS: dict[str, protocols.Scheduler] = {
  'lockstep': baselines.Lockstep(),
  'runahead': runahead.Runahead(),
  'bevy': baselines.Bevy(),
  'split': baselines.Bevy(max_lag=0),
  'largest': baselines.Largest(),
  'solo': baselines.Solo(),
}
# `static` is made from a trace; `belady` would need the future.
EVICTIONS = eviction.EVICTIONS
PREFETCHERS = prefetch.PREFETCHERS
# Host memory knows no requests: no rule that asks what they will use next.
HOST_EVICTIONS = {n: e for n, e in EVICTIONS.items() if not e.estimates}


def choose(what: str, name: str, known: object) -> None:
  """ValueError with the nearest known name where `name` is not known."""
  names = list(known)  # type: ignore[call-overload]
  if name in names:
    return
  near = [n for n in names if name and n.startswith(str(name))]
  near += difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
  hint = f'; did you mean {near[0]!r}?' if near else '.'
  raise ValueError(f'{what} {name!r} is not known{hint} Known: {names}.')


def check_eviction(name: str, trace: str) -> None:
  """ValueError where an engine cannot run an eviction of this name."""
  if name == 'belady':
    raise ValueError(
      "eviction 'belady' gives up the expert whose next use is farthest, "
      'which no running engine can know; replay a trace with it '
      f'(experiments.ablate --trace=FILE) or choose one of {names()}.'
    )
  choose('eviction', name, names())
  if name == 'static' and not trace:
    raise ValueError(
      "eviction 'static' keeps the most used experts of a routing trace; name "
      'one with trace (--set=engine.trace=FILE).'
    )


def names() -> list[str]:
  """Evictions that an engine can run."""
  return [*EVICTIONS, 'static']


def make_eviction(
  name: str, trace: str, layers: int, experts: int
) -> protocols.Eviction:
  """The eviction of a name that `check_eviction` accepts.

  Args:
    name: what it is called.
    trace: where the trace lies, read for 'static' alone.
    layers: layers of the model that have experts.
    experts: experts of a layer; ValueError where the trace has others.
  """
  if name != 'static':
    return EVICTIONS[name]
  return eviction.Static(popularity=_trace(trace, layers, experts).popularity())


def _trace(path: str, layers: int, experts: int) -> trace_lib.Trace:
  found = trace_lib.load(path)
  if (found.layers, found.num_experts) != (layers, experts):
    raise ValueError(
      f'trace {path} has {found.layers} layers of {found.num_experts} '
      f'experts, but the model has {layers} of {experts}; give a trace of '
      'this model.'
    )
  return found


def parse_prefetch(text: str) -> tuple[protocols.Prefetcher, bool]:
  """A prefetcher, and whether it is to start from a trace's counts.

  NAME[:OPTION=VALUE...]: depth, confidence, guarded for all, warm for
  those that count, p and seed for `oracle`.
  """
  name, *options = text.split(':')
  choose('prefetch', name, PREFETCHERS)
  base: Any = PREFETCHERS[name]
  known = {f.name for f in dataclasses.fields(base)}
  warms = 'counts' in known
  known = known - {'counts'} | ({'warm'} if warms else set())
  values: dict[str, Any] = {}
  for option in options if name != 'none' else ():
    key, _, value = option.partition('=')
    choose(f'prefetch {name!r}: option', key, sorted(known))
    kind = type(getattr(base, key, False))
    values[key] = _option(text, key, value, kind)
  if name == 'none' and options:
    raise ValueError(f"prefetch is {text!r}; 'none' takes no options.")
  warm = values.pop('warm', False)
  return dataclasses.replace(base, **values), warm


def _option(text: str, key: str, value: str, kind: type) -> object:
  """One option's value; ValueError where it is not in its range."""
  least, most = {
    'depth': (1, 64),
    'confidence': (0, 1),
    'p': (0, 1),
    'seed': (0, 2**31 - 1),
  }.get(key, (0, 1))
  try:
    if kind is bool:
      return {'true': True, 'false': False}[value]
    number = kind(value)
    if least <= number <= most:
      return number
  except (KeyError, ValueError):
    pass
  form = 'true or false' if kind is bool else f'{least} to {most}'
  raise ValueError(
    f'prefetch is {text!r}; {key} must be {form}, not {value!r}.'
  )


def check_prefetch(text: str, trace: str) -> None:
  """ValueError where an engine cannot run what this text asks for."""
  prefetcher, warm = parse_prefetch(text)
  refuse_oracle(prefetcher)
  if warm and not trace:
    raise ValueError(
      f'prefetch {text!r} starts from the counts of a routing trace; name one '
      'with trace (--set=engine.trace=FILE).'
    )


def refuse_oracle(prefetcher: protocols.Prefetcher) -> None:
  """ValueError for a prefetcher that needs the future."""
  if isinstance(prefetcher, prefetch.Oracle):
    known = [name for name in PREFETCHERS if name != 'oracle']
    raise ValueError(
      "prefetch 'oracle' guesses what will be used from the future, which no "
      'running engine can know; replay a trace with it (experiments.ablate '
      f'--trace=FILE) or choose one of {known}.'
    )


def make_prefetch(
  text: str, trace: str, layers: int, experts: int
) -> protocols.Prefetcher:
  """The prefetcher of a text that `parse_prefetch` accepts.

  Args:
    text: name and options.
    trace: where the trace lies, read with `warm` alone.
    layers: layers of the model that have experts.
    experts: experts of a layer; ValueError where the trace has others.
  """
  found, warm = parse_prefetch(text)
  if not warm:
    return found
  return warmed(found, _trace(trace, layers, experts).counts())


def warmed(
  prefetcher: protocols.Prefetcher, counts: patterns.Counts
) -> protocols.Prefetcher:
  """A `transition`, `popularity` or `mixture` that starts from counts."""
  known = prefetch.Transition | prefetch.Popularity | prefetch.Mixture
  assert isinstance(prefetcher, known), 'it counts nothing'
  return dataclasses.replace(prefetcher, counts=counts)
