"""Policies by name, by import path or as they are: what each stands for.

Whatever takes a policy takes a name of the tables below, an object, or text
such as `my_module.MyScheduler(lag=3)`.
"""

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

from bevy_jax import baselines, protocols, runahead, spelled
from bevy_jax import trace as trace_lib
from bevy_jax.offload import eviction as eviction_lib
from bevy_jax.offload import patterns, prefetch

SCHEDULERS: dict[str, protocols.Scheduler] = {
  'lockstep': baselines.Lockstep(),
  'runahead': runahead.Runahead(),
  'bevy': baselines.Bevy(),
  'split': baselines.Bevy(max_lag=0),
  'largest': baselines.Largest(),
  'solo': baselines.Solo(),
}
# `static` is made from a trace; `belady` would need the future.
EVICTIONS = eviction_lib.EVICTIONS
PREFETCHERS = prefetch.PREFETCHERS
# Host memory knows no requests: no rule that asks what they will use next.
HOST_EVICTIONS = {n: e for n, e in EVICTIONS.items() if not e.estimates}


Scheduler = str | protocols.Scheduler
Eviction = str | protocols.Eviction
Prefetcher = str | protocols.Prefetcher


def choose(what: str, name: str, known: object) -> None:
  """ValueError with the nearest known name where `name` is not known."""
  names = list(known)  # type: ignore[call-overload]
  if name in names:
    return
  near = [n for n in names if name and n.startswith(str(name))]
  near += difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
  hint = f'; did you mean {near[0]!r}?' if near else '.'
  raise ValueError(f'{what} {name!r} is not known{hint} Known: {names}.')


def scheduler(asked: Scheduler) -> protocols.Scheduler:
  """A scheduler by name or path, or itself; ValueError says what it lacks."""
  if isinstance(asked, str) and not spelled.is_path(asked):
    _choose_own('scheduler', asked, list(SCHEDULERS))
    return SCHEDULERS[asked]
  found: protocols.Scheduler = _own('scheduler', asked, 'launch')
  return found


def check_eviction(asked: Eviction, trace: str) -> None:
  """ValueError where an engine cannot run such an eviction."""
  if asked == 'belady':
    raise ValueError(
      "eviction 'belady' gives up the expert whose next use is farthest, "
      'which no running engine can know; replay a trace with it '
      f'(experiments.ablate --trace=FILE) or choose one of {names()}.'
    )
  if asked != 'static':
    eviction(asked)
  elif not trace:
    raise ValueError(
      "eviction 'static' keeps the most used experts of a routing trace; name "
      'one with trace (--set=engine.trace=FILE).'
    )


def eviction(asked: Eviction) -> protocols.Eviction:
  """An eviction that needs no trace; see `scheduler`."""
  if isinstance(asked, str) and not spelled.is_path(asked):
    _choose_own('eviction', asked, names())
    if asked == 'static':
      check_eviction(asked, '')
    return EVICTIONS[asked]
  found: protocols.Eviction = _own('eviction', asked, 'victim')
  return found


def names() -> list[str]:
  """Evictions that an engine can run."""
  return [*EVICTIONS, 'static']


def make_eviction(
  asked: Eviction, trace: str, layers: int, experts: int
) -> protocols.Eviction:
  """The eviction that `check_eviction` accepts.

  Args:
    asked: what it is called, or itself.
    trace: where the trace lies, read for 'static' alone.
    layers: layers of the model that have experts.
    experts: experts of a layer; ValueError where the trace has others.
  """
  if asked != 'static':
    return eviction(asked)
  popularity = _trace(trace, layers, experts).popularity()
  return eviction_lib.Static(popularity=popularity)


def _trace(path: str, layers: int, experts: int) -> trace_lib.Trace:
  found = trace_lib.load(path)
  if (found.layers, found.num_experts) != (layers, experts):
    raise ValueError(
      f'trace {path} has {found.layers} layers of {found.num_experts} '
      f'experts, but the model has {layers} of {experts}; give a trace of '
      'this model.'
    )
  return found


def parse_prefetch(asked: Prefetcher) -> tuple[protocols.Prefetcher, bool]:
  """A prefetcher, and whether it is to start from a trace's counts.

  NAME[:OPTION=VALUE...]: depth, confidence, guarded for all, warm for
  those that count, p and seed for `oracle`; or see `scheduler`. ValueError
  where there is no such prefetcher or option.
  """
  if not isinstance(asked, str) or spelled.is_path(asked):
    return _own('prefetch', asked, 'guess'), False
  name, *options = asked.split(':')
  _choose_own('prefetch', name, list(PREFETCHERS))
  base: Any = PREFETCHERS[name]
  known = {f.name for f in dataclasses.fields(base)}
  warms = 'counts' in known
  known = known - {'counts'} | ({'warm'} if warms else set())
  values: dict[str, Any] = {}
  for option in options if name != 'none' else ():
    key, _, value = option.partition('=')
    choose(f'prefetch {name!r}: option', key, sorted(known))
    kind = type(getattr(base, key, False))
    values[key] = _option(asked, key, value, kind)
  if name == 'none' and options:
    raise ValueError(f"prefetch is {asked!r}; 'none' takes no options.")
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


def check_prefetch(asked: Prefetcher, trace: str) -> None:
  """ValueError where an engine cannot run what is asked for."""
  prefetcher, warm = parse_prefetch(asked)
  refuse_oracle(prefetcher)
  if warm and not trace:
    raise ValueError(
      f'prefetch {asked!r} starts from the counts of a routing trace; name one '
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
  asked: Prefetcher, trace: str, layers: int, experts: int
) -> protocols.Prefetcher:
  """The prefetcher that `parse_prefetch` accepts.

  Args:
    asked: name and options, or itself.
    trace: where the trace lies, read with `warm` alone.
    layers: layers of the model that have experts.
    experts: experts of a layer; ValueError where the trace has others.
  """
  found, warm = parse_prefetch(asked)
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


def variants(
  items: Sequence[str],
  scheduler: Scheduler,
  eviction: Eviction,
  prefetch: Prefetcher,
) -> list[tuple[str, str, str]]:
  """Scheduler, eviction and prefetcher of each item, as text; not checked.

  Args:
    items: scheduler[:eviction[:prefetch]]; none for the usual three alone.
    scheduler: where an item says none.
    eviction: likewise.
    prefetch: likewise.
  """
  usual = spelled.spell_all(scheduler, eviction, prefetch)
  found = []
  for item in spelled.whole(items) or ('',):
    first, second, third = [*spelled.split(item), '', ''][:3]
    found.append((first or usual[0], second or usual[1], third or usual[2]))
  return found


def _choose_own(what: str, name: str, known: list[str]) -> None:
  try:
    choose(what, name, known)
  except ValueError as error:
    raise ValueError(f'{error} One of your own is module.Class.') from None


_BASES = {
  'scheduler': 'SchedulerBase',
  'eviction': 'EvictionBase',
  'prefetch': 'PrefetcherBase',
}
# What the engine reads of each, beside its one method.
_READ = {
  'scheduler': ('depth', 'wants'),
  'eviction': ('estimates',),
  'prefetch': (
    'depth', 'confidence', 'guarded', 'keeps', 'gates', 'start',
  ),
}  # fmt: skip


def _own(what: str, asked: object, method: str) -> Any:
  """A policy that is not ours; ValueError where no engine could use it."""
  found = spelled.make(what, asked) if isinstance(asked, str) else asked
  base, kind = f'bevy_jax.{_BASES[what]}', type(found)
  if isinstance(found, type):
    raise ValueError(
      f'{what} is the class {found.__name__}; give one of it: '
      f'{found.__name__}().'
    )
  settings = getattr(found, '__dataclass_params__', None)
  if settings is None or not settings.frozen:
    raise ValueError(
      f'{what} is {found!r}, but must be a frozen dataclass, so that the same '
      'view always gives the same decision: '
      f'@dataclasses.dataclass(frozen=True, kw_only=True) on {kind.__name__}, '
      f'derived from {base}.'
    )
  if not callable(getattr(found, method, None)):
    raise ValueError(
      f'{what} {kind.__name__} has no method {method!r}, which is what '
      f'decides; derive it from {base} and write that one.'
    )
  lacks = [name for name in _READ[what] if not hasattr(found, name)]
  if lacks:
    raise ValueError(
      f'{what} {kind.__name__} has no {lacks}; derive it from {base}, which '
      'has them.'
    )
  return found
