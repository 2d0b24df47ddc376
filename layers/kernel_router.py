"""The end of the router as a GPU kernel: scores and choices of one row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kernel_call as kernels
from bevy_jax.layers import router

CHOOSE = 8


def choose(
  config: config_lib.ModelConfig,
  logits_PxNxE: jax.Array,
  squares_PxN: jax.Array,
  x_NxD: jax.Array,
  norm_D: jax.Array,
  given_NxT: jax.Array | None = None,
) -> tuple[router.Routing, jax.Array]:
  """As `router.choose`, of what `kernel_dense.output` has left for it.

  A program a row; ties go to the lowest id. With ids that are given these are
  weighed instead, see `forced`. Also returns the stream behind
  the norm, for the experts.
  """
  parts, n, e = logits_PxNxE.shape
  d, t = config.model_dim, config.top_k
  width, pp, dp = (kernels.padded(size) for size in (e, parts, d))

  extra = () if given_NxT is None else (given_NxT,)

  def kernel(*refs: Any) -> None:
    parted, squares, x, norm, *given, ids, scores, sound, normed = refs
    row = pl.program_id(0)
    real = jnp.arange(width, dtype=jnp.int32)
    part = jnp.arange(pp, dtype=jnp.int32) < parts
    square = kernels.load(squares.at[pl.ds(0, pp), row], part)
    factor = jax.lax.rsqrt(jnp.sum(square) / d + config.norm_eps)
    both = part[:, None] & (real < e)[None, :]
    each = kernels.load(parted.at[pl.ds(0, pp), row, pl.ds(0, width)], both)
    logits = jnp.sum(each, axis=0) * factor
    broken = jnp.where(jnp.abs(logits) < jnp.inf, 0, 1)  # Of nan this is 1 too.
    whole = jnp.max(jnp.where(real < e, broken, 0)) == 0
    logits = jnp.where(real < e, jnp.where(whole, logits, 0.0), -jnp.inf)
    raised = jnp.exp(logits - jnp.max(logits))
    raised = raised / jnp.sum(raised)
    left = jnp.where(real < e, raised, -1.0)
    chosen, total = [], jnp.float32(0)
    for choice in map(np.int32, range(t)):
      if given:
        at_best = given[0][row, choice]
        best = jnp.sum(jnp.where(real == at_best, raised, 0.0))
      else:
        best = jnp.max(left)
        at_best = jnp.min(jnp.where(left == best, real, width))
      left = jnp.where(real == at_best, -1.0, left)
      chosen.append((at_best, best))
      total += best
    for place, (expert, score) in enumerate(chosen):
      share = score / total if config.norm_topk else score
      ids[row, place] = expert
      scores[row, place] = share
    sound[row] = whole.astype(jnp.int32)
    at, inside = pl.ds(0, dp), jnp.arange(dp, dtype=jnp.int32) < d
    wide = kernels.load(x.at[row, at], inside)
    h = (wide.astype(jnp.float32) * factor).astype(wide.dtype)
    h *= kernels.load(norm.at[at], inside).astype(wide.dtype)
    kernels.store(normed.at[row, at], h, inside)

  ids, weights, sound, normed = kernels.call(
    kernel,
    'choose',
    (n,),
    (
      jax.ShapeDtypeStruct((n, t), jnp.int32),
      jax.ShapeDtypeStruct((n, t), jnp.float32),
      jax.ShapeDtypeStruct((n,), jnp.int32),
      jax.ShapeDtypeStruct((n, d), x_NxD.dtype),
    ),
    (logits_PxNxE, squares_PxN, x_NxD, norm_D, *extra),
    warps=CHOOSE,
  )
  return router.Routing(ids, weights, sound != 0), normed
