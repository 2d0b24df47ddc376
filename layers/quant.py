"""Quantised experts: how one is packed into bytes and read from them.

A block is one run of bytes: the values of gate and up, each `[F, D]`, and of
down, `[D, F]`, then one bfloat16 scale a group, then one 4-bit zero point a
group where the format has them. So each line belongs to one output, groups lie
along it, as a product sums, and whoever reads a line reads one run of bytes. A
weight is `(value - zero) * scale`, which float32 holds exactly.

Two 4-bit values share a byte: column j of a line with the one half a line
behind it, the former in the low half; zero points likewise, halves of their
whole list.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

ORDER = 2  # Of the bytes of a block; in 1 lines of down were inputs.
GROUPS = (32, 64, 128)
_BITS = {'int8': 8, 'int4': 4}
_MIDDLE = 8  # The zero point of a symmetric 4-bit group.
# Smaller scales would be flushed to zero by some devices.
_LEAST = 2.0**-126
_BF16: np.dtype[Any] = np.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
  """How weights become small integers.

  Attributes:
    kind: 'int8' or 'int4'.
    group: 32, 64 or 128 weights share a scale.
    zero_point: whether a group also has a zero point; 'int4' only.
  """

  kind: str
  group: int = 32
  zero_point: bool = False

  def __post_init__(self) -> None:
    if self.kind not in _BITS:
      raise ValueError(
        f'experts cannot be stored as {self.kind!r}; quantised they are one '
        f'of {list(_BITS)}.'
      )
    if isinstance(self.group, bool) or self.group not in GROUPS:
      raise ValueError(
        f'the group of {self.kind} is {self.group!r}; one scale serves '
        f'{GROUPS[0]}, {GROUPS[1]} or {GROUPS[2]} weights.'
      )
    if not isinstance(self.zero_point, bool):
      raise ValueError(f'zero_point is {self.zero_point!r}, not true or false.')
    if self.zero_point and self.kind != 'int4':
      raise ValueError(
        f'{self.kind} has no zero points; they are an option of int4.'
      )

  @property
  def name(self) -> str:
    """As `parse` reads it, for instance 'int4:32:zero'."""
    return f'{self.kind}:{self.group}' + ':zero' * self.zero_point


class Part(NamedTuple):
  """Where one kind of numbers lies in a block.

  Attributes:
    offset: its first byte.
    shape: in elements of `dtype`.
    dtype: name of what is stored.
  """

  offset: int
  shape: tuple[int, ...]
  dtype: str

  @property
  def end(self) -> int:
    """The byte behind it."""
    return self.offset + math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Layout:
  """A format applied to one shape of expert.

  Attributes:
    format: what is stored.
    shape: of the expert, `(3, F, D)`.
    values: int8 or uint8, `[2, F, D]` and then `[D, F]`; of 4 bits half of
      each line.
    scales: bfloat16, first `[2, F, D / group]`, then `[D, F / group]`.
    zeros: uint8, half as many as scales; None without zero points.
  """

  format: Format
  shape: tuple[int, int, int]
  values: Part
  scales: Part
  zeros: Part | None

  @property
  def nbytes(self) -> int:
    """Bytes of a block, scales and zero points included."""
    return (self.zeros or self.scales).end


class Packed(flax.struct.PyTreeNode):
  """A pool of packed experts.

  Attributes:
    data: uint8 `[slots, layout.nbytes]`.
    layout: what lies in a slot; static.
  """

  data: jax.Array
  layout: Layout = flax.struct.field(pytree_node=False)


def parse(text: str) -> Format:
  """The format of 'int8', 'int4:64', 'int4:32:zero'; ValueError otherwise."""
  kind, *rest = text.split(':')
  zero = rest[1:] == ['zero']
  if len(rest) > 1 + zero or not (rest[:1] or ['32'])[0].isdigit():
    raise ValueError(
      f'{text!r} is no format of experts; write int8 or int4, then where '
      'wanted a group and zero points, such as int4:64 or int4:32:zero.'
    )
  return Format(
    kind=kind, group=int(rest[0]) if rest else GROUPS[0], zero_point=zero
  )


def layout(form: Format, shape: tuple[int, int, int]) -> Layout:
  """Where everything lies in a block.

  Raises:
    ValueError: a side of the experts is no multiple of the group.
  """
  three, f, d = shape
  for name, side in (('hidden width F', f), ('model width D', d)):
    if side < 1 or side % form.group:
      fit = [g for g in GROUPS if f % g == 0 and d % g == 0]
      hint = (
        f'take a group of {" or ".join(map(str, fit))}.'
        if fit
        else f'no group of {GROUPS} divides F = {f} and D = {d}; store these '
        'experts as bf16, f16 or f32.'
      )
      raise ValueError(
        f'{form.name} needs a {name} that {form.group} divides, and it is '
        f'{side}: {hint}'
      )
  if form.kind == 'int8':
    values = Part(0, (three * f * d,), 'int8')
  else:
    values = Part(0, (three * f * d // 2,), 'uint8')
  groups = three * f * d // form.group
  scales = Part(values.end, (groups,), 'bfloat16')
  zeros = Part(scales.end, (groups // 2,), 'uint8') if form.zero_point else None
  return Layout(form, shape, values, scales, zeros)


def pack(how: Layout, weights: np.ndarray) -> np.ndarray:
  """One expert `[3, F, D]` of floats as uint8 `[nbytes]`.

  No weight moves by more than half its scale. Scales are rounded up to
  bfloat16 first, so that the largest weight of a group is in range.

  Raises:
    ValueError: a weight is not finite.
  """
  wide = np.asarray(weights).astype(np.float32)
  assert wide.shape == how.shape, (wide.shape, how.shape)
  if not np.isfinite(wide).all():
    raise ValueError(
      f'{int((~np.isfinite(wide)).sum())} of its weights are not finite and '
      f'cannot be stored as {how.format.name}. The file is broken, or was '
      'saved in a type too narrow for the model.'
    )
  _, f, d = how.shape
  lines = [wide[:2].reshape(2 * f, d), wide[2].T]
  rows = np.concatenate([x.reshape(-1, how.format.group) for x in lines])
  low, high = (
    np.minimum(rows.min(axis=1), 0).astype(np.float64),
    np.maximum(rows.max(axis=1), 0).astype(np.float64),
  )
  scale, zero, least, most = _grid(how.format, low, high)
  steps = np.rint(rows / scale.astype(np.float32)[:, None]) + zero[:, None]
  whole = np.clip(steps, least, most).reshape(-1)
  out = np.empty(how.nbytes, np.uint8)
  if how.format.kind == 'int8':
    out[: how.values.end] = whole.astype(np.int8).view(np.uint8)
  else:
    gate_up, down = np.split(whole.astype(np.uint8), [2 * f * d])
    halves = _join(gate_up.reshape(-1, d)), _join(down.reshape(-1, f))
    out[: how.values.end] = np.concatenate([x.reshape(-1) for x in halves])
  out[how.scales.offset : how.scales.end] = scale.view(np.uint8)
  if how.zeros is not None:
    out[how.zeros.offset :] = _join(zero.astype(np.uint8))
  return out


def unpack(how: Layout, block: jax.Array) -> jax.Array:
  """The float32 expert `[3, F, D]` of one block, uint8 `[nbytes]`."""
  _, f, d = how.shape
  raw = block[: how.values.end]
  pairs = block[how.scales.offset : how.scales.end].reshape(-1, 2)
  scales = jax.lax.bitcast_convert_type(pairs, jnp.bfloat16)
  zeros = None
  if how.zeros is not None:
    zeros = _split(block[how.zeros.offset : how.zeros.end]).astype(jnp.int8)
  cut, count = len(raw) // 3 * 2, len(scales) // 3 * 2
  found = []
  for values, some, lines in (
    (raw[:cut], slice(None, count), 2 * f),
    (raw[cut:], slice(count, None), d),
  ):
    values = values.reshape(lines, -1)
    if how.format.kind == 'int8':
      whole = jax.lax.bitcast_convert_type(values, jnp.int8)
    else:
      whole = _split(values).astype(jnp.int8)
    whole = whole.reshape(-1, how.format.group)
    if zeros is not None:
      whole = whole - zeros[some, None]
    elif how.format.kind == 'int4':
      whole = whole - jnp.int8(_MIDDLE)
    wide = whole.astype(jnp.float32) * scales[some, None].astype(jnp.float32)
    found.append(wide.reshape(lines, -1))
  return jnp.concatenate([found[0].reshape(2, f, d), found[1].T[None]])


def _grid(
  form: Format, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int, int]:
  """A scale and a zero point a group; the least and the largest value.

  `low` and `high` are float64 bounds of each group, 0 between them.
  """
  if form.kind == 'int8':
    scale = _bf16_up(np.maximum(-low, high) / 127)
    return scale, np.zeros(low.shape, np.float32), -127, 127
  if not form.zero_point:
    scale = _bf16_up(np.maximum(-low / _MIDDLE, high / (15 - _MIDDLE)))
    return scale, np.full(low.shape, _MIDDLE, np.float32), 0, 15
  scale = _bf16_up((high - low) / 15)
  zero = np.rint(-low / scale.astype(np.float64))
  return scale, np.clip(zero, 0, 15).astype(np.float32), 0, 15


def _bf16_up(x: np.ndarray) -> np.ndarray:
  """The least normal bfloat16 numbers that are not below `x >= 0`."""
  x = np.maximum(x, _LEAST)
  near = x.astype(_BF16)
  bits = near.view(np.uint16) + (near.astype(np.float64) < x)
  return bits.astype(np.uint16).view(_BF16)


def _join(values: np.ndarray) -> np.ndarray:
  """Halves of the last axis, uint8 below 16, as the halves of bytes."""
  low, high = np.split(values, 2, axis=-1)
  joined: np.ndarray = low | high << 4
  return joined


def _split(raw: jax.Array) -> jax.Array:
  """The inverse of `_join`."""
  return jnp.concatenate([raw & jnp.uint8(15), raw >> jnp.uint8(4)], axis=-1)
