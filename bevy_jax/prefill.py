"""Prompts on their way through the layers, chunk by chunk, together."""

from collections.abc import Iterator, Sequence

from bevy_jax import baselines, events, protocols
from bevy_jax import request as request_lib
from bevy_jax.offload import slot_table


class Prefill:
  """All prompts that were admitted together; the engine alone changes it.

  The chunk that is under way keeps its form when a request is dropped: the
  device goes on carrying tokens that need no expert.

  Every prompt token but the last goes through here; the last one enters a
  row and decodes. Experts of a layer come in waves where they do not all
  fit beside what decoding requests await.

  Attributes:
    group: the requests.
    layer: MoE layer that the chunk waits at, -1 before its first launch.
    choices: expert ids of each token there; empty for padding.
    need: bitmap of the experts still to be applied there.
    in_flight: whether a launch is carrying the chunk.
  """

  def __init__(self, group: Sequence[request_lib.Progress], chunk: int):
    self.group = group
    self.layer, self.need, self.in_flight = -1, 0, False
    self.choices: list[tuple[int, ...]] = []
    self._chunk, self._start = chunk, 0
    self._dropped: list[request_lib.Progress] = []

  @property
  def done(self) -> bool:
    """Whether no chunk is left."""
    return not self._left()

  def next_chunk(self) -> protocols.Chunk:
    """The tokens of the current chunk."""
    left = self._left()
    stop = self._start + self._chunk
    return protocols.Chunk(
      [p.row for p in left],
      [p.request.prompt[self._start : min(stop, _end(p))] for p in left],
      [p.request.past + self._start for p in left],
    )

  def finish_chunk(self) -> None:
    """The current chunk has been written in full."""
    self.group = [p for p in self.group if p not in self._dropped]
    self._start += self._chunk
    self.layer, self.need, self.choices = -1, 0, []

  def arrive(
    self, layer: int, choices: Sequence[Sequence[int]]
  ) -> dict[int, int]:
    """The chunk waits at `layer`; returns how often each expert is used."""
    self.layer, self.need = layer, 0
    self.choices = [()] * len(choices)
    uses: dict[int, int] = {}
    for p, tokens in self._tokens():
      if p in self._dropped:
        continue
      for t in tokens:
        self.choices[t] = tuple(choices[t])
        for expert in choices[t]:
          uses[expert] = uses.get(expert, 0) + 1
    for expert in uses:
      self.need |= 1 << expert
    return uses

  def drop(self, expert: int) -> list[request_lib.Progress]:
    """Takes out whose tokens of the chunk use an expert; returns them.

    Not while a launch carries the chunk. Ends it where nobody is left in it.
    """
    assert not self.in_flight, 'the chunk is on the device'
    gone = []
    needed, kept = self.need, 0
    for p, tokens in self._tokens():
      if any(expert in self.choices[t] for t in tokens):
        gone.append(p)
        for t in tokens:
          self.choices[t] = ()
    for ids in self.choices:
      for e in ids:
        kept |= 1 << e
    self.need = needed & kept
    self._dropped += gone
    if gone and not kept:
      self.finish_chunk()
    return gone

  def wave(self, resident: int, room: int) -> int:
    """Experts to apply next: at most `room`, the resident ones first."""
    here = baselines.wave(self.need & resident, room)
    missing = self.need & ~resident
    return here | baselines.wave(missing, room - here.bit_count())

  def batch(self, table: slot_table.SlotTable, experts: int) -> protocols.Batch:
    """The launch that applies resident experts."""
    base = self.layer * table.experts
    return protocols.Batch(
      'prefill',
      self.layer,
      experts,
      slots=self.slots(table, experts),
      distinct=[table.slot_of[base + e] for e in slot_table.bits(experts)],
      finish=experts == self.need,
    )

  def entries(self) -> list[protocols.Entry]:
    """The last prompt tokens, which enter their rows."""
    return [
      protocols.Entry(
        p.row,
        p.request.prompt[-1],
        p.request.past + _end(p),
        p.request.sampling,
      )
      for p in self.group
    ]

  def slots(self, table: slot_table.SlotTable, experts: int) -> list[list[int]]:
    """Slot of each choice of each token, -1 where it is not in `experts`."""
    base, k = self.layer * table.experts, self._width()
    at = [
      table.slot_of[base + e] if experts >> e & 1 else -1
      for e in range(table.experts)
    ]
    return [[at[e] for e in ids] if ids else [-1] * k for ids in self.choices]

  def _width(self) -> int:
    return max(len(ids) for ids in self.choices)

  def _tokens(self) -> Iterator[tuple[request_lib.Progress, range]]:
    """Who is in the chunk, and where in it their tokens are."""
    for i, p in enumerate(self._left()):
      first = i * self._chunk
      length = min(self._chunk, _end(p) - self._start)
      yield p, range(first, first + length)

  def _left(self) -> list[request_lib.Progress]:
    return [p for p in self.group if _end(p) > self._start]


def routed(
  time: int, layer: int, uses: dict[int, int], resident: int
) -> events.PrefillRouted:
  """The event of a chunk that came to `layer`; `uses` by expert."""
  return events.PrefillRouted(
    time,
    layer,
    tuple(sorted(uses)),
    sum(uses.values()),
    sum(uses[e] for e in uses if resident >> e & 1),
  )


def _end(p: request_lib.Progress) -> int:
  return len(p.request.prompt) - 1
