"""Runahead with one of its ideas taken out, or one put in."""

import dataclasses
from typing import NamedTuple

from bevy_jax import baselines, lagging, protocols, runahead

HOPS = 4  # Layers a launch of the part that has them.
_WHOLE = runahead.Runahead()
_HASTY = dataclasses.replace(_WHOLE, hold=False)
_BOUND = 24  # Layers of lag where the order of launches bounds none.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alone:
  """No groups: of what `runahead` would launch the most lagging request alone.

  Attributes:
    inner: who decides the rest; nobody waits for joiners.
  """

  inner: runahead.Runahead = _HASTY

  @property
  def depth(self) -> int:
    """See `Scheduler`."""
    return self.inner.depth

  def wants(self, view: protocols.View) -> list[protocols.Want]:
    """See `Scheduler`: as the inner one."""
    return self.inner.wants(view)

  def launch(self, view: protocols.View) -> protocols.Launch | None:
    """See `Scheduler`: one request of the inner one's group."""
    found = self.inner.launch(view)
    if found is None:
      return None
    first = min(found.group, key=lambda p: p.position)
    return lagging.together([first])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadsByRow:
  """Loads in the order of rows, whoever lags; launches as `runahead` has them.

  An order that never changes keeps the first row from being robbed, so there
  is no deadlock in a cache that holds what every request awaits.

  Attributes:
    inner: who decides about launches.
  """

  inner: runahead.Runahead = _WHOLE

  @property
  def depth(self) -> int:
    """See `Scheduler`."""
    return self.inner.depth

  def wants(self, view: protocols.View) -> list[protocols.Want]:
    """See `Scheduler`: one want a waiting request, by row."""
    return [protocols.Want(p.layer, p.need) for p in view.waiting]

  def launch(self, view: protocols.View) -> protocols.Launch | None:
    """See `Scheduler`: as the inner one."""
    return self.inner.launch(view)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchesByRow:
  """The layer of the first ready row goes next, whoever lags.

  Nobody is more than 24 layers ahead, or a row might wait for ever; loads are
  those of `runahead`.

  Attributes:
    depth: launches in flight at once.
  """

  depth: int = 2

  def wants(self, view: protocols.View) -> list[protocols.Want]:
    """See `Scheduler`: one want a waiting request, most lagging first."""
    return lagging.wants(view)

  def launch(self, view: protocols.View) -> protocols.Launch | None:
    """See `Scheduler`: all who are ready where the first ready row is."""
    ready = lagging.ready(view, _BOUND)
    if not ready:
      return None
    group = [p for p in ready if p.layer == ready[0].layer]
    return lagging.together(group)


class Part(NamedTuple):
  """Who schedules, evicts and prefetches."""

  scheduler: protocols.Scheduler = _WHOLE
  eviction: str = 'reuse'
  prefetch: str = 'mixture'


WHOLE = 'whole'
PARTS: dict[str, Part] = {
  WHOLE: Part(),
  'no grouping: requests alone': Part(Alone()),
  'no lag priority: launches by row': Part(LaunchesByRow()),
  'no load order: loads by row': Part(LoadsByRow()),
  'no self-balancing: lag 24, no holding': Part(
    runahead.Runahead(near=None, hold=False)
  ),
  'with hops: up to 4 layers a launch': Part(runahead.Runahead(hops=HOPS)),
  'no prefetch on an idle link': Part(prefetch='none'),
  'eviction: decayed LFU': Part(eviction='lfu_decayed'),
  'eviction: LRU': Part(eviction='lru'),
  'lockstep': Part(baselines.Lockstep(), prefetch='none'),
}
