"""An executor without a device that checks every promise made to one."""

import dataclasses
import functools
import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from bevy_jax import protocols
from bevy_jax.law import LawBroken, must
from bevy_jax.layers import config as model_config

_Answer = Sequence[protocols.Hop]


@dataclasses.dataclass
class _Token:
  """One prompt or decode token on its way through the layers."""

  who: int
  position: int
  layer: int
  choices: tuple[int, ...]
  done: set[int] = dataclasses.field(default_factory=set)


class _Work(NamedTuple):
  due: int
  rows: tuple[int, ...]
  slots: tuple[int, ...]
  answer: protocols.Ended


class Scripted:
  """An executor that scripts its answers and believes nothing.

  It has no device: routing is a hash, and loads and launches take random
  times on an integer clock. In some worlds loads land in any order, in some
  a load fails now and then.

  Attributes:
    chunk: see `Executor`.
    hops: see `Executor`.
    content: key in each slot, -1 where none is, None while one is coming.
    excused: keys that failed, with the rows whose prompts needed them then.
  """

  chunk, hops = 4, 8

  def __init__(
    self,
    model: model_config.ModelConfig,
    slots: int,
    seed: int,
    error: tuple[int, int, int] | None = None,
    faults: float = 0.0,
  ):
    self.content: list[int | None] = [-1] * slots
    self.excused: set[tuple[int, int]] = set()
    self._model, self._layers = model, len(model.moe_ids)
    self._seed, self._error = seed, error
    self._rows: dict[int, _Token] = {}
    self._prompt: list[_Token | None] = []
    self._prompts: Sequence[int] = ()  # Rows of the chunk.
    self._dropped: set[int] = set()  # Who in the chunk may be passed over.
    self._loads: list[tuple[int, int, int]] = []
    self._works: deque[_Work] = deque()
    self._now = self._link = self._device = 0
    self._random = random.Random(seed)
    self._paces = [self._random.choice((2, 20, 200)) for _ in range(2)]
    self._faults, self._dice = faults, random.Random(seed)
    self._in_order = self._dice.random() < 0.5

  @property
  def busy(self) -> bool:
    """Whether anything is in flight."""
    return bool(self._loads or self._works)

  def now(self) -> int:
    """See `Executor`; every look takes a tick."""
    self._now += 1
    return self._now

  def load(self, key: int, slot: int) -> None:
    """See `Executor`."""
    known = 0 <= slot < len(self.content)
    must(known, 'slots are never exceeded', f'slot {slot} does not exist')
    filled = self.content[slot] is not None
    must(filled, 'one copy', f'slot {slot} is being filled')
    coming = [loaded for _, loaded, _ in self._loads]
    once = key not in self.content and key not in coming
    must(once, 'one copy', f'key {key} has a slot already')
    read = any(slot in work.slots for work in self._works)
    must(not read, 'a slot being read is kept', f'slot {slot} is overwritten')
    self.content[slot] = None
    took = self._random.randint(1, self._paces[0])
    self._link = max(self._link * self._in_order, self._now) + took
    self._loads.append((self._link, key, slot))
    self._loads.sort()

  def launch(self, number: int, batch: protocols.Batch) -> None:
    """See `Executor`."""
    rows = (*batch.rows, *(entry.row for entry in batch.entries))
    taken = {row for work in self._works for row in work.rows}
    alone = len(set(rows)) == len(rows) and not taken & set(rows)
    must(alone, 'a row is in one launch', f'{rows} are launched, not once')
    somebody = bool(rows) or batch.kind == 'prefill'
    must(somebody, 'a launch carries somebody', 'a launch carries nobody')
    if batch.kind == 'prefill':
      answer = self._prefill(batch)
    elif batch.kind == 'enter':
      answer = self._enter(batch)
    else:
      answer = self._decode(batch)
    took = self._random.randint(1, self._paces[1])
    self._device = max(self._device, self._now) + took
    ended = protocols.Ended(self._device, number, answer)
    slots = tuple(batch.distinct)
    if batch.tables is not None:
      slots = tuple(batch.tables[batch.tables >= 0].tolist())
    self._works.append(_Work(self._device, rows, slots, ended))

  def poll(self) -> list[protocols.Happened]:
    """See `Executor`."""
    out: list[protocols.Happened] = []
    while self._loads and self._loads[0][0] <= self._now:
      time, key, slot = self._loads.pop(0)
      if self._dice.random() < self._faults:
        self._fail(key, slot)
        out.append(protocols.Failed(time, key, f'{key} is broken'))
        continue
      self.content[slot] = key
      out.append(protocols.Landed(time, key))
    while self._works and self._works[0].due <= self._now:
      out.append(self._works.popleft().answer)
    return out

  def wait(self) -> None:
    """See `Executor`; LawBroken where nothing is in flight."""
    must(
      self.busy,
      'no deadlock',
      'nothing is in flight, requests wait, and nothing will ever happen',
    )
    dues = [self._loads[0][0]] if self._loads else []
    dues += [self._works[0].due] if self._works else []
    self._now = max(self._now, min(dues))

  def close(self) -> None:
    """See `Executor`."""

  def _fail(self, key: int, slot: int) -> None:
    self.content[slot] = -1
    layer, expert = divmod(key, self._model.num_experts)
    for i, token in enumerate(self._prompt):
      if token is None or token.layer != layer:
        continue
      if expert in set(token.choices) - token.done:
        self._dropped.add(i // self.chunk)
        self.excused.add((key, self._prompts[i // self.chunk]))

  def _enter(self, batch: protocols.Batch) -> _Answer:
    for e in batch.entries:
      self._rows[e.row] = self._arrived(e.sampling.seed, e.position, 0)
    tokens = [self._rows[e.row] for e in batch.entries]
    return [self._answer([-1] * len(tokens), tokens)]

  def _decode(self, batch: protocols.Batch) -> _Answer:
    assert batch.tables is not None, 'a decode launch has tables'
    places, found = list(range(len(batch.rows))), list[protocols.Hop]()
    first = batch.tables[0].tolist()
    there = sum(1 << e for e, slot in enumerate(first) if slot >= 0)
    told = there == batch.experts
    must(told, 'a launch misses no expert', 'it is told of others than it uses')
    for hop, table in enumerate(batch.tables.tolist()):
      layer = (batch.layer + hop) % self._layers
      places = self._can_go(batch, places, table) if hop else places
      if not places:
        break
      for place in places:
        token = self._rows[batch.rows[place]]
        slots = [table[e] for e in token.choices]
        self._apply(token, slots, layer, batch.finish)
      if batch.finish:
        found.append(self._next(batch, places, hop))
    return found

  def _can_go(
    self, batch: protocols.Batch, places: list[int], table: list[int]
  ) -> list[int]:
    tokens = [self._rows[batch.rows[place]] for place in places]
    able = [
      place
      for place, t in zip(places, tokens, strict=True)
      if min(table[e] for e in t.choices) >= 0
      and self._error != (t.who, t.position, t.layer)
    ]
    all_can = len(able) == len(batch.rows)
    return able if all_can or not batch.together else []

  def _next(
    self, batch: protocols.Batch, places: list[int], hop: int
  ) -> protocols.Hop:
    drawn, tokens = [], []
    for place in places:
      old = self._rows[batch.rows[place]]
      last = old.layer + 1 == self._layers
      drawn.append(draw(old.who, old.position) if last else -1)
      tokens.append(
        self._arrived(
          old.who, old.position + last, 0 if last else old.layer + 1
        )
      )
      self._rows[batch.rows[place]] = tokens[-1]
    return self._answer(drawn, tokens, places if hop else ())

  def _prefill(self, batch: protocols.Batch) -> _Answer:
    if batch.chunk is not None:
      self._prompt, self._dropped = [], set()
      self._prompts = batch.chunk.rows
      for start, ids in zip(
        batch.chunk.starts, batch.chunk.tokens, strict=True
      ):
        assert len(ids) <= self.chunk, 'more tokens than a chunk has'
        self._prompt += [
          self._arrived(token, start + i, 0) for i, token in enumerate(ids)
        ]
        self._prompt += [None] * (self.chunk - len(ids))
    else:
      pairs = zip(self._prompt, batch.slots, strict=True)
      for i, (token, slots) in enumerate(pairs):
        if i // self.chunk in self._dropped and max(slots) < 0:
          continue
        if token is not None:
          self._apply(token, slots, batch.layer, batch.finish)
          assert set(slots) - {-1} <= set(batch.distinct), 'not announced'
      if not batch.finish:
        return []
      self._prompt = [
        t and self._arrived(t.who, t.position, t.layer + 1)
        for t in self._prompt
      ]
    count = len(self._prompt)
    nobody = (0,) * self._model.top_k
    choices = [t.choices if t else nobody for t in self._prompt]
    return [protocols.Hop([-1] * count, [True] * count, choices)]

  def _apply(
    self, token: _Token, slots: Sequence[int], layer: int, finish: bool
  ) -> None:
    must(token.layer == layer, 'layers in order', 'a row waits elsewhere')
    for expert, slot in zip(token.choices, slots, strict=True):
      if slot >= 0:
        key = layer * self._model.num_experts + expert
        if self.content[slot] != key:
          what = f'slot {slot} does not hold key {key}'
          raise LawBroken('an expert lands before use', what)
        token.done.add(expert)
    if finish:
      missed = sorted(set(token.choices) - token.done)
      must(not missed, 'a launch misses no expert', f'it leaves out {missed}')

  def _answer(
    self, drawn: list[int], tokens: list[_Token], places: Sequence[int] = ()
  ) -> protocols.Hop:
    sound = [self._error != (t.who, t.position, t.layer) for t in tokens]
    choices, guesses = [t.choices for t in tokens], self._ahead(tokens)
    return protocols.Hop(drawn, sound, choices, guesses, places)

  def _ahead(self, tokens: list[_Token]) -> list[list[tuple[int, ...]]]:
    """What they will use at the layers to come, sometimes wrong."""
    return [
      [
        self._arrived(
          t.who if (t.who + layer) % 3 else t.who + 1, t.position, layer
        ).choices
        for layer in range(t.layer + 1, self._layers)
      ]
      for t in tokens
    ]

  def _arrived(self, who: int, position: int, layer: int) -> _Token:
    c = self._model
    words = f'{self._seed},{who},{position // 2},{layer}'
    choices = routed(words, layer, c.num_experts, c.top_k)
    return _Token(who, position, layer, choices)


@functools.cache  # Every variant meets the same worlds.
def routed(words: str, layer: int, experts: int, top_k: int) -> tuple[int, ...]:
  """Some experts are hot, and a text's neighbours often agree."""
  rng = random.Random(words)
  heat = [1 / (1 + (e + 3 * layer) % experts) for e in range(experts)]
  chosen: dict[int, None] = {}
  while len(chosen) < top_k:
    chosen[rng.choices(range(experts), heat)[0]] = None
  return tuple(chosen)


def draw(who: int, position: int) -> int:
  """The token that a request draws at a position."""
  return random.Random(f'{who},{position}').randrange(20)
