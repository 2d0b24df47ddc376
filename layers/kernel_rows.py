"""A launch's rows, taken out of the state for their experts: a GPU kernel."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kernel_call as kernels
from bevy_jax.layers import rope

AGREE = 'agree'  # The kernel that only rows which go together need.
_FIRST = np.int32(0)
_Read = Callable[[Any, Any], jax.Array]


class Place(NamedTuple):
  """Which layer a kernel is for, and where its experts lie.

  How far a launch has come is data, so that kernels of all its layers are one
  and are compiled once. Kernels read what they need of the control vector
  where it is: to cut it out first would be a kernel of its own.

  Attributes:
    control: int32 `[any]`, the control vector.
    hop: int32 `[1]`, layers behind the launch's first one.
    first: index of the number of the first layer in the control vector.
    tables: index of its first table: the slot of each expert, -1 for one that
      may not be read. Behind the last table that is there it is read again.
    hops: how many tables there are.
    layers: of the model; behind the last one comes the first one.
    experts: E, of a layer.
  """

  control: jax.Array
  hop: jax.Array
  first: int
  tables: int
  hops: int
  layers: int
  experts: int

  @property
  def operands(self) -> tuple[jax.Array, jax.Array]:
    """What a kernel is given to find its place: see `layer` and `slot`."""
    return self.control, self.hop

  def layer(
    self, control: Any, hop: Any, read: _Read = operator.getitem
  ) -> jax.Array:
    """The layer's number; arrays or refs of `operands`."""
    here = read(control, self.first) + read(hop, _FIRST)
    out: jax.Array = jax.lax.rem(here, np.int32(self.layers))
    return out

  def slot(self, control: Any, hop: Any, expert: jax.Array) -> jax.Array:
    """Where an expert lies; arrays or refs of `operands`."""
    table = jnp.minimum(hop[_FIRST], np.int32(self.hops - 1))
    start = np.int32(self.tables) + table * np.int32(self.experts)
    out: jax.Array = control[start + expert]
    return out


def listed(place: Place, slots_NxT: jax.Array) -> int:
  """M, how many experts the programs of a kernel go through.

  All of a layer, or all choices where they are fewer: a program that finds
  nothing to do takes its time as well.
  """
  return min(slots_NxT.size, place.experts)


def expert(
  place: Place, slots: Any, control: Any, hop: Any, number: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Where one of the `listed` experts lies, and whether anybody chose it.

  An expert that several rows have chosen is listed as their first choice.
  """
  n, t = slots.shape
  if n * t >= place.experts:
    slot = place.slot(control, hop, number)
    return slot, kernels.named(slots, slot)
  width = np.int32(t)
  slot = slots[jax.lax.div(number, width), jax.lax.rem(number, width)]
  return slot, ~kernels.named(slots, slot, number) & (slot >= 0)


class Rows(NamedTuple):
  """N rows of a launch at a layer whose experts come next.

  Attributes:
    numbers: int32 `[N]`, rows of the state; R and above are padding.
    x: `[N, D]`, the stream.
    h: `[N, D]`, the same behind the experts' norm.
    slots: int32 `[N, T]`, where each choice lies; -1 where it is not read.
    weights: float32 `[N, T]`, of each choice.
    go: int32 `[N]`, 0 for rows that are padding or have stopped.
    positions: int32 `[N]`, of the token that the rows are at.
    seeds: int32 `[N]`, of the requests.
    cos: float32 `[N, dh / 2]`, of the rotation at the position.
    sin: likewise.
  """

  numbers: jax.Array
  x: jax.Array
  h: jax.Array
  slots: jax.Array
  weights: jax.Array
  go: jax.Array
  positions: jax.Array
  seeds: jax.Array
  cos: jax.Array
  sin: jax.Array


class Kept(NamedTuple):
  """What the state keeps of R rows; see `Rows`.

  Attributes:
    x: `[R, D]`.
    ids: int32 `[R, T]`, choices.
    weights: float32 `[R, T]`.
    registers: int32 `[R, any]`.
  """

  x: jax.Array
  ids: jax.Array
  weights: jax.Array
  registers: jax.Array


def take(
  config: config_lib.ModelConfig,
  norm_LxD: jax.Array,
  count: int,
  first: int,
  place: Place,
  kept: Kept,
  columns: tuple[int, int],
) -> Rows:
  """The rows of a launch; a program each.

  Args:
    config: the model.
    norm_LxD: weights of the experts' norms.
    count: N.
    first: index of the first row number in the control vector.
    place: where they are.
    kept: all rows.
    columns: of the position and of the seed in the registers.
  """
  (r, d), t = kept.x.shape, config.top_k
  half = config.head_dim // 2
  angles, stretch = rope.frequencies(config.rope, config.head_dim)
  where, seed = (np.int32(column) for column in columns)

  def kernel(*refs: Any) -> None:
    control, hop, x, ids, weights, registers, norm, turns, *outs = refs
    numbers, out_x, out_h, slots, scores, go, positions, seeds, *turned = outs
    i = pl.program_id(0)
    number, own = control[first + i], place.layer(control, hop)
    real = (number >= 0) & (number < r)
    row = jnp.clip(number, 0, r - 1)
    numbers[i], go[i] = number, real.astype(jnp.int32)
    positions[i], seeds[i] = registers[row, where], registers[row, seed]
    for choice in map(np.int32, range(t)):
      slot = place.slot(control, hop, ids[row, choice])
      slots[i, choice] = jnp.where(real, slot, -1)
      scores[i, choice] = weights[row, choice]
    at, inside = kernels.whole(d)
    stream = kernels.load(x.at[row, at], inside)
    kernels.store(out_x.at[i, at], stream, inside)
    h = kernels.normed(
      stream, kernels.load(norm.at[own, at], inside), d, config.norm_eps
    )
    kernels.store(out_h.at[i, at], h, inside)
    some, narrow = kernels.whole(half)
    position = registers[row, where].astype(jnp.float32)
    theta = position * kernels.load(turns.at[some], narrow)
    kernels.store(turned[0].at[i, some], jnp.cos(theta) * stretch, narrow)
    kernels.store(turned[1].at[i, some], jnp.sin(theta) * stretch, narrow)

  operands = (*place.operands, *kept, norm_LxD, jnp.asarray(angles))
  made = kernels.call(
    kernel, 'take', (count,), _shapes(kept, count, t, half), operands, warps=8
  )
  return Rows(*made)


def agree(rows: Rows, nobody: int, together: int, place: Place) -> Rows:
  """Rows that go on, or none where they go together or not at all.

  `go` and `slots` are written over: where rows do not go together a launch is
  the same without this kernel.

  Args:
    rows: at a router that they have come to.
    nobody: R, numbers from there on are padding.
    together: index in the control vector of whether they go together.
    place: of that layer.
  """
  n, t = rows.slots.shape

  def kernel(*refs: Any) -> None:
    go, slots, numbers, control, _, going, reads = refs
    at, real = kernels.whole(n)
    choice, own = kernels.whole(t)
    on = kernels.load(go.at[at], real)
    number = kernels.load(numbers.at[at], real)
    stops = real & (on == 0) & (number >= 0) & (number < nobody)
    parted = jnp.max(jnp.where(stops, 1, 0)) > 0
    on = jnp.where(parted & (control[together] > 0), 0, on)
    kernels.store(going.at[at], on, real)
    both = real[:, None] & own[None, :]
    found = kernels.load(slots.at[at, choice], both)
    found = jnp.where(on[:, None] > 0, found, -1)
    kernels.store(reads.at[at, choice], found, both)

  made = kernels.call(
    kernel,
    AGREE,
    (1,),
    (kernels.shape((n,), jnp.int32), kernels.shape((n, t), jnp.int32)),
    (rows.go, rows.slots, rows.numbers, *place.operands),
    warps=1,
    aliases={0: 0, 1: 1},
    early=lambda *refs: (),
  )
  return rows._replace(go=made[0], slots=made[1])


def _shapes(
  kept: Kept, n: int, t: int, half: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
  """In the order of `Rows`."""
  single = kernels.shape((n,), jnp.int32)
  wide = kernels.shape((n, kept.x.shape[1]), kept.x.dtype)
  slots = kernels.shape((n, t), jnp.int32)
  weights = kernels.shape((n, t), jnp.float32)
  turn = kernels.shape((n, half), jnp.float32)
  return (
    single, wide, wide, slots, weights, single, single, single, turn, turn,
  )  # fmt: skip
