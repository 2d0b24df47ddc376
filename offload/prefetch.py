"""Which experts will be used soon: one interface, pure rules.

A prefetcher says, when streams have come to a layer, what each of them will
use at the next ones and how likely that is. Whether and when something is
loaded for it is not its affair: see `bevy_jax.loads`.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from bevy_jax.offload import patterns as patterns_lib

Ids = patterns_lib.Ids
Patterns = patterns_lib.Patterns
Counts = patterns_lib.Counts

# Weights of `Mixture` in the order of its features, a constant first. Logistic
# regression on real routing, GPT-OSS-20B greedy decode: requests 16..31 of
# the 64 x 256 trace, tokens 16..159, pairs counted on requests 0..15 (the other
# way round gives the same to 0.04). What it calls .25, .55, .75 likely there
# came true in .23, .54, .77 of the cases.
MIXED = (1.14, -2.15, 1.01, 0.685, 2.69)
_SEEN = 2.0  # Times that every pair counts as seen before it was.
_FLOOR = 0.005  # Added before a logarithm, and for a stream's few tokens:
_FEW = 0.02


class Guess(NamedTuple):
  """What n streams at one layer will use; k ids each.

  Attributes:
    ids: intp[ahead, n, k] expert ids at the layer 1, 2, ... further on; -1
      where there is none; k is top_k, or more where all are named.
    chance: float[ahead, n, k], how likely each of them is used there.
  """

  ids: Ids
  chance: npt.NDArray[np.float64]


class Prefetcher(Protocol):
  """Guesses what comes; plain values in, decision out."""

  @property
  def depth(self) -> int:
    """Layers ahead that it guesses; 0 for none."""

  @property
  def confidence(self) -> float:
    """Guesses that are less likely than this are not acted upon."""

  @property
  def guarded(self) -> bool:
    """Whether a prefetch may evict only what is colder than itself."""

  @property
  def keeps(self) -> str:
    """What `Patterns` keeps for it: '', 'pairs', 'mixed', 'passes', 'given'."""

  @property
  def gates(self) -> int:
    """Layers ahead of which an executor must give ids in its answers."""

  @property
  def start(self) -> Counts | None:
    """What had been counted before the run."""

  def guess(self, patterns: Patterns, layer: int, streams: Ids) -> Guess:
    """What streams at a layer will use next. Changes nothing.

    Args:
      patterns: the history, that of this layer included.
      layer: where they are.
      streams: intp[n], which of them.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefetcherBase:
  """What all have in common; one of your own adds `guess` alone.

  Attributes:
    depth: see `Prefetcher`, as are the others.
    confidence: see there.
    guarded: see there.
  """

  depth: int = 1
  confidence: float = 0.2
  guarded: bool = True

  @property
  def keeps(self) -> str:
    """See `Prefetcher`."""
    return ''

  @property
  def gates(self) -> int:
    """See `Prefetcher`."""
    return 0

  @property
  def start(self) -> Counts | None:
    """See `Prefetcher`."""
    return None

  def targets(self, patterns: Patterns, layer: int) -> list[int]:
    """The layers that follow, `depth` of them, round to the first."""
    return [(layer + 1 + a) % patterns.layers for a in range(self.depth)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nothing(PrefetcherBase):
  """No prefetch at all."""

  depth: int = 0

  def guess(self, patterns: Patterns, layer: int, streams: Ids) -> Guess:
    """See `Prefetcher`."""
    shape = (0, len(streams), patterns.top_k)
    return Guess(np.zeros(shape, np.intp), np.zeros(shape))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Told(PrefetcherBase):
  """What those have in common that an executor tells of layers ahead."""

  @property
  def keeps(self) -> str:
    """See `Prefetcher`."""
    return 'given'

  @property
  def gates(self) -> int:
    """See `Prefetcher`."""
    return self.depth


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextGate(_Told):
  """The next layers' routers on this layer's hidden state, by the device.

  How likely such an id is used is how often ids of its rank, its layer and
  as many layers ahead have come true so far, starting at 1. Nothing is
  guessed beyond the last layer: the next token is not known yet.
  """

  def guess(self, patterns: Patterns, layer: int, streams: Ids) -> Guess:
    """See `Prefetcher`."""
    shape = (self.depth, len(streams), patterns.top_k)
    ids, chance = np.empty(shape, np.intp), np.empty(shape)
    for ahead, target in enumerate(self.targets(patterns, layer)):
      ids[ahead] = patterns.given[ahead, target, streams]
      right, told = patterns.right[ahead, target], patterns.told[ahead, target]
      chance[ahead] = (right + 1) / (told + 1)
    return Guess(ids, chance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transition(PrefetcherBase):
  """What tokens used next that used the same here: first order, by layer.

  The chance of f is the mean of P(f next | e here) over the experts e that a
  stream uses; more layers ahead the likeliest ones are carried on by the same
  rule, each weighed by its own chance.

  Attributes:
    counts: pairs counted before the run; those of the run are added.
  """

  counts: Counts | None = None

  @property
  def keeps(self) -> str:
    """See `Prefetcher`."""
    return 'pairs'

  @property
  def start(self) -> Counts | None:
    """See `Prefetcher`."""
    return self.counts

  def guess(self, patterns: Patterns, layer: int, streams: Ids) -> Guess:
    """See `Prefetcher`."""
    counts, ids = patterns.counts, patterns.ids[layer, streams]
    weights = np.ones(ids.shape, np.float32)
    shape = (self.depth, *ids.shape)
    found = Guess(np.empty(shape, np.intp), np.empty(shape))
    for ahead in range(self.depth):
      here = (layer + ahead) % patterns.layers
      each = np.maximum(1, counts.followed[here][ids]) * patterns.top_k
      # Rows by index, not a product of matrices: its threads would wait for
      # cores that others use.
      chances = np.einsum('nk,nkf->nf', weights / each, counts.pairs[here][ids])
      ids, weights = best(chances, patterns.top_k)
      found.ids[ahead], found.chance[ahead] = ids, weights
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Popularity(PrefetcherBase):
  """The most used experts of the layers that follow.

  Attributes:
    counts: uses counted before the run; those of the run are added.
  """

  counts: Counts | None = None

  @property
  def start(self) -> Counts | None:
    """See `Prefetcher`."""
    return self.counts

  def guess(self, patterns: Patterns, layer: int, streams: Ids) -> Guess:
    """See `Prefetcher`."""
    targets = self.targets(patterns, layer)
    passes = np.maximum(1, patterns.counts.passes[targets])
    rates = patterns.counts.popular[targets] / passes[:, None]
    ids, chance = best(rates, patterns.top_k)
    n = len(streams)
    return Guess(
      np.repeat(ids[:, None], n, 1), np.repeat(chance[:, None], n, 1)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class History(PrefetcherBase):
  """What the most similar of the last passes used, as MoE-Infinity does.

  A pass is one token's way through all layers; two are similar by the share
  of their uses that agree in the layers gone through so far. That share is
  also how likely the other's experts are used. MoE-Infinity compares whole
  texts; a pass tells more of the next layer and is kept for every token.
  """

  @property
  def keeps(self) -> str:
    """See `Prefetcher`."""
    return 'passes'

  def guess(self, patterns: Patterns, layer: int, streams: Ids) -> Guess:
    """See `Prefetcher`."""
    likeness = patterns.likeness[streams]
    nearest = likeness.argmax(1)
    share = likeness.max(1) / (patterns.top_k * (layer + 1))
    ids = patterns.passes[nearest][:, self.targets(patterns, layer)]
    ids = ids.transpose(1, 0, 2)
    return Guess(ids, np.broadcast_to(share[None, :, None], ids.shape))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture(PrefetcherBase):
  """All that a trace tells, weighed: how likely a stream uses each expert.

  Its log-odds are a weighted sum of the logarithms of how popular the expert
  is in its layer, of how often the stream used it (halving every 16 tokens)
  and of P(f next | e here), mean over what the stream uses here, and of
  whether its last token used it. It names every expert, so that what many
  streams might use together counts as well.

  Attributes:
    confidence: here of what any of the streams might use.
    counts: pairs and uses counted before the run; those of the run are added.
  """

  confidence: float = 0.35
  counts: Counts | None = None

  @property
  def keeps(self) -> str:
    """See `Prefetcher`."""
    return 'mixed'

  @property
  def start(self) -> Counts | None:
    """See `Prefetcher`."""
    return self.counts

  def guess(self, patterns: Patterns, layer: int, streams: Ids) -> Guess:
    """See `Prefetcher`."""
    shape = (self.depth, len(streams), patterns.experts)
    found = Guess(np.empty(shape, np.intp), np.empty(shape))
    here = patterns.ids[layer, streams]
    for ahead, target in enumerate(self.targets(patterns, layer)):
      odds = self._log_odds(patterns, target, streams, here)
      found.ids[ahead] = np.arange(patterns.experts)
      found.chance[ahead] = 1 / (1 + np.exp(-odds))
      here = best(odds, patterns.top_k).ids
    return found

  def _log_odds(
    self, patterns: Patterns, target: int, streams: Ids, here: Ids
  ) -> npt.NDArray[np.float64]:
    """Of every expert of a layer, float64[n, expert]; `here` used before."""
    counts, before = patterns.counts, (target - 1) % patterns.layers
    popular = counts.popular[target] / max(1.0, counts.passes[target])
    pairs = counts.pairs[before][here] + _SEEN * popular
    each = counts.followed[before][here] + _SEEN
    after = np.log(pairs / each[:, :, None] + _FLOOR)
    often = patterns.estimate.frequency(target, streams)
    odds: npt.NDArray[np.float64] = MIXED[4] * after.mean(1)
    odds += MIXED[0] + MIXED[1] * np.log(popular + _FLOOR)
    odds += MIXED[2] * np.log(often + _FEW)
    rows, used = (patterns.ids[target, streams] >= 0).nonzero()
    odds[rows, patterns.ids[target, streams][rows, used]] += MIXED[3]
    return odds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle(_Told):
  """Knows the future, but not always: only where somebody tells it.

  Each expert that will be used is guessed with probability `p`; instead of
  the others come the most popular ones of the layer that will not be used.

  Attributes:
    p: accuracy.
    seed: the same seed errs at the same places.
  """

  p: float = 1.0
  seed: int = 0

  def guess(self, patterns: Patterns, layer: int, streams: Ids) -> Guess:
    """See `Prefetcher`."""
    targets = self.targets(patterns, layer)
    at = np.arange(self.depth)[:, None], np.array(targets)[:, None]
    ids = patterns.given[(*at, streams)]
    draws = np.random.default_rng((self.seed, patterns.tick)).random(ids.shape)
    wrong = (draws >= self.p) & (ids >= 0)
    for ahead in wrong.any((1, 2)).nonzero()[0]:
      popular = patterns.counts.popular[targets[ahead]]
      order = np.argsort(-popular, kind='stable').tolist()
      for n in wrong[ahead].any(-1).nonzero()[0]:
        true, missed = set(ids[ahead, n].tolist()), wrong[ahead, n]
        others = (e for e in order if e not in true)
        # Where nearly all experts are used there are not enough wrong ones.
        instead = [next(others, -1) for _ in range(missed.sum())]
        ids[ahead, n, missed] = instead
    return Guess(ids, np.full(ids.shape, self.p))


def best(chances: npt.NDArray[Any], count: int) -> Guess:
  """The `count` likeliest of float[n, expert]; ties: the lowest id."""
  ids = np.argsort(-chances, axis=1, kind='stable')[:, :count]
  return Guess(ids, chances[np.arange(len(ids))[:, None], ids])


PREFETCHERS: dict[str, Prefetcher] = {
  'none': Nothing(),
  'next_gate': NextGate(),
  'transition': Transition(),
  'popularity': Popularity(),
  'history': History(),
  'mixture': Mixture(),
  'oracle': Oracle(),
}
