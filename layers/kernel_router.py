"""The end of the router as a GPU kernel: choices of a row, kept and told."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kernel_call as kernels
from bevy_jax.layers import kernel_rows

CHOOSE = 8  # Warps of a program.
_FIRST = np.int32(0)
_OUTS = 8  # Fields of `Chosen`.


class Drawn(NamedTuple):
  """Tokens that rows have drawn on their way to a router.

  Attributes:
    token: int32 `[N]`.
    sound: int32 `[N]`, 0 where the head saw what is not finite.
  """

  token: jax.Array
  sound: jax.Array


class Parts(NamedTuple):
  """The router's product in parts, see `kernel_dense.output`.

  Attributes:
    x: `[N, D]`, the stream.
    logits: float32 `[parts, N, E]`.
    squares: float32 `[parts, N]`.
  """

  x: jax.Array
  logits: jax.Array
  squares: jax.Array


class Chosen(NamedTuple):
  """What the router has made of N rows.

  Attributes:
    weights: float32 `[N, T]`, of each choice.
    h: `[N, D]`, the stream behind the norm, for the experts.
    slots: int32 `[N, T]`, where each choice lies; -1 of rows that stop.
    go: int32 `[N]`, 1 for rows that go on: they came here, are sound and
      all their choices may be read.
    answers: int32 `[hops, N, 2 + T]`, token, soundness and ids for the host
      of each hop until here; -1 for rows that did not come so far.
    kept_x: `[R, D]`, the state's stream with these rows.
    kept_ids: int32 `[R, T]`, the state's choices.
    kept_weights: float32 `[R, T]`, and their weights.
  """

  weights: jax.Array
  h: jax.Array
  slots: jax.Array
  go: jax.Array
  answers: jax.Array
  kept_x: jax.Array
  kept_ids: jax.Array
  kept_weights: jax.Array


def choose(
  config: config_lib.ModelConfig,
  p: dict[str, Any],
  place: kernel_rows.Place,
  parts: Parts,
  rows: kernel_rows.Rows,
  drawn: Drawn | None,
  kept: kernel_rows.Kept,
  answers: jax.Array | None = None,
) -> Chosen:
  """As `router.choose`; a program a row; ties go to the lowest id.

  `p` is of all layers, `place` where the rows have come to. The state's arrays
  are written in place, in the rows that came here. Where the layer has recorded
  choices (`forced`) these are weighed instead. `answers` of the hops before,
  as `Chosen` has them, are added to; without them there is this hop alone.
  """
  n, t = rows.slots.shape
  given, told = (p['forced'],) if 'forced' in p else (), drawn or ()
  before = () if answers is None else (answers,)
  first = 10 + len(given) + len(told)
  # Of the state's stream, choices and weights, and of the answers.
  over = {first + i: k for i, k in enumerate([5, 6, 7, *[4 for _ in before]])}

  def kernel(layer: jax.Array, scale: jax.Array, *refs: Any) -> None:
    parted, squares, x, numbers, go, positions, seeds, *more = refs
    control, hop, _, record = more[:4]
    i, nobody = pl.program_id(0), kept.x.shape[0]
    line = _Line(i, numbers[i], go[i] != 0, nobody)
    factor, scores, sound = _scores(config, parted, squares, i)
    record, asked = record if given else None, (seeds[i], positions[i])
    chosen = _best(config, scores, record, layer, *asked)
    token = jnp.int32(-1)
    if told:
      token, whole = refs[first - 2][i], refs[first - 1][i]
      sound &= whole != 0
    weights, normed, slots, going, every, *kept_refs = refs[-_OUTS:]
    # The place is that of the experts behind this router.
    own = hop[_FIRST] - 1 if before else _FIRST
    line.tell(every, own, token, sound, [expert for expert, _ in chosen])
    line.keep(kept_refs[1:], weights, chosen, config.norm_topk)
    found = [place.slot(control, hop, expert) for expert, _ in chosen]
    line.go_on(going, slots, sound, found)
    line.carry(x, kept_refs[0], normed, factor, scale)

  made = kernels.call(
    kernel,
    'choose',
    (n,),
    _shapes(parts, kept, n, t, *(a.shape[0] for a in before)),
    (
      parts.logits, parts.squares, parts.x, rows.numbers, rows.go,
      rows.positions, rows.seeds, *place.operands, p['mlp_norm'],
      *given, *told, *kept[:3], *before,
    ),
    warps=CHOOSE,
    aliases=over,
    early=functools.partial(_early, config, place),
  )  # fmt: skip
  return Chosen(*made)


def _early(
  config: config_lib.ModelConfig, place: kernel_rows.Place, *refs: Any
) -> tuple[jax.Array, jax.Array]:
  """The layer, and the weights of its norm."""
  control, hop, norm = refs[7:10]
  layer = place.layer(control, hop, kernels.constant)
  at, inside = kernels.whole(config.model_dim)
  return layer, kernels.load(norm.at[layer, at], inside)


def _shapes(
  parts: Parts, kept: kernel_rows.Kept, n: int, t: int, hops: int = 1
) -> tuple[jax.ShapeDtypeStruct, ...]:
  """In the order of `Chosen`."""
  return (
    kernels.shape((n, t), jnp.float32),
    kernels.shape(parts.x.shape, parts.x.dtype),
    kernels.shape((n, t), jnp.int32),
    kernels.shape((n,), jnp.int32),
    kernels.shape((hops, n, 2 + t), jnp.int32),
    *(kernels.shape(a.shape, a.dtype) for a in kept[:3]),
  )


class _Line:
  """One row of a launch in the kernel above, and where its results go."""

  def __init__(self, i: jax.Array, number: jax.Array, go: jax.Array, rows: int):
    self._i, self._row = i, jnp.clip(number, 0, rows - 1)
    self._here = go & (number >= 0) & (number < rows)

  def carry(
    self,
    x: Any,
    kept: Any,
    normed: Any,
    factor: jax.Array,
    scale: jax.Array,
  ) -> None:
    """Writes the stream into the state, and behind the norm."""
    at, inside = kernels.whole(x.shape[1])
    wide = kernels.load(x.at[self._i, at], inside)
    kernels.store(kept.at[self._row, at], wide, inside & self._here)
    h = (wide.astype(jnp.float32) * factor).astype(wide.dtype)
    h *= scale.astype(wide.dtype)
    kernels.store(normed.at[self._i, at], h, inside)

  def tell(
    self,
    answers: Any,
    hop: Any,
    token: jax.Array,
    sound: jax.Array,
    ids: list[jax.Array],
  ) -> None:
    """Writes a hop's answer for the host."""
    values = [token, sound.astype(jnp.int32), *ids]
    for place, value in zip(_typed(len(values)), values, strict=True):
      answers[hop, self._i, place] = jnp.where(self._here, value, -1)

  def keep(
    self,
    kept: list[Any],
    weights: Any,
    chosen: list[tuple[jax.Array, jax.Array]],
    norm_topk: bool,
  ) -> None:
    """Writes choices and weights, for the next kernel and into the state."""
    total = sum(score for _, score in chosen)
    mask = jnp.full((1, 1), self._here)
    for place, (expert, score) in enumerate(chosen):
      share = score / total if norm_topk else score
      weights[self._i, np.int32(place)] = share
      there = pl.ds(self._row, 1), pl.ds(place, 1)
      kernels.store(kept[0].at[there], jnp.full((1, 1), expert), mask)
      kernels.store(kept[1].at[there], jnp.full((1, 1), share), mask)

  def go_on(
    self, going: Any, slots: Any, sound: jax.Array, found: list[jax.Array]
  ) -> None:
    """Writes whether the row goes on, and what it reads then."""
    on = self._here & sound
    for slot in found:
      on &= slot >= 0
    going[self._i] = on.astype(jnp.int32)
    for place, slot in zip(_typed(len(found)), found, strict=True):
      slots[self._i, place] = jnp.where(on, slot, -1)


def _scores(
  config: config_lib.ModelConfig, parted: Any, squares: Any, row: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The norm's factor, the softmax over experts, whether all was finite."""
  parts, _, e = parted.shape
  lane, real = kernels.whole(e)
  part, own = kernels.whole(parts)
  square = kernels.load(squares.at[part, row], own)
  factor = jax.lax.rsqrt(jnp.sum(square) / config.model_dim + config.norm_eps)
  both = own[:, None] & real[None, :]
  each = kernels.load(parted.at[part, row, lane], both)
  logits = jnp.sum(each, axis=0) * factor
  broken = jnp.where(jnp.abs(logits) < jnp.inf, 0, 1)  # Of nan this is 1 too.
  whole = jnp.max(jnp.where(real, broken, 0)) == 0
  logits = jnp.where(real, jnp.where(whole, logits, 0.0), -jnp.inf)
  raised = jnp.exp(logits - jnp.max(logits))
  return factor, raised / jnp.sum(raised), whole


def _best(
  config: config_lib.ModelConfig,
  scores: jax.Array,
  record: Any,
  layer: jax.Array,
  seed: jax.Array,
  position: jax.Array,
) -> list[tuple[jax.Array, jax.Array]]:
  """Each choice with its score, best first, or as they are recorded."""
  lane = jnp.arange(scores.shape[0], dtype=jnp.int32)
  left = jnp.where(lane < config.num_experts, scores, -1.0)
  found = []
  for place in _typed(config.top_k):
    if record is not None:
      _, requests, positions, _ = record.shape
      there = layer, seed % requests, position % positions, place
      expert = record[there].astype(jnp.int32)
      score = jnp.sum(jnp.where(lane == expert, scores, 0.0))
    else:
      score = jnp.max(left)
      expert = jnp.min(jnp.where(left == score, lane, scores.shape[0]))
      left = jnp.where(lane == expert, -1.0, left)
    found.append((expert, score))
  return found


def _typed(count: int) -> list[np.int32]:
  """Indices as the interpreter wants them."""
  return [np.int32(i) for i in range(count)]
