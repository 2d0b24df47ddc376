"""Routing that no model made: for experts and layers that nobody recorded.

Everything here is synthetic, says so in its `meta`, and stands for no model:
real routers are less regular, and every figure depends on the two numbers.
"""

import math

import numpy as np

from bevy_jax import trace as trace_lib
from bevy_jax.offload import eviction


class Hash:
  """A `virtual.Source` without end, for prompts too: a hash of its arguments.

  Expert e of layer l is drawn in proportion to (1 + (e + 3 l) % experts) **
  -skew. Two tokens in a row often agree: they are the same draw.
  """

  def __init__(self, experts: int, top_k: int, seed: int, skew: float = 1.0):
    self._experts, self._top_k, self._seed = experts, top_k, seed
    self._skew = skew

  def choices(self, who: int, position: int, layer: int) -> tuple[int, ...]:
    """See `virtual.Source`."""
    at = (who * 1009 + position // 2) * 1013 + layer
    # Whose exponential clock rings first: a draw without replacement.
    rings = []
    for e in range(self._experts):
      draw = (eviction.mix(self._seed, at, e) + 1) / 2**64
      heat = (1 + (e + 3 * layer) % self._experts) ** -self._skew
      rings.append((-math.log(draw) / heat, e))
    return tuple(e for _, e in sorted(rings)[: self._top_k])

  def token(self, who: int, position: int) -> int:
    """See `virtual.Source`: a number below 20."""
    return eviction.mix(self._seed, who, position) % 20

  def prompt(self, token: int, position: int, layer: int) -> tuple[int, ...]:
    """See `virtual.Source`."""
    return self.choices(token, position, layer)


def zipf(
  *,
  layers: int,
  experts: int,
  top_k: int,
  requests: int,
  tokens: int,
  exponent: float = 0.8,
  reuse: float = 0.4,
  seed: int = 0,
) -> trace_lib.Trace:
  """Requests whose experts' popularity falls as a power of its rank.

  Args:
    layers: layers with experts; each has an order of popularity of its own.
    experts: of a layer.
    top_k: of them that a token uses.
    requests: how many.
    tokens: of each.
    exponent: rank r is drawn in proportion to r ** -exponent.
    reuse: share of its experts that a token takes over from the one before,
      each by chance. GPT-OSS-20B's routers reuse 44 %.
    seed: of all draws.
  """
  if not (0 < top_k <= experts and min(layers, requests, tokens) > 0):
    raise ValueError(
      f'{layers} layers, {experts} experts, top_k {top_k}, {requests} requests '
      f'of {tokens} tokens: all must be at least 1, and top_k at most experts.'
    )
  if not (exponent >= 0 and 0 <= reuse < 1):
    raise ValueError(
      f'exponent is {exponent} and reuse {reuse}; they must be at least 0, and '
      'reuse below 1.'
    )
  rng = np.random.default_rng(seed)
  ranks = np.argsort(rng.random((layers, experts)), axis=-1)
  popular = -exponent * np.log1p(ranks)
  chosen = np.empty((requests, tokens, layers, top_k), np.int16)
  before = np.zeros((requests, layers, experts), bool)
  for token in range(tokens):
    # Gumbel noise: the highest k are a draw of k without replacement.
    score = popular + rng.gumbel(size=before.shape)
    score[before & (rng.random(before.shape) < reuse)] = np.inf
    ids = np.argsort(-score, axis=-1, kind='stable')[..., :top_k]
    chosen[:, token] = ids
    before = np.zeros_like(before)
    np.put_along_axis(before, ids, True, axis=-1)
  return trace_lib.Trace(
    experts=chosen,
    lengths=np.full(requests, tokens, np.int32),
    num_experts=experts,
    meta={
      'model': 'synthetic',
      'source': f'zipf, exponent {exponent}, reuse {reuse}, seed {seed}',
      'synthetic': True,
      'num_experts': experts,
      'top_k': top_k,
    },
  )
