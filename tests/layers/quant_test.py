"""Packed experts: every byte, the bound on the error, what is refused."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from bevy_jax.layers import experts, quant

F, D = 64, 128
SHAPE = (3, F, D)
FORMATS = tuple(
  quant.parse(f'{kind}:{group}{zero}')
  for kind, group, zero in itertools.product(
    ('int8', 'int4'), (32, 64), ('', ':zero')
  )
  if kind == 'int4' or not zero
)
_unpack = jax.jit(quant.unpack, static_argnums=0)


def _layout(form: quant.Format, shape: tuple[int, int, int] = SHAPE):
  return quant.layout(form, shape)


def _weights(seed: int = 0, shape: tuple[int, int, int] = SHAPE) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.standard_normal(shape).astype(np.float32)


def _plain(how: quant.Layout, block: np.ndarray) -> np.ndarray:
  """Read as the module's docstring says, number by number."""
  group = how.format.group
  count = 3 * F * D // group
  narrow = how.format.kind == 'int4'
  size = 3 * F * D // (2 if narrow else 1)
  cut = 2 * size // 3
  raw = [*block[:cut].reshape(2, F, -1), block[cut:size].reshape(D, -1)]
  scales = block[size : size + 2 * count].copy().view(ml_dtypes.bfloat16)
  zeros = block[size + 2 * count :]
  out = np.empty(SHAPE, np.float32)
  for part, f, d in np.ndindex(*SHAPE):
    line, column, length = (f, d, D) if part < 2 else (d, f, F)
    which = (part * F * D + line * length + column) // group
    zero = 8 if narrow else 0
    if how.format.zero_point:
      byte = int(zeros[which % (count // 2)])
      zero = byte & 15 if which < count // 2 else byte >> 4
    half = length // 2
    byte = int(raw[part][line, column % half if narrow else column])
    if narrow:
      value = byte & 15 if column < half else byte >> 4
    else:
      value = byte - 256 * (byte > 127)
    out[part, f, d] = np.float32(value - zero) * np.float32(scales[which])
  return out


def _scale_of_each(how: quant.Layout, block: np.ndarray) -> np.ndarray:
  """The scale of every weight, `[3, F, D]`."""
  group = how.format.group
  raw = block[how.scales.offset : how.scales.end].copy()
  scales = raw.view(ml_dtypes.bfloat16).astype(np.float32)
  cut = 2 * F * D // group
  gate_up = np.repeat(scales[:cut].reshape(2, F, -1), group, axis=2)
  down = np.repeat(scales[cut:].reshape(D, -1), group, axis=1)
  return np.concatenate([gate_up, down.T[None]])


class PackTest(parameterized.TestCase):
  @parameterized.parameters(*FORMATS)
  def test_read_as_documented(self, form: quant.Format):
    how = _layout(form)
    block = quant.pack(how, _weights())
    self.assertEqual(block.shape, (how.nbytes,))
    np.testing.assert_array_equal(_unpack(how, block), _plain(how, block))

  @parameterized.parameters(*FORMATS)
  def test_no_weight_moves_by_more_than_half_a_scale(self, form: quant.Format):
    how = _layout(form)
    for seed, spread in enumerate((1e-3, 1, 50)):
      weights = _weights(seed) * spread + spread * (seed - 1)
      block = quant.pack(how, weights)
      error = np.abs(np.asarray(_unpack(how, block)) - weights)
      scales = _scale_of_each(how, block)
      self.assertLessEqual(float((error / scales).max()), 0.5 + 1e-4)
      # And scales are no larger than the weights ask for: bfloat16 has
      # eight bits, and 4-bit groups reach 7 or 8 steps to a side.
      least = {'int8': 127, 'int4': 7.5 if form.zero_point else 7}[form.kind]
      self.assertLess(scales.max(), np.abs(weights).max() / least * 1.008)

  @parameterized.parameters(
    ('int8', 1 + 2 / 32),
    ('int8:128', 1 + 2 / 128),
    ('int4', 0.5 + 2 / 32),
    ('int4:64:zero', 0.5 + 2.5 / 64),
  )
  def test_bytes(self, name: str, each: float):
    how = quant.layout(quant.parse(name), (3, 128, 256))
    self.assertEqual(how.nbytes, each * 3 * 128 * 256)

  def test_every_pair_of_nibbles(self):
    """All 256 bytes: with a scale of 1 the values come back exactly."""
    how = quant.layout(quant.parse('int4:32:zero'), (3, 32, 512))
    pairs = np.arange(256).reshape(1, 256)
    row = np.concatenate([pairs & 15, pairs >> 4], axis=1)
    gate_up = np.broadcast_to(row, (2, 32, 512))
    pairs = pairs.reshape(16, 16)  # Half of each of 16 lines.
    line = np.concatenate([pairs & 15, pairs >> 4], axis=1)
    down = np.tile(line, (32, 1)).T[None]
    whole = np.concatenate([gate_up, down]).astype(np.uint8)
    block = np.zeros(how.nbytes, np.uint8)
    block[: how.values.end].reshape(3, 32, 256)[:] = np.arange(256)
    ones = np.ones(how.scales.shape, ml_dtypes.bfloat16)
    block[how.scales.offset : how.scales.end] = ones.view(np.uint8)
    for zero in range(16):
      block[how.zeros.offset :] = zero * 17
      got = np.asarray(_unpack(how, block))
      np.testing.assert_array_equal(got, whole.astype(np.float32) - zero)

  @parameterized.parameters('int8', 'int4', 'int4:32:zero')
  def test_numbers_on_the_grid_come_back_exactly(self, name: str):
    how = _layout(quant.parse(name))
    low, high = {'int8': (-127, 127)}.get(name, (-8, 7))
    rng = np.random.default_rng(0)
    weights = rng.integers(low, high, SHAPE, endpoint=True).astype(np.float32)
    # Both ends in every group, so that the scale is 1.
    weights[:2, :, ::32], weights[:2, :, 1::32] = low, high
    weights[2, ::32], weights[2, 1::32] = low, high
    got = _unpack(how, quant.pack(how, weights / 64))
    np.testing.assert_array_equal(got, weights / 64)

  @parameterized.parameters(*FORMATS)
  def test_a_group_does_not_feel_its_neighbours(self, form: quant.Format):
    """One huge weight spoils its own group and no other."""
    how, g = _layout(form), form.group
    calm, huge = _weights(), _weights()
    at = {
      (0, 3, g - 1): (0, 3, slice(0, g)),
      (2, g, 5): (2, slice(g, 2 * g), 5),
    }
    if g == F:  # Then F holds one group.
      at[2, g - 1, 5] = (2, slice(0, g), 5)
      del at[2, g, 5]
    for where in at:
      huge[where] = 1000
    a = np.array(_unpack(how, quant.pack(how, calm)))
    b = np.array(_unpack(how, quant.pack(how, huge)))
    self.assertFalse(np.array_equal(a, b))
    for group in at.values():
      a[group] = b[group] = 0
    np.testing.assert_array_equal(a, b)

  @parameterized.parameters(*FORMATS)
  def test_zeros_stay_zero(self, form: quant.Format):
    how = _layout(form)
    got = _unpack(how, quant.pack(how, np.zeros(SHAPE, np.float32)))
    np.testing.assert_array_equal(got, np.zeros(SHAPE))
    one = np.zeros(SHAPE, np.float32)
    one[1, 2, 3] = -5
    got = np.asarray(_unpack(how, quant.pack(how, one)))
    self.assertEqual(np.count_nonzero(got), 1)

  @parameterized.product(form=FORMATS, size=(3e38, 1e-30, 1e-38, 1e-45))
  def test_extremes_stay_finite(self, form: quant.Format, size: float):
    how = _layout(form)
    weights = np.clip(_weights(), -1, 1) * np.float32(size)
    block = quant.pack(how, weights)
    got = np.asarray(_unpack(how, block))
    self.assertTrue(np.isfinite(got).all())
    error = np.abs(got.astype(np.float64) - weights)
    self.assertLessEqual(
      float((error / _scale_of_each(how, block)).max()), 0.5 + 1e-4
    )

  @parameterized.parameters(np.inf, -np.inf, np.nan)
  def test_what_is_not_finite_is_refused(self, value: float):
    weights = _weights()
    weights[2, 1, 1] = value
    with self.assertRaisesRegex(ValueError, '^1 of its weights are not finite'):
      quant.pack(_layout(quant.parse('int4')), weights)

  @parameterized.parameters(ml_dtypes.bfloat16, np.float16, np.float32)
  def test_every_float_type_is_read(self, dtype: type):
    how = _layout(quant.parse('int8'))
    weights = _weights().astype(dtype)
    np.testing.assert_array_equal(
      quant.pack(how, weights), quant.pack(how, weights.astype(np.float32))
    )

  @settings(deadline=None, max_examples=30)
  @given(st.integers(0, 2**31), st.sampled_from(FORMATS))
  def test_packing_what_was_unpacked_moves_little(
    self, seed: int, form: quant.Format
  ):
    """A second time costs no more than half a step of the new scales."""
    how = _layout(form)
    once = np.asarray(_unpack(how, quant.pack(how, _weights(seed))))
    again = quant.pack(how, once)
    error = np.abs(np.asarray(_unpack(how, again)) - once)
    scales = _scale_of_each(how, again)
    self.assertLessEqual(float((error / scales).max()), 0.5 + 1e-4)


class RefusedTest(parameterized.TestCase):
  @parameterized.parameters(
    ('int4:32', (3, 48, 64), 'width F that 32 divides, and it is 48.*F = 48'),
    ('int8:64', (3, 64, 96), 'width D that 64 divides, and it is 96.*of 32.'),
    ('int8:128', (3, 64, 128), 'width F that 128 .* 64: .* of 32 or 64.'),
    ('int4:32', (3, 0, 64), 'is 0'),
  )
  def test_sides(self, name: str, shape: tuple[int, int, int], message: str):
    with self.assertRaisesRegex(ValueError, message):
      quant.layout(quant.parse(name), shape)

  @parameterized.parameters(
    ('int2', "stored as 'int2'"),
    ('int4:48', 'group of int4 is 48; .* 32, 64 or 128'),
    ('int4:x', "'int4:x' is no format"),
    ('int4:32:zeros', 'is no format'),
    ('int4:32:zero:zero', 'is no format'),
    ('int8:32:zero', 'int8 has no zero points'),
    ('', "stored as ''"),
  )
  def test_names(self, name: str, message: str):
    with self.assertRaisesRegex(ValueError, message):
      quant.parse(name)

  @parameterized.parameters(*FORMATS)
  def test_names_are_read_back(self, form: quant.Format):
    self.assertEqual(quant.parse(form.name), form)

  def test_wrong_types_from_a_file(self):
    with self.assertRaisesRegex(ValueError, 'zero_point is 1'):
      quant.Format(kind='int4', zero_point=1)  # type: ignore[arg-type]
    with self.assertRaisesRegex(ValueError, 'group of int4 is True'):
      quant.Format(kind='int4', group=True)
    with self.assertRaisesRegex(ValueError, "group of int4 is '32'"):
      quant.Format(kind='int4', group='32')  # type: ignore[arg-type]


class PoolTest(parameterized.TestCase):
  @parameterized.parameters(*FORMATS)
  def test_experts_from_a_packed_pool(self, form: quant.Format):
    """Bitwise those of a pool that holds the dequantised experts."""
    how, slots = _layout(form), 5
    blocks = np.stack([quant.pack(how, _weights(s) / 8) for s in range(slots)])
    wide = jnp.stack([_unpack(how, b) for b in blocks])
    packed = quant.Packed(jnp.asarray(blocks), how)
    x = jax.random.normal(jax.random.key(0), (3, D))
    chosen = jnp.asarray([[4, 0], [0, 2], [-1, 4]])
    distinct = jnp.asarray([0, 2, 4, -1])
    y = jnp.zeros((3, 2, D))
    apply = jax.jit(experts.apply)
    got = apply(packed, x, chosen, distinct, 3, y)
    wanted = apply(wide, x, chosen, distinct, 3, y)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    self.assertGreater(float(jnp.abs(got).max()), 0.1)
    np.testing.assert_array_equal(got[2, 0], np.zeros(D))


if __name__ == '__main__':
  absltest.main()
