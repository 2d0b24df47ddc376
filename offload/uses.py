"""What has been used, when and how often: all that an eviction may know."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bevy_jax.offload import estimate as estimate_lib

_TICK = 2.0**-31  # A load as a fraction of a use.
_MANY = 64  # From here on an array operation costs less than a loop.
_HALF_LIFE = 16.0  # Tokens of a request's progress in which a count halves.


class Uses:
  """The history of one cache; the engine alone changes it.

  A key is layer * experts + expert id. A stream is a number that stands for
  one text on its way through the layers; offload knows no more of it.

  Attributes:
    layers: layers that have experts.
    experts: experts of a layer.
    tick: uses and loads so far.
    last: a key's last use as a tick, 0 where never used.
    loaded: a key's last load as a tick, 0 where never loaded.
    count: how often a key was used, once for all that used it together, and
      as a fraction below 1 its last load, so that equal counts go by age.
    weight: a key's uses, each worth twice as much as one 16 tokens before,
      so that comparing weights compares counts that halve every 16 tokens.
    layer: the layer of the last use, -1 before the first.
    estimate: what the streams will use next, where it was asked for.
  """

  def __init__(
    self, layers: int, experts: int, streams: int = 0, estimate: bool = False
  ):
    keys = layers * experts
    self.layers, self.experts = layers, experts
    self.tick = 0
    self.last = np.zeros(keys)
    self.loaded = np.zeros(keys)
    self.count = np.zeros(keys)
    self.weight = np.zeros(keys)
    self.layer = -1
    self.estimate = (
      estimate_lib.Estimate(layers, experts, streams) if estimate else None
    )
    self._origin = 0.0
    self._worth = 1.0

  def advance(self, clock: float) -> None:
    """Sets the clock: mean tokens that the streams have done."""
    self._worth = math.exp2((clock - self._origin) / _HALF_LIFE)
    if self._worth > 1e200:
      # Only ratios count: start again at 1 long before an overflow.
      self.weight /= self._worth
      self._origin, self._worth = clock, 1.0

  def touch(self, key: int, times: int = 1) -> None:
    """Counts `times` uses of a key."""
    self.tick += 1
    self.last[key] = self.tick
    self.count[key] += 1
    self.weight[key] += self._worth * times
    self.layer = key // self.experts

  def touch_all(self, layer: int, uses: Sequence[int]) -> None:
    """`touch` of a layer's experts, as often as each is named, ascending."""
    first, tick, worth = layer * self.experts, self.tick, self._worth
    self.layer = layer
    if len(uses) >= _MANY:
      times = np.bincount(uses, minlength=self.experts)
      used = times.nonzero()[0]
      own = slice(first, first + self.experts)
      self.last[own][used] = np.arange(tick + 1, tick + 1 + len(used))
      self.count[own] += times > 0
      self.weight[own] += worth * times
      self.tick += len(used)
      return
    each: dict[int, int] = {}
    for expert in uses:
      each[expert] = each.get(expert, 0) + 1
    # The same memory, where one value is had in half the time.
    last: Any = self.last.data
    count: Any = self.count.data
    weight: Any = self.weight.data
    for expert in sorted(each):
      key, tick = first + expert, tick + 1
      last[key] = tick
      count[key] += 1
      weight[key] += worth * each[expert]
    self.tick = tick

  def chance(self, key: int, top_k: int, streams: int) -> float:
    """How likely any of some streams uses a key in its next pass.

    By the estimate, or where none is kept by the key's share of its layer's
    decayed counts, every stream alike.
    """
    if self.estimate is not None:
      return float(1 / (1 + self.estimate.odds[divmod(key, self.experts)]))
    first = key - key % self.experts
    whole = float(self.weight[first : first + self.experts].sum())
    share = top_k * float(self.weight[key]) / whole if whole else 0.0
    return float(1 - (1 - min(1.0, share)) ** streams)

  def load(self, key: int) -> None:
    """Notes that a key gets a slot."""
    self.tick += 1
    self.loaded[key] = self.tick
    self.count[key] = int(self.count[key]) + self.tick * _TICK

  def reveal(
    self, layer: int, streams: Sequence[int], choices: Sequence[Sequence[int]]
  ) -> None:
    """Notes which experts each of some streams uses at its new layer."""
    if self.estimate is not None and streams:
      self.estimate.reveal(
        layer, np.array(streams), np.array(choices, dtype=np.intp)
      )

  def leave(self, stream: int) -> None:
    """A stream ends: what it would have used next counts no longer."""
    if self.estimate is not None:
      self.estimate.leave(stream)


def scan(
  scores: npt.NDArray[np.float64], barred: npt.NDArray[np.float64]
) -> int:
  """The key of least score that is not barred; ties: the lowest key.

  Args:
    scores: float64[keys]; who has the least gives way.
    barred: float64[keys], 0 where a key may go and infinity where not.
  """
  return int((scores + barred).argmin())
