"""Policies asked twice: the same view must give the same decision.

Each of these stands before a policy, lets it decide two times, and raises
LawBroken where the answers differ, where what it looked at has changed, or
where no engine could do what it says.
"""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from bevy_jax import protocols
from bevy_jax import request as request_lib
from bevy_jax.law import LawBroken, must
from bevy_jax.offload import patterns as patterns_lib
from bevy_jax.offload import prefetch
from bevy_jax.offload import uses as uses_lib

PURE = 'the same view, the same decision'
LOOK = 'a policy only looks'
SOUND = 'a decision makes sense'


@dataclasses.dataclass(frozen=True)
class Scheduler:
  """See `protocols.Scheduler`.

  Attributes:
    own: the scheduler that decides.
  """

  own: protocols.Scheduler

  @property
  def depth(self) -> int:
    """See `Scheduler`."""
    return self.own.depth

  @property
  def hops(self) -> int:
    """Layers that a launch may cross."""
    return int(getattr(self.own, 'hops', 1))

  def wants(self, view: protocols.View) -> list[protocols.Want]:
    """See `Scheduler`."""
    before = _seen(view)
    found = self.own.wants(view)
    must(before == _seen(view), LOOK, 'wants has changed the view')
    again = self.own.wants(view)
    must(list(found) == list(again), PURE, f'wants: {found}, then {again}')
    for want in found:
      known = 0 <= want.layer < len(view.resident)
      known = known and 0 <= want.experts < 1 << view.experts
      must(known, SOUND, f'{want} is of no layer, or of no experts')
    return found

  def launch(self, view: protocols.View) -> protocols.Launch | None:
    """See `Scheduler`."""
    before = _seen(view)
    found = self.own.launch(view)
    must(before == _seen(view), LOOK, 'launch has changed the view')
    again = self.own.launch(view)
    must(found == again, PURE, f'launch: {_words(found)}, then {_words(again)}')
    if found is not None:
      self._possible(view, found)
    return found

  def _possible(self, view: protocols.View, launch: protocols.Launch) -> None:
    """Whether anybody could carry it out."""
    must(bool(launch.group), 'a launch carries somebody', 'its group is empty')
    waiting = {id(p) for p in view.waiting}
    here = [p for p in launch.group if p.layer == launch.layer]
    sound = all(id(p) in waiting for p in launch.group)
    sound = sound and len(here) == len(launch.group)
    what = f'{_words(launch)}, but not all of them wait at that layer'
    must(sound, 'layers in order', what)
    once = len({p.row for p in launch.group}) == len(launch.group)
    must(once, 'a row is in one launch', f'{_words(launch)}, one of them twice')
    away = launch.experts & ~view.resident[launch.layer]
    law = 'a launch misses no expert'
    must(not away, law, f'{_words(launch)}, but bitmap {away:b} is not here')
    if launch.finish:
      for p in launch.group:
        left = p.need & ~launch.experts
        what = f'{_words(launch)} leaves out {left:b} of row {p.row}'
        must(not left, law, what)


@dataclasses.dataclass(frozen=True)
class Eviction:
  """See `protocols.Eviction`.

  Attributes:
    own: the rule that decides.
  """

  own: protocols.Eviction

  @property
  def estimates(self) -> bool:
    """See `Eviction`."""
    return self.own.estimates

  def victim(self, barred: npt.NDArray[np.float64], uses: uses_lib.Uses) -> int:
    """See `Eviction`."""
    before = barred.tobytes(), _arrays(uses)
    found = self.own.victim(barred, uses)
    same = before == (barred.tobytes(), _arrays(uses))
    must(same, LOOK, 'victim has changed what it looked at')
    again = self.own.victim(barred, uses)
    must(found == again, PURE, f'victim: key {found}, then {again}')
    whole = isinstance(found, int | np.integer) and 0 <= found < len(barred)
    keys = f'keys are 0 to {len(barred) - 1}'
    must(whole, SOUND, f'the victim is {found!r}, but {keys}')
    free = not barred[found] or bool(barred.all())
    must(free, SOUND, f'key {found} is barred, and others are not')
    return int(found)


@dataclasses.dataclass(frozen=True)
class Prefetcher:
  """See `protocols.Prefetcher`.

  Attributes:
    own: the rule that guesses.
  """

  own: protocols.Prefetcher

  def __getattr__(self, name: str) -> Any:
    """Its settings are the other's."""
    return getattr(self.own, name)

  def guess(
    self,
    patterns: patterns_lib.Patterns,
    layer: int,
    streams: patterns_lib.Ids,
  ) -> prefetch.Guess:
    """See `Prefetcher`."""
    before = _arrays(patterns), streams.tobytes()
    found = self.own.guess(patterns, layer, streams)
    same = before == (_arrays(patterns), streams.tobytes())
    must(same, LOOK, 'guess has changed what it looked at')
    again = self.own.guess(patterns, layer, streams)
    same = np.array_equal(found.ids, again.ids)
    same = same and np.array_equal(found.chance, again.chance)
    must(same, PURE, f'two guesses at layer {layer} differ')
    self._possible(patterns, found, len(streams))
    return found

  def _possible(
    self, patterns: patterns_lib.Patterns, guess: prefetch.Guess, n: int
  ) -> None:
    """Whether it is a guess of `n` streams at all."""
    ids, chance = np.asarray(guess.ids), np.asarray(guess.chance)
    form = (self.own.depth, n)
    if ids.shape != chance.shape or ids.ndim != 3 or ids.shape[:2] != form:
      what = f'ids are {ids.shape} and chance {chance.shape}'
      what += f', expected (*{form}, k): depth, streams, k'
      raise LawBroken(SOUND, what)
    known = bool(((ids >= -1) & (ids < patterns.experts)).all())
    must(known, SOUND, f'ids go to {ids.max(initial=-1)} of {patterns.experts}')
    likely = bool(((chance >= 0) & (chance <= 1)).all())
    must(likely, SOUND, 'a chance does not lie in [0, 1]')


def _seen(view: protocols.View) -> tuple[Any, ...]:
  """All that a scheduler sees, as values."""
  return (
    [_where(p) for p in view.waiting],
    [_where(p) for p in view.flying],
    (view.active, view.floor, view.slots, view.in_flight),
    list(view.resident),
    list(view.loading),
  )


def _where(p: request_lib.Progress) -> tuple[Any, ...]:
  return p.request.number, p.row, p.position, p.layer, p.need, p.in_flight


def _words(launch: protocols.Launch | None) -> str:
  if launch is None:
    return 'nobody'
  rows = [p.row for p in launch.group]
  return f'rows {rows} at layer {launch.layer}'


def _shown(record: object) -> list[Any]:
  """The public attributes; a compiled class has no `__dict__`."""
  names = getattr(record, '__mypyc_attrs__', None) or vars(record)
  return [getattr(record, name) for name in names if name[0] != '_']


def _arrays(record: object) -> list[bytes]:
  """Every array that a history shows, as bytes; what it keeps by is its own."""
  values = _shown(record)
  for value in list(values):
    if isinstance(value, tuple):
      values += value
    elif hasattr(value, '__dict__') or hasattr(value, '__mypyc_attrs__'):
      values += _shown(value)
  return [v.tobytes() for v in values if isinstance(v, np.ndarray)]
