"""Experts of few bits as GPU kernels: widened on their way to the product.

A step takes several groups of a line at once. Their values become small
integers, which bfloat16 holds exactly, and these times their scales, rounded to
the type of the stream as the plain form rounds them, go to the tensor cores.
Scales are loaded a step ahead: few bytes, but each step would wait for them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from bevy_jax.layers import kernel_call as kernels
from bevy_jax.layers import kernel_rows, kernel_tiles, quant

_MIDDLE = 8  # The zero point of a symmetric 4-bit group.
# Four bytes become four values, two to a register. They are spread to 16 bits,
# one operation puts a value behind the bits of 128, another takes from it what
# it should not have: 136 of a 4-bit value, which leaves value - 8; of a signed
# byte 128, and 256 where its sign bit is set.
_SPREAD = 'prmt.b32 a, $2, 0, 0x4140;\nprmt.b32 b, $2, 0, 0x4342;\n'
_UPPER = 'shr.u32 a, a, 4;\nshr.u32 b, b, 4;\n'
_NIBBLE = """lop3.b32 a, a, 0x000f000f, 0x43004300, 0xEA;
lop3.b32 b, b, 0x000f000f, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, a, one, less;
fma.rn.bf16x2 $1, b, one, less;
"""
_BYTE = """lop3.b32 c, a, 0x00800080, 0xC300C300, 0xEA;
lop3.b32 d, b, 0x00800080, 0xC300C300, 0xEA;
lop3.b32 a, a, 0x007f007f, 0x43004300, 0xEA;
lop3.b32 b, b, 0x007f007f, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, a, one, c;
fma.rn.bf16x2 $1, b, one, d;
"""
_HEAD = """.reg .b32 a, b, c, d, one, less;
mov.b32 one, 0x3f803f80;
mov.b32 less, 0xC308C308;
"""
_CUTS = {
  'int8': (_SPREAD + _BYTE,),
  'int4': (_SPREAD + _NIBBLE, _SPREAD + _UPPER + _NIBBLE),
}

# Bytes of scales, and of zero points where there are some, of each half.
_Told = tuple[tuple[jax.Array, ...], ...]


def supports(how: quant.Layout) -> bool:
  """Whether groups are whole where two values share a byte."""
  sides = [side // _halves(how) for side in how.shape[1:]]
  return not any(side % how.format.group for side in sides)


def gate_up(
  pool: quant.Packed,
  h_NxD: jax.Array,
  slots_NxT: jax.Array,
  place: kernel_rows.Place,
  tile: kernel_tiles.Tile,
) -> jax.Array:
  """As `kernel_experts.gate_up`."""
  n, d = h_NxD.shape
  how, m = pool.layout, kernel_rows.listed(place, slots_NxT)
  f = how.shape[1]
  rows, fb = kernels.padded(n, kernels.LEAST_ROWS), kernels.block(f, tile.outer)

  def kernel(data: Any, x: Any, slots: Any, *refs: Any) -> None:
    control, hop, out = refs
    expert, first = pl.program_id(0), pl.program_id(1) * fb
    slot, named = kernel_rows.expert(place, slots, control, hop, expert)

    @pl.when(named)
    def _() -> None:
      def given(column: Any, width: int) -> jax.Array:
        return kernels.load_some(x, column, rows, width)

      parts = [_Lines(data, how, slot, first, fb, i * f * d, d) for i in (0, 1)]
      gate, up = _products(parts, given, rows, x.dtype, tile.inner)
      at = pl.ds(first, fb)
      kernels.store_rows(out, at, kernels.swiglu(gate, up), expert)

  out: jax.Array = kernels.call(
    kernel,
    'gate_up_' + how.format.kind,
    (m, f // fb),
    kernels.shape((m, n, f), h_NxD.dtype),
    (pool.data, h_NxD, slots_NxT, *place.operands),
    warps=tile.warps,
    stages=tile.stages,
  )
  return out


def down(
  pool: quant.Packed,
  hidden_MxNxF: jax.Array,
  slots_NxT: jax.Array,
  place: kernel_rows.Place,
  tile: kernel_tiles.Tile,
) -> jax.Array:
  """As `kernel_experts.down`."""
  m, n, f = hidden_MxNxF.shape
  how, t = pool.layout, slots_NxT.shape[1]
  d = how.shape[2]
  rows, ob = kernels.padded(n, kernels.LEAST_ROWS), kernels.block(d, tile.outer)

  def kernel(data: Any, hidden: Any, slots: Any, *refs: Any) -> None:
    control, hop, out = refs
    expert, first = pl.program_id(0), pl.program_id(1) * ob
    slot, named = kernel_rows.expert(place, slots, control, hop, expert)

    @pl.when(named)
    def _() -> None:
      def given(column: Any, width: int) -> jax.Array:
        return kernels.load_some(hidden, column, rows, width, expert)

      part = _Lines(data, how, slot, first, ob, 2 * f * d, f)
      (made,) = _products([part], given, rows, hidden.dtype, tile.inner)
      kernels.store_choices(out, slots, slot, pl.ds(first, ob), made)

  out: jax.Array = kernels.call(
    kernel,
    'down_' + how.format.kind,
    (m, d // ob),
    kernels.shape((n, t, d), jnp.float32),
    (pool.data, hidden_MxNxF, slots_NxT, *place.operands),
    warps=tile.warps,
    stages=tile.stages,
  )
  return out


class _Lines(NamedTuple):
  """Some outputs of one matrix of an expert, each a line of weights.

  Attributes:
    data: the pool's.
    how: what lies in a slot.
    slot: that is read.
    first: the first output.
    outputs: how many.
    start: of the matrix, in weights.
    length: of a line.
  """

  data: Any
  how: quant.Layout
  slot: jax.Array
  first: Any
  outputs: int
  start: int
  length: int

  @property
  def groups(self) -> int:
    """Of a line; where two values share a byte, of half of it."""
    return self.length // _halves(self.how) // self.how.format.group

  def told(self, group: jax.Array) -> _Told:
    """What some groups' scales are made of, `[outputs, G]` each.

    Args:
      group: int32 `[G]`; there may be none behind the last one.
    """
    how = self.how
    real = (group < self.groups)[None, :]
    real = jnp.broadcast_to(real, (self.outputs, len(group)))
    found = []
    for half in range(_halves(how)):
      index = self._index(group, half)
      at = [how.scales.offset + 2 * index + i for i in (0, 1)]
      if how.zeros is not None:
        # Halves of the whole list share bytes.
        at.append(how.zeros.offset + index % (how.scales.shape[0] // 2))
      found.append(
        tuple(kernels.load(self.data.at[self.slot, a], real) for a in at)
      )
    return tuple(found)

  def weights(
    self, group: jax.Array, told: _Told, dtype: jnp.dtype
  ) -> list[jax.Array]:
    """Weights `[outputs, columns]` of some groups, of each half of a line.

    They are 0 behind the last group.
    """
    how, halves, size = self.how, _halves(self.how), self.how.format.group
    # Whole numbers of bytes, or loads would be of one byte each.
    line = self.start // halves + self._lines() * (self.length // halves)
    at = line[:, None] + group[None, :] * size
    inner = jnp.arange(size, dtype=jnp.int32)
    at = at[:, :, None] + inner[None, None, :]
    real = None
    if self.groups % len(group):
      real = jnp.broadcast_to((group < self.groups)[None, :, None], at.shape)
    raw = kernels.load(self.data.at[self.slot, at], real)
    exact = dtype if dtype == jnp.bfloat16 else jnp.float32
    found = []
    for half, values in enumerate(_values(how, raw)):
      scale, zero = self._scale(told[half], group, half)
      if zero is not None:
        values = values - zero.astype(values.dtype)[:, :, None]
      made = values.astype(exact) * scale.astype(exact)[:, :, None]
      found.append(made.astype(dtype).reshape(self.outputs, -1))
    return found

  def _lines(self) -> jax.Array:
    lines: jax.Array = self.first + jnp.arange(self.outputs, dtype=jnp.int32)
    return lines

  def _index(self, group: jax.Array, half: int) -> jax.Array:
    """Which of all groups some of each line are, `[outputs, G]`."""
    first = self.start // self.how.format.group
    line = first + self._lines() * self.groups * _halves(self.how)
    index: jax.Array = line[:, None] + group[None, :] + half * self.groups
    return index

  def _scale(
    self, told: tuple[jax.Array, ...], group: jax.Array, half: int
  ) -> tuple[jax.Array, jax.Array | None]:
    """Scales and, less what `_values` is less by, zero points of a half."""
    low, high, *byte = (part.astype(jnp.uint32) for part in told)
    bits = (low << jnp.uint32(16)) | (high << jnp.uint32(24))
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    if not byte:
      return scale, None
    upper = self._index(group, half) >= self.how.scales.shape[0] // 2
    zero = jnp.where(upper, byte[0] >> 4, byte[0] & 15).astype(jnp.int32)
    return scale, zero - _MIDDLE


def _products(
  parts: Sequence[_Lines],
  given: Callable[[Any, int], jax.Array],
  rows: int,
  dtype: jnp.dtype,
  inner: int,
) -> list[jax.Array]:
  """What rows become by some outputs of matrices, float32 `[rows, outputs]`.

  Args:
    parts: the matrices.
    given: so many columns of the rows from one on, 0 behind the last one.
    rows: how many.
    dtype: of the product.
    inner: bytes of a line that a step takes.
  """
  how, groups = parts[0].how, parts[0].groups
  size = how.format.group
  some = max(1, inner // size)

  def step(j: jax.Array, carry: Any) -> Any:
    sums, told = carry
    at = j * some + jnp.arange(some, dtype=jnp.int32)
    ahead = [part.told(at + some) for part in parts]
    made = [
      part.weights(at, what, dtype)
      for part, what in zip(parts, told, strict=True)
    ]
    for half in range(_halves(how)):
      h = given((j * some + half * groups) * size, some * size)
      sums = [
        total + kernels.dot_rows(h, weights[half])
        for total, weights in zip(sums, made, strict=True)
      ]
    return sums, ahead

  zeros = [jnp.zeros((rows, part.outputs), jnp.float32) for part in parts]
  first = jnp.arange(some, dtype=jnp.int32)
  start = zeros, [part.told(first) for part in parts]
  found: list[jax.Array]
  found, _ = jax.lax.fori_loop(0, pl.cdiv(groups, some), step, start)
  return found


def _values(how: quant.Layout, raw: jax.Array) -> list[jax.Array]:
  """The integers of stored bytes, as bfloat16, by half; of 4 bits less 8."""
  if kernels.interpreted():
    if how.format.kind == 'int8':
      whole = [jax.lax.bitcast_convert_type(raw, jnp.int8)]
    else:
      wide = raw.astype(jnp.int16)
      whole = [(part & 15) - _MIDDLE for part in (wide, wide >> 4)]
    return [part.astype(jnp.bfloat16) for part in whole]
  kind = kernels.shape(raw.shape, jnp.bfloat16)
  found = [
    plgpu.elementwise_inline_asm(
      '{\n' + _HEAD + cut + '}',
      args=[raw],
      constraints='=r,=r,r',
      pack=4,
      result_shape_dtypes=[kind],
    )
    for cut in _CUTS[how.format.kind]
  ]
  return [part[0] for part in found]


def _halves(how: quant.Layout) -> int:
  """Values that share a byte: of both halves of a line."""
  return 2 if how.format.kind == 'int4' else 1
