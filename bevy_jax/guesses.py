"""Guesses: what is expected of each row, and how it came out."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bevy_jax import events, protocols
from bevy_jax import request as request_lib
from bevy_jax.offload import patterns as patterns_lib
from bevy_jax.offload import prefetch, slot_table


class Came(NamedTuple):
  """A request that has come to a router.

  Attributes:
    request: which.
    row: its row.
    choices: expert ids there.
    need: the same as a bitmap.
  """

  request: request_lib.Request
  row: int
  choices: tuple[int, ...]
  need: int


class Guesses:
  """Standing guesses of all rows; `Loads` and the engine change them.

  A guess stands from the reveal that it was made of until its row comes to
  the layer that it tells of. With several layers ahead, a later guess of the
  same layer is added to the earlier one.

  Attributes:
    on: whether anything is ever guessed.
    guarded: see `Prefetcher`.
    fresh: bitmap, one a layer, of experts that a prefetch loaded and that
      nobody has used since.
  """

  def __init__(
    self,
    prefetcher: prefetch.Prefetcher,
    table: slot_table.SlotTable,
    rows: int,
    top_k: int,
    log: Callable[[events.Event], None],
  ):
    self.on, self.guarded = prefetcher.depth > 0, prefetcher.guarded
    # A chance of nothing is no guess, however little confidence is asked for.
    self._least = max(prefetcher.confidence, 1e-9)
    self._most = 1 - self._least
    # `mixture` tells of every expert, and of now as well as at a reveal: its
    # guesses are made when there is time to load what they say.
    self._late = prefetcher.keeps == 'mixed'
    self._prefetcher, self._table, self._log = prefetcher, table, log
    layers = len(table.resident)
    self.fresh = [0] * layers
    self._broken = [0] * layers
    # What each row is expected to use at which layer, and of every expert how
    # likely it does not.
    self._of: list[dict[int, int]] = [{} for _ in range(rows)]
    self._unused = np.ones((layers if self.on else 0, rows, table.experts))
    self._at = [0] * rows
    self._due: dict[int, int] = {}  # Rows to guess of, and their layers.
    self._patterns: patterns_lib.Patterns | None = None
    if self.on:
      self._patterns = patterns_lib.Patterns(
        layers,
        table.experts,
        rows,
        top_k,
        keeps=prefetcher.keeps,
        depth=prefetcher.depth,
        start=prefetcher.start,
      )

  def reveal(
    self,
    time: int,
    layer: int,
    group: Sequence[Came],
    given: Sequence[Sequence[Sequence[int]]] = (),
  ) -> None:
    """Rows have come to a layer: judges what was guessed of it, and guesses.

    Args:
      time: ns, when it was seen.
      layer: where.
      group: who, as they came.
      given: see `protocols.Ended.guesses`, one a request.
    """
    if self._patterns is None or not group:
      return
    # What only a prefetch has brought would have been missing.
    known = self._table.resident[layer] & ~self.fresh[layer]
    for p in group:
      guess = self._of[p.row].pop(layer, None)
      if guess is not None:
        number = p.request.number
        self._log(judge(time, number, layer, guess, p.need, known))
        self._unused[layer, p.row] = 1.0
      self.fresh[layer] &= ~p.need
      self._at[p.row] = layer
    rows = np.array([p.row for p in group])
    choices = np.array([p.choices for p in group], np.intp)
    self._patterns.reveal(layer, rows, choices, given)
    if self._late:
      self._due.update(dict.fromkeys(rows.tolist(), layer))
    else:
      self._guess(layer, rows)

  def leave(self, row: int) -> None:
    """A row is free again: nothing is expected of it."""
    if self._patterns is not None:
      self._of[row].clear()
      self._due.pop(row, None)
      self._unused[:, row] = 1.0
      self._patterns.leave(row)

  def loaded(self, key: int) -> None:
    """A prefetch of a key has begun."""
    layer, expert = divmod(key, self._table.experts)
    self.fresh[layer] |= 1 << expert

  def evicted(self, key: int) -> None:
    """A key has lost its slot."""
    layer, expert = divmod(key, self._table.experts)
    self.fresh[layer] &= ~(1 << expert)

  def failed(self, key: int) -> None:
    """A load has failed: only who needs the key may try it again."""
    self.evicted(key)
    layer, expert = divmod(key, self._table.experts)
    self._broken[layer] |= 1 << expert

  def expected(self) -> list[protocols.Want]:
    """All that is guessed, a want a layer and row."""
    return [
      protocols.Want(layer, experts)
      for guesses in self._of
      for layer, experts in guesses.items()
    ]

  def kept(self) -> list[protocols.Want]:
    """What a prefetch loaded and a standing guess still expects."""
    if not any(self.fresh):
      return []
    return [
      protocols.Want(layer, experts & self.fresh[layer])
      for layer, experts in self.expected()
      if experts & self.fresh[layer]
    ]

  def missing(self) -> list[tuple[int, float]]:
    """Guessed keys that are neither here nor coming, best first.

    With each goes the chance that any of the rows uses it; keys whose load
    has failed are left out. Fewer layers
    ahead come first, then the likelier ones, then the lower keys.
    """
    self.catch_up()
    table, layers = self._table, len(self._table.resident)
    nearest: dict[int, int] = {}
    for row, guesses in enumerate(self._of):
      for layer in guesses:
        ahead = (layer - self._at[row] - 1) % layers
        nearest[layer] = min(nearest.get(layer, ahead), ahead)
    found: list[tuple[int, float, int]] = []
    whole = (1 << table.experts) - 1
    for layer, ahead in nearest.items():
      away = whole & ~table.resident[layer] & ~table.loading[layer]
      away &= ~self._broken[layer]
      if not away:
        continue
      unused = np.multiply.reduce(self._unused[layer], axis=0).tolist()
      base = layer * table.experts
      found += [
        (ahead, unused[e], base + e)
        for e in slot_table.bits(away)
        if unused[e] <= self._most
      ]
    return [(key, 1 - unused) for _, unused, key in sorted(found)]

  @property
  def rows(self) -> int:
    """Rows of which anything is expected."""
    return sum(map(bool, self._of))

  def catch_up(self) -> None:
    """Makes the guesses that nobody has asked for yet."""
    late: dict[int, list[int]] = {}
    for row, layer in self._due.items():
      late.setdefault(layer, []).append(row)
    self._due.clear()
    for layer, some in late.items():
      self._guess(layer, np.array(some))

  def _guess(self, layer: int, rows: patterns_lib.Ids) -> None:
    assert self._patterns is not None
    ids, chances = self._prefetcher.guess(self._patterns, layer, rows)
    sure = np.where((ids >= 0) & (chances >= self._least), ids, -1)
    numbers = rows.tolist()
    every = self._late
    for ahead, lists in enumerate(sure.tolist()):
      target = (layer + 1 + ahead) % len(self._table.resident)
      for n, row in enumerate(numbers):
        experts = 0
        for expert in lists[n]:
          if expert >= 0:
            experts |= 1 << expert
        self._of[row][target] = self._of[row].get(target, 0) | experts
      if every:
        self._unused[target, rows] = 1 - chances[ahead]
        continue
      at, which = (sure[ahead] >= 0).nonzero()
      said = sure[ahead, at, which]
      self._unused[target, rows[at], said] = 1 - chances[ahead, at, which]


def judge(
  time: int, request: int, layer: int, guessed: int, used: int, known: int
) -> events.Judged:
  """What a guess was worth, from bitmaps; `known` is resident anyway."""
  return events.Judged(
    time,
    request,
    layer,
    guessed.bit_count(),
    (guessed & used).bit_count(),
    (guessed & ~known).bit_count(),
    (guessed & used & ~known).bit_count(),
    (used & ~known).bit_count(),
  )
