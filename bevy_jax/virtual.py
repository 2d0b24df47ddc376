"""The executor of the simulator: an integer clock that nothing else moves.

The clock advances while the host works (each launch, answer and load costs
it what `Costs` says) and when the engine waits; loads and launches that have
begun go on meanwhile. The link carries one load at a time and the device one
launch, each begins as soon as the one before it is done. So any schedule can
be added up by hand.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from bevy_jax import costs as costs_lib
from bevy_jax import protocols
from bevy_jax import request as request_lib
from bevy_jax import trace as trace_lib
from bevy_jax.layers import config as model_config

# Of a launch.
_Answer = Sequence[protocols.Hop]


class Source(Protocol):
  """Where the routing comes from.

  `who` is the seed of a request's sampling, which a simulated request does
  not need for anything else. Positions count all of its tokens.
  """

  def choices(self, who: int, position: int, layer: int) -> tuple[int, ...]:
    """Expert ids of a token that decodes."""

  def token(self, who: int, position: int) -> int:
    """The token that follows the one at a position."""

  def prompt(self, token: int, position: int, layer: int) -> tuple[int, ...]:
    """Expert ids of a prompt token that is not the last one."""


class Recorded:
  """The routing of a trace; request `who` decodes recording number `who`.

  Tokens are dummies: a trace keeps none. Its requests have prompts of one
  token, since a trace knows no prompts.
  """

  def __init__(self, trace: trace_lib.Trace):
    self._trace = trace
    self._lists: dict[int, list[list[tuple[int, ...]]]] = {}

  def choices(self, who: int, position: int, layer: int) -> tuple[int, ...]:
    """See `Source`."""
    found = self._lists.get(who)
    if found is None:
      length = int(self._trace.lengths[who])
      rows = self._trace.experts[who, :length].tolist()
      found = [[tuple(ids) for ids in layers] for layers in rows]
      self._lists[who] = found
    # The launch of the last token also routes one behind it; nobody reads it.
    return found[min(position, len(found) - 1)][layer]

  def token(self, who: int, position: int) -> int:
    """See `Source`."""
    del who, position
    return 0

  def prompt(self, token: int, position: int, layer: int) -> tuple[int, ...]:
    """See `Source`; ValueError, since a trace holds no prompts."""
    del token, position, layer
    raise ValueError(
      'a routing trace tells nothing of prompts: give its requests a prompt of '
      'one token, as `virtual.requests` does.'
    )


def requests(
  trace: trace_lib.Trace, first: int, count: int, tokens: int
) -> list[request_lib.Request]:
  """Recorded requests to submit, in their order.

  Args:
    trace: the routing.
    first: the first of them.
    count: how many; ValueError where the trace has fewer.
    tokens: each decodes so many, fewer where it is shorter; 0 for all.
  """
  have = len(trace.lengths)
  if min(first, tokens) < 0 or count < 1 or first + count > have:
    raise ValueError(
      f'requests {first} to {first + count - 1} with {tokens} tokens are asked '
      f'for, but the trace has requests 0 to {have - 1}; ask for at least one '
      'of those, and for 0 tokens (all) or more.'
    )
  found = []
  for number in range(count):
    length = int(trace.lengths[first + number])
    if not length:
      raise ValueError(
        f'request {first + number} of the trace has no tokens; choose others.'
      )
    found.append(
      request_lib.Request(
        number=number,
        prompt=(0,),
        new_tokens=min(tokens or length, length),
        sampling=request_lib.SamplingParams(seed=first + number),
      )
    )
  return found


def shape(trace: trace_lib.Trace) -> model_config.ModelConfig:
  """A model of a trace's layers and experts; its other sizes mean nothing."""
  return model_config.tiny(
    num_layers=trace.layers,
    num_experts=trace.num_experts,
    top_k=int(trace.experts.shape[3]),
    moe_layers=(True,) * trace.layers,
  )


class _Queued(NamedTuple):
  """A load that the link has not turned to."""

  ready: int
  order: int
  key: int


class _Token(NamedTuple):
  """The token that is in a row."""

  who: int
  position: int
  layer: int


class VirtualExecutor:
  """See `protocols.Executor`; times are those of the simulated machine.

  `Landed.time` and `Ended.time` are when it happened, which the host may see
  later; `began` is when link or device turned to it.

  Attributes:
    chunk: prompt tokens a row that one prefill launch takes.
    hops: layers that a launch can cross at most.
  """

  def __init__(
    self,
    source: Source,
    costs: costs_lib.Costs,
    layers: int,
    *,
    chunk: int = 32,
    urgent: Callable[[int], bool] | None = None,
    gates: int = 0,
    hops: int = 1,
    told: bool = True,
  ):
    """An executor at time 0.

    Args:
      source: the routing.
      costs: what things take.
      layers: with experts.
      chunk: see the class.
      urgent: whether somebody awaits a key now: a link by priority, on which
        such loads overtake all others that it has not turned to, also those
        that began as a prefetch; None for first come, first served.
      gates: answers tell the truth about so many layers ahead, for an oracle
        to spoil.
      hops: see the class.
      told: whether events tell when link and device turned to them; no real
        device can, and schedulers that measure see it.
    """
    self.chunk, self.hops = chunk, hops
    self._source, self._costs, self._layers = source, costs, layers
    self._urgent, self._gates, self._told = urgent, gates, told
    self._now = self._link = self._device = self._issued = 0
    self._queue: list[_Queued] = []
    self._landed: deque[protocols.Landed] = deque()
    self._ends: deque[protocols.Ended] = deque()
    self._rows: dict[int, _Token] = {}
    # (token, position) of the chunk that is in prefill, None for padding.
    self._prompt: list[tuple[int, int] | None] = []

  def now(self) -> int:
    """See `Executor`; looking at the clock does not move it."""
    return self._now

  def load(self, key: int, slot: int) -> None:
    """See `Executor`; what the link carries is never broken off."""
    del slot
    self._now += self._costs.host_load
    ready = self._now + self._costs.latency
    if self._urgent is None:
      # Nobody overtakes: when it lands is known at once.
      self._carry(max(self._link, ready), key)
      return
    self._settle(self._now)
    self._queue.append(_Queued(ready, self._issued, key))
    self._issued += 1

  def launch(self, number: int, batch: protocols.Batch) -> None:
    """See `Executor`."""
    self._now += self._costs.host_launch
    self._now += self._costs.host_row * len(batch.rows)
    if batch.kind == 'prefill':
      took, answer = self._prefill(batch)
    elif batch.kind == 'enter':
      took, answer = self._enter(batch)
    else:
      took, answer = self._decode(batch)
    begun = max(self._now, self._device)
    self._device = begun + took
    ended = protocols.Ended(self._device, number, answer)
    self._ends.append(ended._replace(began=begun) if self._told else ended)

  def poll(self) -> list[protocols.Happened]:
    """See `Executor`; in order of the times."""
    out: list[protocols.Happened] = []
    landed, ends = self._landed, self._ends
    while True:
      if self._queue:
        self._settle(self._now)
      first = landed[0].time if landed else self._now + 1
      if ends and ends[0].time <= self._now and ends[0].time < first:
        out.append(ends.popleft())
        self._now += self._costs.host_answer
      elif first <= self._now:
        out.append(landed.popleft())
        self._now += self._costs.host_land
      else:
        return out

  def wait(self) -> None:
    """See `Executor`: the clock goes on to whatever happens next.

    Where `Costs` say so the host sees it late, as it does on a device: it
    looks now and then while both link and device are busy, and sleeps until
    the link is done where that alone is. A launch alone wakes it.
    """
    dues = [self._ends[0].time] if self._ends else []
    if self._landed:
      dues.append(self._landed[0].time)
    elif self._queue:
      dues.append(self._next()[0] + self._costs.load)
    assert dues, 'nothing is in flight: nothing will ever happen'
    left, look = max(0, min(dues) - self._now), self._costs.host_look
    if not self._ends:
      left += self._costs.host_wake if left else 0
    elif look and len(dues) > 1:
      left += -left % look
    self._now += left

  def close(self) -> None:
    """See `Executor`: forgets what is in flight."""
    self._queue.clear()
    self._landed.clear()
    self._ends.clear()

  def _next(self) -> tuple[int, _Queued]:
    """When the link turns to which queued load."""
    free, urgent = self._link, self._urgent
    assert urgent is not None, 'first come, first served has no queue'
    first = min(
      self._queue,
      key=lambda q: (max(free, q.ready), not urgent(q.key), q.order),
    )
    return max(free, first.ready), first

  def _settle(self, now: int) -> None:
    """The link turns to all queued loads that it could until now."""
    while self._queue:
      begun, first = self._next()
      if begun > now:
        return
      self._queue.remove(first)
      self._carry(begun, first.key)

  def _carry(self, begun: int, key: int) -> None:
    self._link = begun + self._costs.load
    began = begun if self._told else -1
    self._landed.append(protocols.Landed(self._link, key, began=began))

  # Launches: what each takes, and its answer.

  def _enter(self, batch: protocols.Batch) -> tuple[int, _Answer]:
    for e in batch.entries:
      self._rows[e.row] = _Token(e.sampling.seed, e.position, 0)
    rows = [e.row for e in batch.entries]
    took = self._costs.decode(len(rows), 0, on=True, last=False)
    return took, [self._answer(rows, [-1] * len(rows))]

  def _decode(self, batch: protocols.Batch) -> tuple[int, _Answer]:
    assert batch.tables is not None, 'no expert can be read'
    rows, count, layer = batch.rows, len(batch.rows), batch.layer
    last = batch.finish and layer + 1 == self._layers
    distinct = batch.experts.bit_count()
    took = self._costs.decode(count, distinct, on=batch.finish, last=last)
    if not batch.finish:
      return took, ()
    found = [self._hop(rows, range(count), layer)]
    going: Sequence[int] = range(count)
    for table in batch.tables[1:].tolist():
      layer = (layer + 1) % self._layers
      going, distinct = self._go_on(batch, going, table)
      last = layer + 1 == self._layers
      took += self._costs.hop(count, distinct, last=last)
      if going:
        found.append(self._hop(rows, going, layer))
    return took, found

  def _go_on(
    self, batch: protocols.Batch, came: Sequence[int], table: list[int]
  ) -> tuple[list[int], int]:
    """Who goes on from where they came to, and the experts they read."""
    going, read = [], set[int]()
    for place in came:
      choices = self._source.choices(*self._rows[batch.rows[place]])
      if min([table[e] for e in choices]) >= 0:
        going.append(place)
        read.update(choices)
    if batch.together and len(going) < len(batch.rows):
      return [], 0
    return going, len(read)

  def _hop(
    self, rows: Sequence[int], places: Sequence[int], layer: int
  ) -> protocols.Hop:
    """Some rows of a launch go through a layer."""
    last, tokens = layer + 1 == self._layers, []
    some = [rows[place] for place in places]
    for row in some:
      who, position, at = self._rows[row]
      assert at == layer, f'row {row} waits at layer {at}'
      tokens.append(self._source.token(who, position) if last else -1)
      self._rows[row] = (
        _Token(who, position + 1, 0)
        if last
        else _Token(who, position, layer + 1)
      )
    return self._answer(some, tokens, places)

  def _prefill(self, batch: protocols.Batch) -> tuple[int, _Answer]:
    if batch.chunk is not None:
      self._prompt = []
      for start, ids in zip(
        batch.chunk.starts, batch.chunk.tokens, strict=True
      ):
        self._prompt += [(t, start + i) for i, t in enumerate(ids)]
        self._prompt += [None] * (self.chunk - len(ids))
    layer, prompt = batch.layer + 1, self._prompt
    count = sum(p is not None for p in prompt)
    distinct = batch.experts.bit_count()
    took = self._costs.prefill(count, distinct, on=batch.finish)
    if not batch.finish:
      return took, ()
    # Behind the last layer nobody reads an answer.
    choices: list[tuple[int, ...]] = [
      self._source.prompt(*p, layer) if p and layer < self._layers else ()
      for p in prompt
    ]
    nothing, sound = [-1] * len(prompt), [True] * len(prompt)
    return took, [protocols.Hop(nothing, sound, choices)]

  def _answer(
    self,
    rows: Sequence[int],
    tokens: Sequence[int],
    places: Sequence[int] = (),
  ) -> protocols.Hop:
    choices = [self._source.choices(*self._rows[row]) for row in rows]
    guesses = [*map(self._coming, rows)] if self._gates else ()
    sound = [True] * len(rows)
    return protocols.Hop(tokens, sound, choices, guesses, places)

  def _coming(self, row: int) -> list[tuple[int, ...]]:
    """What a row's token will use at the next layers, errors left to others."""
    who, position, layer = self._rows[row]
    last = min(layer + self._gates, self._layers - 1)
    return [
      self._source.choices(who, position, ahead)
      for ahead in range(layer + 1, last + 1)
    ]
