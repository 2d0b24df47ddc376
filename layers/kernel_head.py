"""The head and the likeliest token as GPU kernels, and how a row goes on."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kernel_call as kernels
from bevy_jax.layers import kernel_router, kernel_rows, rope

HEAD = 64, 256, 4, 4  # Tokens of a program, columns of a step, warps, stages.
DRAW = 8  # Warps of a program.


class Best(NamedTuple):
  """The likeliest token in each part of the vocabulary.

  Attributes:
    logit: float32 `[parts, N]`.
    token: int32 `[parts, N]`.
    broken: int32 `[parts, N]`, 1 where a logit is not finite.
  """

  logit: jax.Array
  token: jax.Array
  broken: jax.Array


def best(top: dict[str, Any], h_NxD: jax.Array, go_N: jax.Array) -> Best:
  """Of rows behind the final norm; ties go to the lowest token.

  Nothing is written where no row goes on.

  Args:
    top: `embed [V, D]` where embeddings are tied, else `head [D, V]`.
    h_NxD: the rows.
    go_N: int32, 0 for rows that do not come here.
  """
  tied = 'head' not in top
  table = top['embed'] if tied else top['head']
  n, d = h_NxD.shape
  vocabulary = table.shape[0 if tied else 1]
  width, db = HEAD[0], kernels.block(d, HEAD[1])
  lines, parts = kernels.padded(n, kernels.LEAST_ROWS), -(-vocabulary // width)

  def kernel(*refs: Any) -> None:
    x, weights, go, logits, tokens, broken = refs
    part = pl.program_id(0)
    at = pl.ds(part * width, width)
    number = part * width + jnp.arange(width, dtype=jnp.int32)
    real = number < vocabulary

    @pl.when(kernels.anybody(go))
    def _() -> None:
      def step(i: jax.Array, acc: jax.Array) -> jax.Array:
        inner = pl.ds(i * db, db)
        h = kernels.load_rows(x, inner, lines, db)
        if tied:
          mask = jnp.broadcast_to(real[:, None], (width, db))
          return acc + kernels.dot(kernels.load(weights.at[at, inner], mask), h)
        mask = jnp.broadcast_to(real[None, :], (db, width))
        w = kernels.load(weights.at[inner, at], mask)
        return acc + kernels.dot(w, h, first=True)

      start = jnp.zeros((lines, width), jnp.float32)
      made = jax.lax.fori_loop(0, d // db, step, start)
      odd = jnp.where(jnp.abs(made) < jnp.inf, 0, 1)  # Of nan this is 1 too.
      made = jnp.where(real[None, :], made, -jnp.inf)
      most = jnp.max(made, axis=1)
      first = jnp.where(made == most[:, None], number[None, :], vocabulary)
      line = pl.ds(0, lines)
      own = jnp.arange(lines, dtype=jnp.int32) < n
      kernels.store(logits.at[part, line], most, own)
      kernels.store(tokens.at[part, line], jnp.min(first, axis=1), own)
      odd = jnp.max(jnp.where(real[None, :], odd, 0), axis=1)
      kernels.store(broken.at[part, line], odd, own)

  whole = kernels.shape((parts, n), jnp.int32)
  made = kernels.call(
    kernel,
    'head',
    (parts,),
    (kernels.shape((parts, n), jnp.float32), whole, whole),
    (h_NxD, table, go_N),
    warps=HEAD[2],
    stages=HEAD[3],
  )
  return Best(*made)


def draw(
  config: config_lib.ModelConfig,
  top: dict[str, Any],
  norm_LxD: jax.Array,
  found: Best,
  rows: kernel_rows.Rows,
  registers_RxC: jax.Array,
  columns: tuple[int, int],
) -> tuple[kernel_rows.Rows, kernel_router.Drawn, jax.Array]:
  """Rows that go on take their likeliest token and begin with it anew.

  Args:
    config: the model.
    top: `embed [V, D]`.
    norm_LxD: weights of the norms in front of attention.
    found: from `best`.
    rows: with the stream behind the last layer.
    registers_RxC: int32, of all rows; written in place.
    columns: of the token and of its position in the registers.

  Returns:
    The rows in front of the first layer's attention, their tokens, and the
    registers.
  """
  n, lines = rows.x.shape[0], registers_RxC.shape[0]
  angles, stretch = rope.frequencies(config.rope, config.head_dim)

  def kernel(*refs: Any) -> None:
    best_refs, (x, numbers, go, positions, *more) = refs[:3], refs[3:]
    table, norm, turns, _, *outs = more
    i, registers = pl.program_id(0), outs[-1]
    on = (go[i] != 0) & (numbers[i] >= 0) & (numbers[i] < lines)
    token, sound = _likeliest(best_refs, i, on, table.shape[0])
    outs[5][i], outs[6][i] = token, sound
    outs[2][i] = position = positions[i] + on.astype(jnp.int32)
    row, mask = jnp.clip(numbers[i], 0, lines - 1), jnp.full((1, 1), on)
    for column, value in zip(columns, (token, position), strict=True):
      there = registers.at[pl.ds(row, 1), pl.ds(column, 1)]
      kernels.store(there, jnp.full((1, 1), value), mask)
    turn = turns, stretch
    _begin_anew(config, (x, table, norm), turn, outs, (i, token, position, on))

  made = kernels.call(
    kernel,
    'draw',
    (n,),
    _shapes(rows, config.head_dim // 2, registers_RxC),
    (
      *found, rows.x, rows.numbers, rows.go, rows.positions, top['embed'],
      norm_LxD, jnp.asarray(angles), registers_RxC,
    ),
    warps=DRAW,
    aliases={10: 7},
  )  # fmt: skip
  x, h, positions, cos, sin, token, sound, registers = made
  rows = rows._replace(x=x, h=h, positions=positions, cos=cos, sin=sin)
  return rows, kernel_router.Drawn(token, sound), registers


def _begin_anew(
  config: config_lib.ModelConfig,
  refs: tuple[Any, ...],
  turn: tuple[Any, float],
  outs: list[Any],
  row: tuple[jax.Array, ...],
) -> None:
  """Writes the stream of a token, behind its norm too, and its rotation."""
  (x, table, norm), (turns, stretch), (i, token, position, on) = refs, turn, row
  at, inside = kernels.whole(config.model_dim)
  here = inside & jnp.full(inside.shape, on)
  new = kernels.load(table.at[token, at], here).astype(x.dtype)
  new = jnp.where(here, new, kernels.load(x.at[i, at], inside))
  kernels.store(outs[0].at[i, at], new, inside)
  scale = kernels.load(norm.at[np.int32(0), at], inside)
  h = kernels.normed(new, scale, config.model_dim, config.norm_eps)
  kernels.store(outs[1].at[i, at], h, inside)
  some, narrow = kernels.whole(turns.shape[0])
  theta = position.astype(jnp.float32) * kernels.load(turns.at[some], narrow)
  kernels.store(outs[3].at[i, some], jnp.cos(theta) * stretch, narrow)
  kernels.store(outs[4].at[i, some], jnp.sin(theta) * stretch, narrow)


def _shapes(
  rows: kernel_rows.Rows, half: int, registers_RxC: jax.Array
) -> tuple[jax.ShapeDtypeStruct, ...]:
  """In the order of what `draw` makes."""
  n = rows.x.shape[0]
  single = kernels.shape((n,), jnp.int32)
  wide = kernels.shape(rows.x.shape, rows.x.dtype)
  turned = kernels.shape((n, half), jnp.float32)
  kept = kernels.shape(registers_RxC.shape, jnp.int32)
  return wide, wide, single, turned, turned, single, single, kept


def _likeliest(
  refs: Any, row: jax.Array, on: jax.Array, vocabulary: int
) -> tuple[jax.Array, jax.Array]:
  """The token of a row, and 0 where a logit is not finite, else 1."""
  logits, tokens, broken = refs
  part, real = kernels.whole(logits.shape[0])
  seen = real & jnp.full(real.shape, on)
  logit = kernels.load(logits.at[part, row], seen)
  logit = jnp.where(seen, logit, -jnp.inf)
  first = kernels.load(tokens.at[part, row], seen)
  first = jnp.where(seen & (logit == jnp.max(logit)), first, vocabulary)
  odd = jnp.max(kernels.load(broken.at[part, row], seen))
  # Of nan alone there is no likeliest; the row ends here in any case.
  token = jnp.minimum(jnp.min(first), np.int32(vocabulary - 1))
  return token, (odd == 0).astype(jnp.int32)
