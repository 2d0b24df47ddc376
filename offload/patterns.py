"""Patterns: what streams used layer by layer, as far as a prefetch needs it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bevy_jax.offload import estimate as estimate_lib

Ids = npt.NDArray[np.intp]

PASSES = 128  # Passes that `history` remembers.


class Counts(NamedTuple):
  """What has been counted, online or on a trace.

  Attributes:
    popular: float[layer, expert], uses.
    passes: float[layer], tokens.
    pairs: float32[layer, e, f], tokens that used e there and f at the next
      layer; behind the last layer comes the next token's first.
    followed: float32[layer, e], tokens that used e there and went on.
  """

  popular: npt.NDArray[np.float64]
  passes: npt.NDArray[np.float64]
  pairs: npt.NDArray[np.float32]
  followed: npt.NDArray[np.float32]


class Patterns:
  """The history that prefetchers look at; the engine alone changes it.

  A stream is a number that stands for one text on its way through the
  layers. Only what `keeps` names is kept, since each costs time.

  Attributes:
    layers: layers that have experts.
    experts: experts of a layer.
    top_k: experts that a stream uses at a layer.
    tick: reveals so far.
    at: layer of each stream, -1 where it is nowhere.
    ids: intp[layer, stream, k], what each used last at each layer; -1 never.
    counts: popularity always, pairs where 'pairs' is kept.
    given: intp[ahead, layer, stream, k], ids that somebody said each stream
      will use at its next time there, said `ahead` layers before; -1 none.
    right: float[ahead, layer, k], how many of them came true, by rank.
    told: float[ahead, layer, k], how many there were.
    passes: intp[PASSES, layer, k], what earlier passes used ('passes').
    likeness: float[stream, PASSES], uses that a stream's pass shares with
      each of them so far.
    estimate: how often each stream used what, where 'mixed' is kept, which
      keeps pairs too.
  """

  def __init__(
    self,
    layers: int,
    experts: int,
    streams: int,
    top_k: int,
    *,
    keeps: str = '',
    depth: int = 1,
    start: Counts | None = None,
  ):
    self.layers, self.experts, self.top_k = layers, experts, top_k
    self.tick = 0
    self.at = np.full(streams, -1)
    self.ids = np.full((layers, streams, top_k), -1)
    self._keeps = keeps
    self.counts = nothing(layers, experts)
    if start is not None:
      # Copied: a policy's own counts stay what they are.
      self.counts = Counts(
        start.popular.copy(),
        start.passes.copy(),
        start.pairs.copy(),
        start.followed.copy(),
      )
    ahead = depth if keeps == 'given' else 0
    self.given = np.full((ahead, layers, streams, top_k), -1)
    self.right = np.zeros((ahead, layers, top_k))
    self.told = np.zeros((ahead, layers, top_k))
    self.estimate = estimate_lib.Estimate(
      layers if keeps == 'mixed' else 0, experts, streams
    )
    past = PASSES if keeps == 'passes' else 0
    self.passes = np.full((past, layers, top_k), -1)
    self.likeness = np.zeros((streams, past))
    self._seen = np.zeros((layers, experts, past), np.bool_)
    self._oldest = 0

  def reveal(
    self,
    layer: int,
    streams: Ids,
    choices: Ids,
    given: Sequence[Sequence[Sequence[int]]] = (),
  ) -> None:
    """Streams have come to a layer and use these experts there.

    Args:
      layer: where.
      streams: n distinct streams.
      choices: intp[n, k] expert ids of each.
      given: for each stream, for each of the layers ahead, the ids that it is
        said to use there; may end early, nothing where nobody says.
    """
    self.tick += 1
    counts, before = self.counts, (layer - 1) % self.layers
    np.add.at(counts.popular[layer], choices.ravel(), 1.0)
    counts.passes[layer] += len(streams)
    if self._keeps in ('pairs', 'mixed'):
      came = self.at[streams] == before
      old = self.ids[before, streams[came]]
      pairs = old[:, :, None] * self.experts + choices[came][:, None]
      # One index into a flat array is many times faster than two.
      flat = counts.pairs[before].reshape(-1)
      np.add.at(flat, pairs.ravel(), np.float32(1))
      np.add.at(counts.followed[before], old.ravel(), np.float32(1))
    self.ids[layer, streams] = choices
    self.at[streams] = layer
    if self._keeps == 'given':
      self._judge(layer, streams, choices)
      self._give(layer, streams, given)
    elif self._keeps == 'mixed':
      self.estimate.features(layer, streams, choices)
    elif self._keeps == 'passes':
      self._compare(layer, streams, choices)

  def leave(self, stream: int) -> None:
    """A stream ends; its number may stand for another one from now on."""
    self.at[stream] = -1
    self.given[:, :, stream] = -1
    if self._keeps == 'mixed':
      self.estimate.leave(stream)

  def _judge(self, layer: int, streams: Ids, choices: Ids) -> None:
    """Counts which of the given ids came true."""
    here = np.arange(len(streams))[:, None]
    used = np.zeros((len(streams), self.experts), np.bool_)
    used[here, choices] = True
    for ahead, given in enumerate(self.given):
      said = given[layer, streams]
      told = said >= 0
      self.right[ahead, layer] += (used[here, said] & told).sum(0)
      self.told[ahead, layer] += told.sum(0)
      given[layer, streams] = -1

  def _give(
    self,
    layer: int,
    streams: Ids,
    given: Sequence[Sequence[Sequence[int]]],
  ) -> None:
    depth = min(len(self.given), len(given[0]) if given else 0)
    for ahead in range(depth):
      target = (layer + 1 + ahead) % self.layers
      ids = [lists[ahead] for lists in given]
      self.given[ahead, target, streams] = ids

  def _compare(self, layer: int, streams: Ids, choices: Ids) -> None:
    """Compares passes with earlier ones; what has ended becomes one."""
    if layer == 0:
      self.likeness[streams] = 0.0
    self.likeness[streams] += self._seen[layer][choices].sum(1)
    if layer < self.layers - 1:
      return
    at = np.arange(self.layers)[:, None]
    for stream in streams:
      place = self._oldest
      self._oldest = (place + 1) % len(self.passes)
      ids = self.ids[:, stream]
      self._seen[:, :, place] = False
      self._seen[at, ids, place] = True
      self.passes[place] = ids
      self.likeness[:, place] = 0.0


def nothing(layers: int, experts: int) -> Counts:
  """Counts before anything was counted."""
  return Counts(
    np.zeros((layers, experts)),
    np.zeros(layers),
    np.zeros((layers, experts, experts), np.float32),
    np.zeros((layers, experts), np.float32),
  )
