"""Guesses: what is expected of each row, and how it came out."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bevy_jax import events, protocols
from bevy_jax import request as request_lib
from bevy_jax.offload import patterns as patterns_lib
from bevy_jax.offload import prefetch, slot_table


class _Guess(NamedTuple):
  """What one row is expected to use at one layer, as a bitmap and singly."""

  experts: int
  chances: dict[int, float]


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
    self._prefetcher, self._table, self._log = prefetcher, table, log
    layers = len(table.resident)
    self.fresh = [0] * layers
    self._broken = [0] * layers
    self._of: list[dict[int, _Guess]] = [{} for _ in range(rows)]
    self._at = [0] * rows
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
    group: Sequence[request_lib.Progress],
    given: Sequence[Sequence[Sequence[int]]] = (),
  ) -> None:
    """Rows have come to a layer: judges what was guessed of it, and guesses.

    Args:
      time: ns, when it was seen.
      layer: where.
      group: the requests; nothing of what they need there is applied yet.
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
        self._log(judge(time, number, layer, guess.experts, p.need, known))
      self.fresh[layer] &= ~p.need
      self._at[p.row] = layer
    rows = np.array([p.row for p in group])
    choices = np.array([p.choices for p in group], np.intp)
    self._patterns.reveal(layer, rows, choices, given)
    self._guess(layer, rows)

  def leave(self, row: int) -> None:
    """A row is free again: nothing is expected of it."""
    if self._patterns is not None:
      self._of[row].clear()
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
      protocols.Want(layer, guess.experts)
      for guesses in self._of
      for layer, guess in guesses.items()
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
    table, layers = self._table, len(self._table.resident)
    unused: dict[int, float] = {}
    nearest: dict[int, int] = {}
    for row, guesses in enumerate(self._of):
      for layer, guess in guesses.items():
        away = guess.experts & ~table.resident[layer] & ~table.loading[layer]
        away &= ~self._broken[layer]
        if not away:
          continue
        ahead = (layer - self._at[row] - 1) % layers
        for expert in slot_table.bits(away):
          key = layer * table.experts + expert
          unused[key] = unused.get(key, 1.0) * (1 - guess.chances[expert])
          nearest[key] = min(nearest.get(key, ahead), ahead)
    order = sorted(unused, key=lambda key: (nearest[key], unused[key], key))
    return [(key, 1 - unused[key]) for key in order]

  @property
  def rows(self) -> int:
    """Rows of which anything is expected."""
    return sum(map(bool, self._of))

  def _guess(self, layer: int, rows: patterns_lib.Ids) -> None:
    assert self._patterns is not None
    ids, chances = self._prefetcher.guess(self._patterns, layer, rows)
    # A chance of nothing is no guess, however little confidence is asked for.
    least = max(self._prefetcher.confidence, 1e-9)
    sure = np.where((ids >= 0) & (chances >= least), ids, -1)
    numbers = rows.tolist()
    for ahead, (lists, odds) in enumerate(
      zip(sure.tolist(), chances.tolist(), strict=True)
    ):
      target = (layer + 1 + ahead) % len(self._table.resident)
      for row, some, chance in zip(numbers, lists, odds, strict=True):
        singly = {e: c for e, c in zip(some, chance, strict=True) if e >= 0}
        experts = 0
        for expert in singly:
          experts |= 1 << expert
        before = self._of[row].get(target)
        if before is not None:
          experts |= before.experts
          singly = before.chances | singly
        self._of[row][target] = _Guess(experts, singly)


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
