"""A recorded run lived through again, from its own times."""

from collections.abc import Sequence
from typing import NoReturn, TypeVar

from bevy_jax import engine as engine_lib
from bevy_jax import events, protocols
from bevy_jax import request as request_lib
from bevy_jax.layers import config as model_config
from bevy_jax.offload import eviction as eviction_lib
from bevy_jax.offload import prefetch

_Kind = TypeVar('_Kind', bound=events.Event)
# What the engine decides, and what happens to it.
_DECISIONS = (events.LoadIssued, events.LaunchBegun)
_ARRIVALS = (events.LoadLanded, events.LoadFailed, events.LaunchEnded)


class Relived:
  """An executor that answers as a recorded run was answered, when it was.

  See `protocols.Executor`. What the engine decides must be what it decided
  then: loads and launches are compared one by one.

  Attributes:
    chunk: see `Executor`; that of the recorded run.
    hops: likewise.
  """

  def __init__(
    self, log: Sequence[events.Event], experts: int, chunk: int, hops: int = 1
  ):
    self.chunk, self.hops = chunk, hops
    self._log, self._experts = log, experts
    self._next, self._now = 0, 0
    self._flights: dict[int, events.LaunchBegun] = {}
    self._resident: set[int] = set()
    self._sizes: list[int] = []  # Tokens a row of the chunk in prefill.

  def now(self) -> int:
    """See `Executor`: when the last thing happened that was told."""
    return self._now

  def load(self, key: int, slot: int) -> None:
    """See `Executor`; ValueError where the recorded run loaded another one."""
    event = self._expect(events.LoadIssued, f'loads key {key}')
    if (event.key, event.slot) != (key, slot):
      self._diverged(f'loads key {key} into slot {slot}')
    self._next += 1

  def launch(self, number: int, batch: protocols.Batch) -> None:
    """See `Executor`; ValueError where the recorded run launched another."""
    what = f'launches {batch.kind} {number} at layer {batch.layer}'
    event = self._expect(events.LaunchBegun, what)
    hops = 1 if batch.tables is None else len(batch.tables)
    mine = (number, batch.kind, batch.layer, batch.finish, hops)
    then = event.launch, event.kind, event.layer, event.finish, event.hops
    if then != mine:
      self._diverged(what)
    if batch.chunk is not None:
      self._sizes = [len(ids) for ids in batch.chunk.tokens]
    self._flights[number] = event
    self._next += 1

  def poll(self) -> list[protocols.Happened]:
    """See `Executor`: all that happened before the next decision."""
    out: list[protocols.Happened] = []
    while self._next < len(self._log):
      event = self._log[self._next]
      if isinstance(event, _DECISIONS):
        break
      self._next += 1
      self._now = max(self._now, event.time)
      if isinstance(event, events.LoadLanded):
        self._resident.add(event.key)
        out.append(protocols.Landed(event.time, event.key, began=event.began))
      elif isinstance(event, events.LoadFailed):
        out.append(protocols.Failed(event.time, event.key, event.reason))
      elif isinstance(event, events.LaunchEnded):
        out.append(self._ended(event))
      elif isinstance(event, events.Evicted):
        self._resident.discard(event.key)
    return out

  def wait(self) -> None:
    """See `Executor`; ValueError where nothing more was recorded."""
    self._diverged('waits')

  def close(self) -> None:
    """See `Executor`."""

  def _expect(self, kind: type[_Kind], does: str) -> _Kind:
    """The decision that comes next, which must be of a kind."""
    while self._next < len(self._log):
      event = self._log[self._next]
      if isinstance(event, (*_DECISIONS, *_ARRIVALS)):
        break
      if isinstance(event, events.Evicted):
        self._resident.discard(event.key)
      self._next += 1
    if self._next == len(self._log):
      self._diverged(does)
    event = self._log[self._next]
    if not isinstance(event, kind):
      self._diverged(does)
    self._now = max(self._now, event.time)
    return event

  def _diverged(self, does: str) -> NoReturn:
    over = self._next >= len(self._log)
    then = 'over' if over else f'at {self._log[self._next]}'
    raise ValueError(
      f'the engine {does}, but event {self._next} of the recorded run is '
      f'{then}. Replay it with its own model, scheduler, eviction, rows, slots '
      'and link depth, and a log that begins with a cold cache.'
    )

  def _ended(self, event: events.LaunchEnded) -> protocols.Ended:
    begun, told = self._flights.pop(event.launch), self._told()
    hops: list[protocols.Hop] = []
    if begun.finish and begun.kind == 'prefill':
      choices = self._prompt_choices(told)
      nothing = [-1] * len(choices)
      hops = [protocols.Hop(nothing, [True] * len(choices), choices)]
    elif begun.finish:
      hops = _hops(begun.requests, told)
    return protocols.Ended(event.time, event.launch, hops, event.began)

  def _told(self) -> list[events.Event]:
    """What the engine wrote down of the answer, right behind the end."""
    found: list[events.Event] = []
    for event in self._log[self._next :]:
      if isinstance(event, (*_DECISIONS, *_ARRIVALS)):
        break
      found.append(event)
    return found

  def _prompt_choices(self, told: list[events.Event]) -> list[tuple[int, ...]]:
    """Choices with the recorded experts, uses and hits; whose is unknown."""
    routed = [e for e in told if isinstance(e, events.PrefillRouted)]
    if not routed:
      return []
    event = routed[0]
    base = event.layer * self._experts
    here = [e for e in event.experts if base + e in self._resident]
    away = [e for e in event.experts if base + e not in self._resident]
    ids = list(event.experts)
    ids += here[:1] * (event.hits - len(here))
    ids += away[:1] * (event.uses - len(ids))
    k = event.uses // sum(self._sizes)
    each = [tuple(ids[i : i + k]) for i in range(0, len(ids), k)]
    choices: list[tuple[int, ...]] = []
    for size in self._sizes:
      choices += each[:size] + [()] * (self.chunk - size)
      each = each[size:]
    return choices


def _hops(
  group: Sequence[int], told: Sequence[events.Event]
) -> list[protocols.Hop]:
  """What each request of a launch came to, router by router."""
  paths: dict[int, list[tuple[int, bool, tuple[int, ...]]]]
  paths = {number: [] for number in group}
  tokens: dict[int, int] = {}
  for e in told:
    if isinstance(e, events.Token):
      tokens[e.request] = e.token
    elif isinstance(e, events.Routed):
      paths[e.request].append((tokens.pop(e.request, -1), True, e.experts))
    elif isinstance(e, events.Finished):
      sound = e.reason != 'error'
      paths[e.request].append((tokens.pop(e.request, -1), sound, ()))
  found = []
  for hop in range(max(map(len, paths.values()))):
    came = [i for i, number in enumerate(group) if len(paths[number]) > hop]
    each = [paths[group[i]][hop] for i in came]
    found.append(
      protocols.Hop(
        [token for token, _, _ in each],
        [sound for _, sound, _ in each],
        [choices for _, _, choices in each],
        places=came,
      )
    )
  return found


def relive(
  log: Sequence[events.Event],
  model: model_config.ModelConfig,
  scheduler: protocols.Scheduler,
  eviction: eviction_lib.Eviction,
  *,
  rows: int,
  slots: int,
  link_depth: int,
  chunk: int,
  hops: int = 1,
  quota: Sequence[int] = (),
  prefetcher: protocols.Prefetcher = prefetch.PREFETCHERS['none'],
) -> list[events.Event]:
  """The log of an engine to which everything happens as it was recorded.

  Args:
    log: all events of a run from a cold cache, whose requests were all there
      when it began and have all ended.
    model: the run's.
    scheduler: the run's; with another one ValueError says where they part.
    eviction: likewise.
    rows: R.
    slots: size of the cache.
    link_depth: loads on the link at once.
    chunk: prompt tokens a row that one prefill launch takes.
    hops: layers that a launch could cross at most.
    quota: see `View`.
    prefetcher: likewise the run's; none that is told what will be used, for
      the log does not keep what it was told.

  Raises:
    ValueError: see above, or a load that a prompt waited for has failed: the
      log does not say whose tokens needed it.
  """
  if prefetcher.gates:
    raise ValueError(
      f'{prefetcher} guesses from what launches answered, which no log keeps; '
      'relive runs of prefetchers that look at choices alone.'
    )
  _refuse_broken_prompts(log)
  requests, stop = _asked(log)
  found = engine_lib.Engine(
    model,
    Relived(log, model.num_experts, chunk, hops),
    scheduler,
    eviction,
    rows=rows,
    slots=slots,
    link_depth=link_depth,
    quota=quota,
    prefetcher=prefetcher,
    stop=stop,
  )
  for request in requests:
    found.submit(request)
  while found.busy:
    found.step()
  return found.log


def _asked(
  log: Sequence[events.Event],
) -> tuple[list[request_lib.Request], engine_lib.StopRule]:
  """The recorded requests, and what ends each where it ended."""
  lengths, reasons = _ends(log)
  asked = [e for e in log if isinstance(e, events.Admitted)]
  going_on = [e.request for e in asked if e.request not in reasons]
  if going_on:
    raise ValueError(
      f'requests {going_on} have not ended in the log; record a whole run.'
    )

  def stop(p: request_lib.Progress, token: int) -> str | None:
    del token
    number = p.request.number
    last = len(p.generated) == lengths[number]
    return reasons[number] if last and reasons[number] != 'error' else None

  requests = [
    request_lib.Request(
      number=e.request,
      prompt=(0,) * e.prompt_tokens,  # What it says is in the answers.
      new_tokens=lengths.get(e.request, 0) + 1,
    )
    for e in asked
  ]
  return requests, stop


def _refuse_broken_prompts(log: Sequence[events.Event]) -> None:
  """ValueError where somebody ended for a failed load before it decoded."""
  entering: set[int] = set()
  broken = False  # Whether all since then is what a failed load has done.
  for event in log:
    if isinstance(event, events.Admitted):
      entering.add(event.request)
    elif isinstance(event, events.Prefilled):
      entering -= set(event.requests)
    elif isinstance(event, events.Finished):
      if broken and event.request in entering:
        raise ValueError(
          f'the prompt of request {event.request} waited for a load that has '
          'failed; a log does not tell which tokens of a prompt use an expert, '
          'so who ends for it cannot be lived through again.'
        )
      continue
    broken = isinstance(event, events.LoadFailed)


def _ends(
  log: Sequence[events.Event],
) -> tuple[dict[int, int], dict[int, str]]:
  """Tokens of each request that has any, and why each that ended did."""
  lengths: dict[int, int] = {}
  reasons: dict[int, str] = {}
  for event in log:
    if isinstance(event, events.Token):
      lengths[event.request] = event.index + 1
    elif isinstance(event, events.Finished):
      reasons[event.request] = event.reason
  return lengths, reasons
