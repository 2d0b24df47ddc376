"""Experts of few bits as GPU kernels: widened on their way to the product.

The values of a group go to the tensor cores as small integers, which bfloat16
holds exactly, and the group's scale is applied to the product.
"""

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


def supports(how: quant.Layout) -> bool:
  """Whether groups are whole where two values share a byte."""
  halves = 2 if how.format.kind == 'int4' else 1
  return how.shape[2] // halves % how.format.group == 0


class _Group(NamedTuple):
  """One group of weights for some outputs.

  Attributes:
    values: its integers as bfloat16; of 4 bits, less 8.
    scale: float32, one an output.
    zero: float32, what to take from every value, one an output, or None.
  """

  values: jax.Array
  scale: jax.Array
  zero: jax.Array | None


def gate_up(
  pool: quant.Packed,
  h_NxD: jax.Array,
  slots_NxT: jax.Array,
  place: kernel_rows.Place,
  tile: kernel_tiles.Tile,
) -> jax.Array:
  """As `kernel_experts.gate_up`."""
  n, d = h_NxD.shape
  how, m = pool.layout, place.experts
  f, group = how.shape[1], how.format.group
  halves = 2 if how.format.kind == 'int4' else 1
  rows = kernels.padded(n, kernels.LEAST_ROWS)
  fb, groups = kernels.block(f, tile.outer), d // halves // group
  some = kernels.divisor(groups, max(1, tile.inner // group))

  def kernel(data: Any, x: Any, slots: Any, *refs: Any) -> None:
    control, hop, out = refs
    expert, first = pl.program_id(0), pl.program_id(1) * fb
    slot = place.slot(control, hop, expert)

    @pl.when(kernels.named(slots, slot))
    def _() -> None:
      def one(i: jax.Array, carry: Any) -> Any:
        gate, up = carry
        w_gate = _across(data, how, slot, 0, first, fb, i)
        w_up = _across(data, how, slot, 1, first, fb, i)
        for half in range(halves):
          columns = pl.ds((i + half * groups) * group, group)
          h = kernels.load_rows(x, columns, rows, group)
          gate += _product(h, w_gate[half])
          up += _product(h, w_up[half])
        return gate, up

      def step(j: jax.Array, carry: Any) -> Any:
        for i in range(some):
          carry = one(j * some + i, carry)
        return carry

      zero = jnp.zeros((rows, fb), jnp.float32)
      gate, up = jax.lax.fori_loop(0, groups // some, step, (zero, zero))
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
  d, group = how.shape[2], how.format.group
  halves = 2 if how.format.kind == 'int4' else 1
  rows = kernels.padded(n, kernels.LEAST_ROWS)
  ob, groups = kernels.block(d // halves, tile.outer // halves), f // group
  some = kernels.divisor(groups, max(1, tile.inner // group))

  def kernel(data: Any, hidden: Any, slots: Any, *refs: Any) -> None:
    control, hop, out = refs
    expert, first = pl.program_id(0), pl.program_id(1) * ob
    slot = place.slot(control, hop, expert)

    @pl.when(kernels.named(slots, slot))
    def _() -> None:
      def one(i: jax.Array, acc: Any) -> Any:
        inner = pl.ds(i * group, group)
        h = kernels.load_rows(hidden, inner, rows, group, expert)
        found = _along(data, how, slot, first, ob, i)
        return tuple(
          a + _product(h, g, first=True)
          for a, g in zip(acc, found, strict=True)
        )

      def step(j: jax.Array, acc: Any) -> Any:
        for i in range(some):
          acc = one(j * some + i, acc)
        return acc

      start = (jnp.zeros((rows, ob), jnp.float32),) * halves
      acc = jax.lax.fori_loop(0, groups // some, step, start)
      for half in range(halves):
        at = pl.ds(first + half * d // 2, ob)
        kernels.store_choices(out, slots, slot, at, acc[half])

  out: jax.Array = kernels.call(
    kernel,
    'down_' + how.format.kind,
    (m, d // halves // ob),
    kernels.shape((n, t, d), jnp.float32),
    (pool.data, hidden_MxNxF, slots_NxT, *place.operands),
    warps=tile.warps,
    stages=tile.stages,
  )
  return out


def _product(h: jax.Array, group: _Group, *, first: bool = False) -> jax.Array:
  """A group's part of a product."""
  raw = kernels.dot_rows(h, group.values.astype(h.dtype), first=first)
  if group.zero is not None:
    total = jnp.sum(h.astype(jnp.float32), axis=1)
    raw = raw - total[:, None] * group.zero[None, :]
  return raw * group.scale[None, :]


def _across(
  data: Any,
  how: quant.Layout,
  slot: jax.Array,
  part: int,
  first: Any,
  fb: int,
  i: Any,
) -> list[_Group]:
  """Group i of gate (part 0) or up (1) for outputs `[fb]`; values `[fb, g]`.

  Of 4 bits two groups: i of the lower half of the columns, and of the upper.
  """
  _, f, d = how.shape
  group, groups = how.format.group, d // how.format.group
  halves = 2 if how.format.kind == 'int4' else 1
  stored = d // halves
  lines = part * f + first + jnp.arange(fb, dtype=jnp.int32)
  columns = i * group + jnp.arange(group, dtype=jnp.int32)
  raw = kernels.load(data.at[slot, lines[:, None] * stored + columns[None, :]])
  return [
    _group(data, how, slot, values, lines * groups + i + half * (groups // 2))
    for half, values in enumerate(_values(how, raw))
  ]


def _along(
  data: Any, how: quant.Layout, slot: jax.Array, first: Any, ob: int, i: Any
) -> list[_Group]:
  """Group i of the way down for outputs `[ob]`; values `[g, ob]`.

  Of 4 bits also for outputs of the upper half.
  """
  _, f, d = how.shape
  group = how.format.group
  halves = 2 if how.format.kind == 'int4' else 1
  stored = d // halves
  lines = 2 * f + i * group + jnp.arange(group, dtype=jnp.int32)
  columns = first + jnp.arange(ob, dtype=jnp.int32)
  raw = kernels.load(data.at[slot, lines[:, None] * stored + columns[None, :]])
  base = 2 * f * (d // group) + i * d
  return [
    _group(data, how, slot, values, base + columns + half * (d // 2))
    for half, values in enumerate(_values(how, raw))
  ]


def _values(how: quant.Layout, raw: jax.Array) -> list[jax.Array]:
  """The integers of stored bytes as bfloat16; see `_Group`."""
  if kernels.interpreted():
    if how.format.kind == 'int8':
      whole = [jax.lax.bitcast_convert_type(raw, jnp.int8)]
    else:
      wide = raw.astype(jnp.int8)
      whole = [wide & jnp.int8(15), (wide >> jnp.int8(4)) & jnp.int8(15)]
      whole = [part - jnp.int8(_MIDDLE) for part in whole]
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


def _group(
  data: Any,
  how: quant.Layout,
  slot: jax.Array,
  values: jax.Array,
  index: jax.Array,
) -> _Group:
  """Values with their scales and shifts, which lie at `index` of all groups."""
  at = how.scales.offset + 2 * index
  low = kernels.load(data.at[slot, at]).astype(jnp.uint32)
  high = kernels.load(data.at[slot, at + 1]).astype(jnp.uint32)
  bits = (low << jnp.uint32(16)) | (high << jnp.uint32(24))
  scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
  if how.zeros is None:
    return _Group(values, scale, None)
  # Halves of the whole list share bytes.
  half = how.scales.shape[0] // 2
  upper = index >= half
  at = how.zeros.offset + index - jnp.where(upper, half, 0)
  byte = kernels.load(data.at[slot, at]).astype(jnp.int32)
  zero = jnp.where(upper, byte >> 4, byte & 15) - _MIDDLE
  return _Group(values, scale, zero.astype(jnp.float32))
