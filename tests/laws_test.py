"""Laws that every scheduler and eviction obeys, on a scripted executor.

`Fake` has no device: routing is a hash, and loads and launches take random
times on an integer clock. In some worlds loads land in any order, in some a
load fails now and then. It checks every promise made to an executor;
`_Watch` checks what the engine decides. Each law was seen to fail with the
code broken on purpose:

  a launch misses no expert     lagging.ready without its readiness test
  a launch carries somebody     Runahead.launch going through all who wait
  an expert lands before use    begin_load setting `resident` at once
  a slot being read is kept     `evictable` without `& ~self.reading`
  so is what hops may read      Flights.begin with (i, 0) for i in later
  nobody ends twice             Answers.settle without `_notes = []`
  slots are never exceeded      SlotTable made with one slot more
  a layer keeps to its part     SlotTable.room of the free slots alone
  a wave fits into its layer    View.room of all slots
  a layer robs its own alone    Loads._to_rob without its test of the layer
  no deadlock                   Lockstep asking for one layer of all waiting
  no starvation                 lagging.wants most advanced first
  only the unwanted give way    SlotTable.barring without its loop over bitmaps
  nobody robs those before it   Loads._to_rob without the earlier wants
  prefill spares decode         Engine._prefill_wave with room = slots, and
                                Engine._load without the wants of who waits
  tokens in order               Answers._end taking tokens[-1 - i]
  equal runs, equal decisions   Lru.victim by the hash of a fresh object
  the finished load nothing     Answers.moved without its look at `over`
  a row is given back           Answers._end without `_rows[...] = None`
  who joins joins the last one  Engine._seat with position 0
  the identical share loads     Loads.issue without `& ~table.loading[layer]`
  demand before prefetch        Loads.prefetch without its look at the wants
  few prefetches in flight      PREFETCHED = 3
  prompts before prefetch       Engine._load prefetching beside a prefill
  no prefetch takes the wanted  Loads.prefetch barring only what is spared
  a prefetch is kept for use    Loads.issue barring the wants alone
  it gives way to the wanted    Loads._make_room without its second look
  no guess outlives its row     Guesses.leave without its clear
  a guess ends where it tells   Guesses.reveal with get for pop
  one copy                      Guesses.missing without `& ~table.loading`
  counters add up               figures._outcomes without its discard
  what failed is not guessed    Guesses.missing without `& ~self._broken`
  seeded errors are the same    Oracle.guess with a generator of no seed
  every load ends or is told    Engine._failed without `_loads.failed`
  a failure ends who waits      affected() that leaves who waits where they are
  it ends nobody else           affected() without the test of `need`, and
                                Prefill.drop taking out the whole group
  who ended loads nothing       Prefill.drop without `need & kept`
"""

import dataclasses
import functools
import itertools
import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from bevy_jax import baselines, engine, events, figures, protocols, runahead
from bevy_jax import config as config_lib
from bevy_jax import request as request_lib
from bevy_jax.layers import config as model_config
from bevy_jax.offload import eviction as eviction_lib
from bevy_jax.offload import prefetch, slot_table

# These two under every eviction, the others under two: time is short.
_FIRST = ('lockstep', 'runahead')
_FEW = ('lru', 'reuse')
_PLAIN = (
  {
    f'{name}_{eviction}': (scheduler, policy)
    for (name, scheduler), (eviction, policy) in itertools.product(
      config_lib.SCHEDULERS.items(),
      # What is popular depends on the world: `_run` makes it.
      [*config_lib.EVICTIONS.items(), ('static', None)],
    )
    if name in _FIRST or eviction in _FEW
  }
  | {
    f'{name}_{eviction}': (scheduler, config_lib.EVICTIONS[eviction])
    for (name, scheduler), eviction in itertools.product(
      [
        ('runahead_near', runahead.Runahead(max_lag=1)),
        ('runahead_deep', runahead.Runahead(depth=5)),
        ('largest_near', baselines.Largest(max_lag=2)),
      ],
      ['lfu_decayed', 'reuse'],
    )
  }
  | {
    f'{name}_hops{hops}_{eviction}': (
      dataclasses.replace(scheduler, hops=hops),
      config_lib.EVICTIONS[eviction],
    )
    for (name, scheduler), (hops, eviction) in itertools.product(
      [
        ('lockstep', baselines.Lockstep()),
        ('runahead', runahead.Runahead()),
        ('runahead_free', runahead.Runahead(max_lag=None, near=None, depth=3)),
      ],
      [(2, 'lru'), (4, 'reuse'), (8, 'lfu_decayed')],
    )
  }
)
# Scheduler, eviction, prefetcher: each of them at least once, each prefetcher
# guarded and not, near and far, under both schedulers.
_PREFETCHED = {
  'gate_lru': ('lockstep', 'lru', prefetch.NextGate(guarded=False)),
  'gate_deep': ('runahead', 'lfu_decayed', prefetch.NextGate(depth=2)),
  'transition_deep': ('lockstep', 'reuse', prefetch.Transition(depth=3)),
  'transition': (
    'runahead',
    'lfu',
    prefetch.Transition(confidence=0, guarded=False),
  ),
  'popularity': ('lockstep', 'fifo', prefetch.Popularity(depth=2)),
  'history': ('runahead', 'reuse', prefetch.History(guarded=False, depth=2)),
  'mixture': ('runahead', 'reuse', prefetch.Mixture(confidence=0.1)),
  'mixture_deep': ('lockstep', 'lru', prefetch.Mixture(depth=2)),
  'oracle': ('runahead', 'lru', prefetch.Oracle(p=0.7, guarded=False)),
  'oracle_sure': ('lockstep', 'lfu_decayed', prefetch.Oracle(depth=2)),
}
_NONE = prefetch.Nothing()
_VARIANTS = {name: (*both, _NONE) for name, both in _PLAIN.items()} | {
  name: (config_lib.SCHEDULERS[scheduler], config_lib.EVICTIONS[policy], rule)
  for name, (scheduler, policy, rule) in _PREFETCHED.items()
}
_VARIANTS['history_hops'] = (
  runahead.Runahead(hops=4),
  config_lib.EVICTIONS['lfu_decayed'],
  prefetch.History(guarded=False, depth=2),
)
# Variants in which every layer has its own part of the slots.
_PARTED = {
  f'{scheduler}_{eviction}_layer': (
    config_lib.SCHEDULERS[scheduler],
    config_lib.EVICTIONS[eviction],
    rule,
  )
  for (scheduler, eviction), rule in zip(
    itertools.product(_FIRST, ['lru', 'random', 'least_stale', 'reuse']),
    [_NONE, prefetch.Transition(depth=2), prefetch.NextGate(), _NONE] * 2,
    strict=True,
  )
}
_VARIANTS |= _PARTED
_SEEDS = 60
_Kind = TypeVar('_Kind', bound=events.Event)
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


class Fake:
  """An executor that scripts its answers and believes nothing.

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
    return bool(self._loads or self._works)

  def now(self) -> int:
    self._now += 1
    return self._now

  def load(self, key: int, slot: int) -> None:
    assert 0 <= slot < len(self.content), f'slot {slot} does not exist'
    assert self.content[slot] is not None, f'slot {slot} is being filled'
    assert key not in self.content, f'key {key} lies there already'
    coming = [loaded for _, loaded, _ in self._loads]
    assert key not in coming, f'key {key} is on its way already'
    for work in self._works:
      assert slot not in work.slots, f'slot {slot} is being read'
    self.content[slot] = None
    took = self._random.randint(1, self._paces[0])
    self._link = max(self._link * self._in_order, self._now) + took
    self._loads.append((self._link, key, slot))
    self._loads.sort()

  def launch(self, number: int, batch: protocols.Batch) -> None:
    rows = (*batch.rows, *(entry.row for entry in batch.entries))
    for work in self._works:
      assert not set(rows) & set(work.rows), 'a row is in two launches'
    assert len(set(rows)) == len(rows), 'a row is in a launch twice'
    assert rows or batch.kind == 'prefill', 'a launch carries nobody'
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

  def poll(
    self,
  ) -> list[protocols.Happened]:
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
    assert self.busy, 'a deadlock: nothing will ever happen'
    dues = [self._loads[0][0]] if self._loads else []
    dues += [self._works[0].due] if self._works else []
    self._now = max(self._now, min(dues))

  def close(self) -> None:
    pass

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
    assert batch.tables is not None, 'no expert can be read'
    places, found = list(range(len(batch.rows))), list[protocols.Hop]()
    first = batch.tables[0].tolist()
    there = sum(1 << e for e, slot in enumerate(first) if slot >= 0)
    assert there == batch.experts, 'other experts than it applies'
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
    assert token.layer == layer, 'a row waits at another layer'
    for expert, slot in zip(token.choices, slots, strict=True):
      if slot >= 0:
        key = layer * self._model.num_experts + expert
        assert self.content[slot] == key, f'slot {slot} does not hold {key}'
        token.done.add(expert)
    if finish:
      assert token.done == set(token.choices), 'a launch misses an expert'

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


class _Watch:
  """Looks over an engine's shoulder; raises where it breaks a law."""

  def __init__(
    self, found: engine.Engine, scheduler: protocols.Scheduler, bound: int
  ):
    self._engine, self._scheduler, self._bound = found, scheduler, bound
    self._seen, self._queued = 0, 0
    self._joined: dict[int, int] = {}
    self._at: dict[int, int] = {}
    self.active: dict[int, int] = {}
    self.entering: set[int] = set()
    self.finished: set[int] = set()
    self._starving: dict[tuple[int, int], int] = {}
    table = found.table
    self._evict, self._begin = table.evict, table.begin_load
    table.evict = self._on_evict  # type: ignore[method-assign]
    table.begin_load = self._on_load  # type: ignore[method-assign]

  def step(self, submitted: int, rows: int) -> None:
    was_entering = bool(self.entering)
    waited = list(self._engine.view.waiting)
    self._engine.step()
    self._engine.table.check_integrity()
    for event in self._engine.log[self._seen :]:
      self._on_event(event)
      if isinstance(event, events.LoadFailed):
        layer, expert = divmod(event.key, self._engine.table.experts)
        for p in set(waited) & set(self._engine.view.waiting):
          still = p.layer == layer and p.need >> expert & 1
          assert not still, 'it goes on waiting for a load that failed'
    self._seen = len(self._engine.log)
    view = self._engine.view
    if not was_entering and not self.entering:
      free = rows - len(self.active)
      queued = submitted - len(self.active) - len(self.finished)
      assert not (free and queued), 'a row is free and somebody waits for it'
    floor = min((p.position for p in view.waiting), default=0)
    now = {
      (p.request.number, p.position)
      for p in view.waiting
      if p.position == floor and view.floor == floor
    }
    self._starving = {k: self._starving.get(k, 0) for k in now}

  def _on_event(self, event: events.Event) -> None:
    if isinstance(event, events.Admitted):
      assert event.row not in self.active.values(), 'a row is given out twice'
      layers = len(self._engine.table.resident)
      floor = min(self._at.values(), default=0)
      joined = self._at[event.request] = floor // layers * layers
      self._joined[event.request] = joined
      self.active[event.request] = event.row
      self.entering.add(event.request)
    elif isinstance(event, events.Prefilled):
      self.entering -= set(event.requests)
    elif isinstance(event, events.Finished):
      row = self.active.pop(event.request)
      if event.request in self.entering:
        pair = int(event.detail.split()[0]), row
        excused = self._engine._executor.excused
        assert pair in excused, 'its prompt did not need what failed'
      self.entering.discard(event.request)
      self._at.pop(event.request, None)
      self.finished.add(event.request)
    elif isinstance(event, events.Routed):
      joined = self._joined.pop(event.request, event.position)
      assert event.position == joined, 'who joins does not join the last one'
      self._at[event.request] = event.position

  def _wants(self) -> list[protocols.Want]:
    wants = self._scheduler.wants(self._engine.view)
    prefill = self._engine._prefill
    if prefill is not None and prefill.layer >= 0:
      wave = self._engine._prefill_wave(prefill)
      wants.insert(0, protocols.Want(prefill.layer, wave))
      # Lockstep wants for the last ones alone; what others await is kept too.
      wants += [
        protocols.Want(p.layer, p.need) for p in self._engine.view.waiting
      ]
    return wants

  def _on_load(self, key: int) -> int:
    layer, expert = divmod(key, self._engine.table.experts)
    # Of this very step too, which `_on_event` has not seen yet.
    late = self._engine.log[self._seen :]
    over = {e.request for e in late if isinstance(e, events.Finished)}
    over |= self.finished
    view, prefill = self._engine.view, self._engine._prefill
    assert not over & {p.request.number for p in view.waiting}, 'a ghost waits'
    needs = [(p.layer, p.need) for p in view.waiting]
    if prefill is not None:
      chosen = {e for ids in prefill.choices for e in ids}
      mask = sum(1 << e for e in chosen)
      needs.append((prefill.layer, prefill.need & mask))
    else:
      for who in self._starving:
        self._starving[who] += 1
        assert self._starving[who] <= self._bound, f'{who} starves'
    if not any(n >> expert & 1 for at, n in needs if at == layer):
      self._is_prefetch(layer, expert, needs)
    return self._begin(key)

  def _is_prefetch(
    self, layer: int, expert: int, needs: list[tuple[int, int]]
  ) -> None:
    loads, table = self._engine._loads, self._engine.table
    for row, guesses in enumerate(loads.guesses._of):
      left = self._engine._rows[row] is None
      assert not (guesses and left), 'a guess outlives its row'
    expected = [n for at, n in loads.guesses.expected() if at == layer]
    assert any(n >> expert & 1 for n in expected), 'nobody needs this key'
    assert self._engine._prefill is None, 'a prefetch beside a prompt'
    missing = [n & ~table.resident[i] & ~table.loading[i] for i, n in needs]
    assert not any(missing), 'a prefetch before a demand'
    assert loads.in_flight < 2, 'a demand would wait behind prefetches'

  def _on_evict(self, key: int) -> tuple[int, bool]:
    table, wants = self._engine.table, self._wants()
    first: dict[int, int] = {}
    serving = None
    # Whose experts could have made room instead.
    every = range(len(table.resident))
    layers = [key // table.experts] if table.quota else every
    for rank, (layer, experts) in enumerate(wants):
      away = experts & ~table.resident[layer] & ~table.loading[layer]
      away = away if layer in layers else 0
      serving = rank if away and serving is None else serving
      for expert in slot_table.bits(experts):
        first.setdefault(layer * table.experts + expert, rank)
    kept = {
      layer * table.experts + expert
      for layer, experts in self._engine._loads.guesses.kept()
      for expert in slot_table.bits(experts)
    }
    if serving is None:
      self._for_prefetch(key, kept)
      return self._evict(key)
    behind = len(wants)  # A key that nobody wants is behind all wants.
    ranks = [
      first.get(layer * table.experts + expert, behind)
      for layer in layers
      for expert in slot_table.bits(table.evictable(layer))
    ]
    mine = first.get(key, behind)
    if key in kept and mine == behind:
      others = {
        layer * table.experts + expert
        for layer in layers
        for expert in slot_table.bits(table.evictable(layer))
      }
      assert not others - kept - set(first), 'a prefetch was not kept for use'
    assert mine == max(ranks), 'another one would have been missed less'
    assert mine > serving, 'robbed for somebody behind'
    if self._engine._prefill is not None:
      self._spares_decode(key)
    return self._evict(key)

  def _for_prefetch(self, key: int, kept: set[int]) -> None:
    layer, expert = divmod(key, self._engine.table.experts)
    assert self._engine._loads.guesses.on, 'a slot is given up for nothing'
    for p in self._engine.view.waiting:
      assert p.layer != layer or not p.need >> expert & 1, 'it is wanted'
    assert key not in kept, 'a prefetch gives way to another one'

  def _spares_decode(self, key: int) -> None:
    view, table = self._engine.view, self._engine.table
    prefill = self._engine._prefill
    assert prefill is not None
    every = range(len(table.resident))
    layers = [prefill.layer] if table.quota else every
    awaited = {
      p.layer * table.experts + e
      for p in view.waiting
      for e in slot_table.bits(p.need if p.layer in layers else 0)
    }
    busy = {
      layer * table.experts + e
      for layer in layers
      for e in slot_table.bits(table.loading[layer] | table.reading[layer])
      if layer != prefill.layer or not prefill.need >> e & 1
    }
    room = view.room(prefill.layer) - len(awaited | busy)
    avoidable = room >= self._engine._model.top_k
    assert not (key in awaited and avoidable), 'prefill robs those who decode'


class _World(NamedTuple):
  """A random machine, model and list of requests."""

  model: model_config.ModelConfig
  rows: int
  slots: int
  link_depth: int
  requests: list[request_lib.Request]
  arrivals: list[int]
  error: tuple[int, int, int] | None
  seed: int
  faults: float = 0.0


def _world(seed: int, variant: str = '') -> _World:
  rng = random.Random(seed)
  most = 9 if 'hops' in variant else 4
  layers, experts = rng.randint(1, most), rng.randint(4, 12)
  top_k = rng.randint(1, 4)
  trailing = rng.random() < 0.3
  model = model_config.tiny(
    num_layers=layers + trailing,
    num_experts=experts,
    top_k=top_k,
    moe_layers=(True,) * layers + (False,) * trailing,
    dense_dim=8,
  )
  pairs = layers * experts
  few = rng.randint(top_k, 2 * experts)
  sizes = (top_k, 2 * top_k - 1, few, few, few, pairs)
  # Who is to come far needs most of the experts.
  slots = rng.choice((*sizes, pairs, pairs) if most > 4 else sizes)
  count = rng.randint(1, 12)
  requests = [
    request_lib.Request(
      number=i,
      prompt=tuple(rng.randrange(20) for _ in range(rng.choice((1, 2, 5, 13)))),
      new_tokens=rng.randint(1, 6),
      sampling=request_lib.SamplingParams(seed=rng.randrange(6)),
      eos_ids=(0, 1),
    )
    for i in range(count)
  ]
  who = rng.choice(requests)
  at = len(who.prompt) - 1 + rng.randint(0, 2)
  error = (who.sampling.seed, at, rng.randrange(layers))
  return _World(
    model,
    rng.randint(1, 8),
    min(slots, pairs),
    rng.randint(1, 8),
    requests,
    sorted(rng.choice((0, rng.randrange(150))) for _ in range(count)),
    error if rng.random() < 0.3 else None,
    seed,
    rng.choice((0.0, 0.0, 0.02, 0.3)),
  )


def _run(variant: str, world: _World) -> list[events.Event]:
  """Runs a world under watch, past the landing of the last load."""
  scheduler, eviction, prefetcher = _VARIANTS[variant]
  if eviction is None:
    keys = len(world.model.moe_ids) * world.model.num_experts
    rng = np.random.default_rng(world.seed)
    eviction = eviction_lib.Static(popularity=rng.random(keys))
  layers, quota = len(world.model.moe_ids), tuple[int, ...]()
  if variant in _PARTED:
    least = layers * world.model.top_k
    world = world._replace(slots=max(world.slots, least))
    quota = slot_table.split(world.slots, layers)
  fake = Fake(world.model, world.slots, world.seed, world.error, world.faults)
  found = engine.Engine(
    world.model,
    fake,
    scheduler,
    eviction,
    rows=world.rows,
    slots=world.slots,
    link_depth=world.link_depth,
    prefetcher=prefetcher,
    quota=quota,
  )
  bound = world.rows * world.model.top_k + 2 * world.link_depth
  watch = _Watch(found, scheduler, bound)
  submitted = 0
  for step in itertools.count():
    assert step < 20_000, 'no end in sight'
    idle = not found.busy and not fake.busy
    while submitted < len(world.requests) and (
      idle or world.arrivals[submitted] <= step
    ):
      found.submit(world.requests[submitted])
      submitted, idle = submitted + 1, False
    if idle:
      return found.log
    if not found.busy:
      fake.wait()
    watch.step(submitted, world.rows)
  raise AssertionError


def _of(log: list[events.Event], kind: type[_Kind]) -> list[_Kind]:
  return [event for event in log if isinstance(event, kind)]


def _text(world: _World, request: request_lib.Request) -> list[int]:
  """What a request says, whatever runs beside it."""
  out: list[int] = []
  who, position = request.sampling.seed, len(request.prompt) - 1
  spoilt = {(who, position, layer) for layer in range(len(world.model.moe_ids))}
  while world.error not in spoilt:
    position += 1
    # A token whose own first router fails comes in that router's answer.
    spoilt = {(who, position, 0)}
    if world.error in spoilt:
      break
    out.append(draw(who, position - 1))
    if out[-1] in request.eos_ids or len(out) == request.new_tokens:
      break
    spoilt = {(who, position, i) for i in range(len(world.model.moe_ids))}
  return out


@pytest.mark.slow
class LawsTest(parameterized.TestCase):
  @parameterized.parameters(*_VARIANTS)
  def test_laws(self, variant: str):
    for seed in range(_SEEDS):
      world = _world(seed, variant)
      with self.subTest(seed=seed):
        log = _run(variant, world)
        self._check_texts(world, log)
        self._check_pairs(log)
        self._check_counters(world, log)
        self._check_failures(world, log)

  def _check_failures(self, world: _World, log: list[events.Event]) -> None:
    """Who ends for a failed load awaited just that expert."""
    prompts: events.PrefillRouted | None = None
    decoding: dict[int, events.Routed] = {}
    for e in log:
      if isinstance(e, events.PrefillRouted):
        prompts = e
      elif isinstance(e, events.Routed):
        decoding[e.request] = e
      elif isinstance(e, events.Finished) and 'broken' in e.detail:
        layer, expert = divmod(
          int(e.detail.split()[0]), world.model.num_experts
        )
        at = decoding.get(e.request, prompts)
        assert at is not None, 'nobody has said what it needs'
        self.assertEqual(at.layer, layer)
        self.assertIn(expert, at.experts)

  def _check_texts(self, world: _World, log: list[events.Event]) -> None:
    tokens = _of(log, events.Token)
    ends = _of(log, events.Finished)
    self.assertEqual(len(ends), len(world.requests))
    for request in world.requests:
      mine = [t for t in tokens if t.request == request.number]
      self.assertEqual([t.index for t in mine], list(range(len(mine))))
      text = _text(world, request)
      (end,) = (e for e in ends if e.request == request.number)
      if 'broken' in end.detail:
        self.assertEqual(end.reason, 'error')
        text = text[: len(mine)]
      self.assertIn([t.token for t in mine], (text, text[: request.new_tokens]))

  def _check_pairs(self, log: list[events.Event]) -> None:
    loading: dict[int, int] = {}
    for e in log:
      if isinstance(e, events.LoadIssued):
        self.assertNotIn(e.key, loading)
        loading[e.key] = e.slot
      elif isinstance(e, events.LoadLanded | events.LoadFailed):
        self.assertEqual(loading.pop(e.key), e.slot)
    self.assertEqual(loading, {})
    begun, ended = (
      [e.launch for e in _of(log, kind)]
      for kind in (events.LaunchBegun, events.LaunchEnded)
    )
    self.assertEqual(begun, ended)
    self.assertEqual(begun, list(range(len(begun))))

  def _check_counters(self, world: _World, log: list[events.Event]) -> None:
    experts = world.model.num_experts
    counts = figures.cache(log)
    counts |= figures.prefetch(log, experts, -1, len(log), 1)
    routed = _of(log, events.Routed)
    self.assertEqual(counts['uses'], sum(len(e.experts) for e in routed))
    self.assertLessEqual(counts['hits'], counts['uses'])
    causes = [e.cause for e in _of(log, events.LoadIssued)]
    parts = ('demand_loads', 'reloads', 'prefetch_loads')
    self.assertEqual(counts['loads'], sum(counts[k] for k in parts))
    self.assertEqual(counts['loads'], len(causes) - causes.count('prefill'))
    fates = self._fates(log)
    self.assertEqual(counts['prefetch_loads'], len(fates))
    self.assertEqual(counts['wasted_prefetches'], fates.count('wasted'))
    self.assertLessEqual(counts['wasted_prefetches'], counts['wasted_loads'])
    self.assertLessEqual(counts['late_prefetches'], len(fates))
    for e in _of(log, events.Judged):
      self.assertLessEqual(e.useful, min(e.right, e.away, e.missing))
      self.assertLessEqual(max(e.right, e.away), e.guessed)

  def _fates(self, log: list[events.Event]) -> list[str]:
    """What became of each prefetch, told from the launches."""
    fates: list[str] = []
    failed: set[int] = set()
    of: dict[int, int] = {}
    for e in log:
      if isinstance(e, events.LoadIssued) and e.cause == 'prefetch':
        self.assertNotIn(e.key, failed)
        of[e.key] = len(fates)
        fates.append('kept')
      elif isinstance(e, events.LoadFailed):
        of.pop(e.key, None)
        failed.add(e.key)
      elif isinstance(e, events.LaunchBegun | events.Crossed):
        for key in set(e.experts) & set(of):
          fates[of[key]] = 'used'
      elif isinstance(e, events.Evicted) and e.key in of:
        number = of.pop(e.key)
        fates[number] = {'kept': 'wasted'}.get(fates[number], 'used')
    return fates

  @parameterized.parameters(*_VARIANTS)
  def test_equal_runs_make_equal_decisions(self, variant: str):
    for seed in range(100, 104):
      one, two = (_run(variant, _world(seed, variant)) for _ in range(2))
      self.assertEqual(one, two)

  @parameterized.parameters(*_PLAIN)
  def test_the_identical_share_their_loads(self, variant: str):
    model = model_config.tiny()
    loads = []
    for count in (1, 6):
      requests = [
        request_lib.Request(number=i, prompt=(3, 4, 5, 6, 7, 8), new_tokens=12)
        for i in range(count)
      ]
      world = _World(model, 6, 12, 3, requests, [0] * count, None, 0)
      log = _run(variant, world)
      texts = {
        tuple(t.token for t in _of(log, events.Token) if t.request == i)
        for i in range(count)
      }
      self.assertLen(texts, 1)
      loads.append(len(_of(log, events.LoadIssued)))
    self.assertGreater(loads[0], 12)
    self.assertLessEqual(loads[1], 1.05 * loads[0])


if __name__ == '__main__':
  absltest.main()
