"""The end of the router as a GPU kernel: choices of a row, kept and told."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kernel_call as kernels

CHOOSE = 8  # Warps of a program.


class Chosen(NamedTuple):
  """What the router has made of N rows.

  Attributes:
    weights: float32 `[N, T]`, of each choice.
    h: `[N, D]`, the stream behind the norm, for the experts.
    slots: int32 `[N, T]`, where each choice lies; -1 of rows that stop.
    go: int32 `[N]`, 1 for rows that go on: they came here, are sound and
      all their choices may be read.
    answer: int32 `[N, 2 + T]`, token, soundness and ids for the host; -1 for
      rows that did not come here.
    x_R: `[R, D]`, the state's stream with these rows.
    ids_R: int32 `[R, T]`, the state's choices.
    weights_R: float32 `[R, T]`, and their weights.
  """

  weights: jax.Array
  h: jax.Array
  slots: jax.Array
  go: jax.Array
  answer: jax.Array
  x_R: jax.Array
  ids_R: jax.Array
  weights_R: jax.Array


class Came(NamedTuple):
  """N rows at a router.

  Attributes:
    x: `[N, D]`, the stream.
    logits: `[parts, N, E]`, from `kernel_dense.output`.
    squares: `[parts, N]`, likewise.
    rows: int32 `[N]`, rows of the state; out of range where padding.
    go: int32 `[N]`, 0 for rows that have not come here.
    token: int32 `[N]`, drawn on the way here; -1 for none.
    sound: int32 `[N]`, 0 where the head saw what is not finite.
    table: int32 `[E]`, slot of each expert here; -1 where it may not be read.
    given: int32 `[N, T]`, choices to be weighed in place of the best ones, see
      `forced`; None for the best.
  """

  x: jax.Array
  logits: jax.Array
  squares: jax.Array
  rows: jax.Array
  go: jax.Array
  token: jax.Array
  sound: jax.Array
  table: jax.Array
  given: jax.Array | None


def choose(
  config: config_lib.ModelConfig,
  norm_D: jax.Array,
  came: Came,
  x_RxD: jax.Array,
  ids_RxT: jax.Array,
  weights_RxT: jax.Array,
) -> Chosen:
  """As `router.choose`; a program a row; ties go to the lowest id.

  The state's arrays are written in place, in the rows that came here.
  """
  parts, n, e = came.logits.shape
  (r, d), t = x_RxD.shape, config.top_k
  dp = kernels.padded(d)
  given = () if came.given is None else (came.given,)
  first = 9 + len(given)

  def kernel(*refs: Any) -> None:
    parted, squares, rows, go, token, whole, table, x, norm = refs[:9]
    outs = refs[first + 3 :]
    weights, normed, slots, going, answer, x_all, ids_all, weights_all = outs
    i = pl.program_id(0)
    here = (go[i] != 0) & (rows[i] >= 0) & (rows[i] < r)
    row = jnp.clip(rows[i], 0, r - 1)
    factor, raised, finite = _scores(config, parted, squares, i)
    chosen = _best(config, raised, refs[9] if given else None, i)
    total = sum(score for _, score in chosen)
    sound = finite & (whole[i] != 0)
    found, known = [], jnp.int32(1)
    for place, (expert, score) in zip(_typed(t), chosen, strict=True):
      share = score / total if config.norm_topk else score
      slot = table[expert]
      weights[i, place] = share
      found.append(slot)
      answer[i, place + np.int32(2)] = jnp.where(here, expert, -1)
      known = jnp.where(slot >= 0, known, 0)
      lane = pl.ds(row, 1), pl.ds(place, 1)
      mask = jnp.full((1, 1), here)
      kernels.store(ids_all.at[lane], jnp.full((1, 1), expert), mask)
      kernels.store(weights_all.at[lane], jnp.full((1, 1), share), mask)
    answer[i, np.int32(0)] = jnp.where(here, token[i], -1)
    answer[i, np.int32(1)] = jnp.where(here, sound.astype(jnp.int32), -1)
    on = here & sound & (known != 0)
    going[i] = on.astype(jnp.int32)
    for place, slot in zip(_typed(t), found, strict=True):
      slots[i, place] = jnp.where(on, slot, -1)
    at, inside = pl.ds(0, dp), jnp.arange(dp, dtype=jnp.int32) < d
    wide = kernels.load(x.at[i, at], inside)
    kernels.store(x_all.at[row, at], wide, inside & here)
    h = (wide.astype(jnp.float32) * factor).astype(wide.dtype)
    h *= kernels.load(norm.at[at], inside).astype(wide.dtype)
    kernels.store(normed.at[i, at], h, inside)

  operands = (
    came.logits, came.squares, came.rows, came.go, came.token, came.sound,
    came.table, came.x, norm_D, *given, x_RxD, ids_RxT, weights_RxT,
  )  # fmt: skip
  shape = jax.ShapeDtypeStruct
  made = kernels.call(
    kernel,
    'choose',
    (n,),
    (
      shape((n, t), jnp.float32),
      shape((n, d), x_RxD.dtype),
      shape((n, t), jnp.int32),
      shape((n,), jnp.int32),
      shape((n, 2 + t), jnp.int32),
      *(shape(a.shape, a.dtype) for a in (x_RxD, ids_RxT, weights_RxT)),
    ),
    operands,
    warps=CHOOSE,
    aliases={first: 5, first + 1: 6, first + 2: 7},
  )
  return Chosen(*made)


def _scores(
  config: config_lib.ModelConfig, parted: Any, squares: Any, row: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The norm's factor, the softmax over experts, whether all was finite."""
  parts, _, e = parted.shape
  width, pp = kernels.padded(e), kernels.padded(parts)
  real = jnp.arange(width, dtype=jnp.int32) < e
  part = jnp.arange(pp, dtype=jnp.int32) < parts
  square = kernels.load(squares.at[pl.ds(0, pp), row], part)
  factor = jax.lax.rsqrt(jnp.sum(square) / config.model_dim + config.norm_eps)
  both = part[:, None] & real[None, :]
  each = kernels.load(parted.at[pl.ds(0, pp), row, pl.ds(0, width)], both)
  logits = jnp.sum(each, axis=0) * factor
  broken = jnp.where(jnp.abs(logits) < jnp.inf, 0, 1)  # Of nan this is 1 too.
  whole = jnp.max(jnp.where(real, broken, 0)) == 0
  logits = jnp.where(real, jnp.where(whole, logits, 0.0), -jnp.inf)
  raised = jnp.exp(logits - jnp.max(logits))
  return factor, raised / jnp.sum(raised), whole


def _best(
  config: config_lib.ModelConfig, raised: jax.Array, given: Any, row: jax.Array
) -> list[tuple[jax.Array, jax.Array]]:
  """Each choice with its score, best first, or those that are given."""
  width = raised.shape[0]
  lane = jnp.arange(width, dtype=jnp.int32)
  left = jnp.where(lane < config.num_experts, raised, -1.0)
  found = []
  for place in _typed(config.top_k):
    if given is not None:
      expert = given[row, place]
      score = jnp.sum(jnp.where(lane == expert, raised, 0.0))
    else:
      score = jnp.max(left)
      expert = jnp.min(jnp.where(left == score, lane, width))
      left = jnp.where(lane == expert, -1.0, left)
    found.append((expert, score))
  return found


def _typed(count: int) -> list[np.int32]:
  """Indices as the interpreter wants them."""
  return [np.int32(i) for i in range(count)]
