"""What each stream will use next, as far as its past tells."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_KEPT = 0.5 ** (1 / 16)  # Of a stream's frequency by one more token.
_LEAST = 1e-3  # No use is impossible, none is certain.

# Weights of the features, in their order. Least squares on real routing,
# GPT-OSS-20B greedy decode: requests 16..63 of the 64 x 256 trace, tokens
# 80..158 after 16 of warm-up, by `experiments.fit_reuse`. What is measured
# with them uses requests 0..15.
WEIGHTS = (0.1225, 0.7476, 0.1307)


class Estimate:
  """Probabilities of use by the next token of each stream.

  A stream's probability of using an expert is a weighted sum of how popular
  the expert is in its layer, how often the stream used it (halving every 16
  tokens), and whether its last token did.

  Attributes:
    odds: float64[layer, expert], (1 - P) / P where P is the probability that
      the next pass of any stream uses it: passes in which it is not, before
      the first in which it is.
  """

  def __init__(
    self,
    layers: int,
    experts: int,
    streams: int,
    weights: tuple[float, ...] = WEIGHTS,
  ):
    self.odds = np.full((layers, experts), 1 / _LEAST)
    self._layers, self._experts = layers, experts
    self._weights = weights
    shape = (layers, streams, experts)
    self._frequency = np.zeros(shape)
    self._tokens = np.zeros((layers, streams, 1))
    self._unused = np.ones(shape)
    self._popular = np.zeros((layers, experts))
    self._passes = np.zeros(layers)
    self._at = np.full(streams, -1)
    # How far it is from a layer to the next time that another one comes.
    ahead = np.arange(layers)[:, None] - np.arange(layers) - 1
    self._ahead = (ahead % layers + 1) / layers
    self._distance = np.zeros((layers, 1))
    self._next = np.empty((layers, experts))
    self._stale = True

  def reveal(
    self,
    layer: int,
    streams: npt.NDArray[np.intp],
    choices: npt.NDArray[np.intp],
  ) -> None:
    """Streams have come to a layer and use these experts there.

    Args:
      layer: where.
      streams: n distinct streams.
      choices: intp[n, k] expert ids of each.
    """
    popularity, frequency, last = self.features(layer, streams, choices)
    w = self._weights
    unused = frequency * -w[1]
    unused -= w[2] * last
    unused += 1 - w[0] * popularity
    np.maximum(unused, _LEAST, out=unused)
    np.minimum(unused, 1 - _LEAST, out=unused)
    self._unused[layer, _slice(streams)] = unused
    self._at[streams] = layer
    self._stale = True
    self._set_odds(layer)

  def features(
    self,
    layer: int,
    streams: npt.NDArray[np.intp],
    choices: npt.NDArray[np.intp],
  ) -> tuple[Array, Array, Array]:
    """Counts these uses; returns what then tells the next, a `WEIGHTS` each.

    Popularity is float64[expert], frequency and whether the last token used
    it are float64[stream, expert].
    """
    last = np.zeros((len(streams), self._experts))
    last[np.arange(len(streams))[:, None], choices] = 1.0
    rows = _slice(streams)
    counts = self._frequency[layer, rows]
    counts *= _KEPT
    counts += last
    self._frequency[layer, rows] = counts
    tokens = self._tokens[layer, rows] * _KEPT + 1.0
    self._tokens[layer, rows] = tokens
    self._popular[layer] += last.sum(0)
    self._passes[layer] += len(streams)
    return self._popular[layer] / self._passes[layer], counts / tokens, last

  def frequency(self, layer: int, streams: npt.NDArray[np.intp]) -> Array:
    """float64[stream, expert]: share of a stream's tokens, decayed."""
    tokens = np.maximum(self._tokens[layer, streams], _LEAST)
    share: Array = self._frequency[layer, streams] / tokens
    return share

  def leave(self, stream: int) -> None:
    """A stream ends; its number may stand for another one from now on."""
    self._frequency[:, stream] = 0.0
    self._tokens[:, stream] = 0.0
    self._unused[:, stream] = 1.0
    self._at[stream] = -1
    self._stale = True
    self._set_odds(slice(None))

  def next_use(self) -> Array:
    """float64[key]: passes until the next use, as is expected.

    The odds, and the way to the layer: its mean over the streams, since each
    stands somewhere else. Valid until a stream moves or leaves.
    """
    if self._stale:
      self._measure()
      np.add(self.odds, self._distance, out=self._next)
      self._stale = False
    return self._next.ravel()

  def _measure(self) -> None:
    """The way to each layer from where the streams stand."""
    there = np.bincount(self._at + 1, minlength=self._layers + 1)[1:]
    self._distance[:, 0] = self._ahead @ there / max(1, int(there.sum()))

  def _set_odds(self, layer: int | slice) -> None:
    unused = np.multiply.reduce(self._unused[layer], axis=-2)
    self.odds[layer] = unused / np.maximum(1 - unused, _LEAST)


def _slice(streams: npt.NDArray[np.intp]) -> npt.NDArray[np.intp] | slice:
  """An index of the same rows; of a single one a slice, which is faster."""
  if len(streams) > 1:
    return streams
  return slice(int(streams[0]), int(streams[0]) + 1)
