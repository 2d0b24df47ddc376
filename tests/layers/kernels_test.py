"""The GPU kernels against the plain forms: interpreted here, real on a GPU.

On a CPU they compute in float32, so that agreement is close. Seen to fail:
outputs .1 % off, 4-bit values not shifted, zero points without theirs, waves
taken from the wrong place, the new key's value left out, a window one too wide,
the new position read from the cache, a row that stops writing its key or its
stream, ties to the highest id, a missing expert passed over, padding that
reads a slot; a likeliest token that is padding, or the last of several; a row
that stopped and draws; padding that holds all others back.
"""

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax.layers import (
  block,
  embed,
  experts,
  kernel_attention,
  kernel_dense,
  kernel_experts,
  kernel_head,
  kernel_router,
  kernel_rows,
  kv_cache,
  norm,
  params,
  quant,
  rope,
  router,
)
from bevy_jax.layers import config as config_lib

_EPS = 1e-6
# Interpreted kernels are long programs that run once.
_QUICK = {'xla_backend_optimization_level': 0}
_SLOTS = 10
_jit = jax.jit
if jax.default_backend() == 'cpu':
  _jit = functools.partial(jax.jit, compiler_options=_QUICK)


def _stacked(one: Any) -> Any:
  """A layer among others that nobody may touch."""
  return jax.tree.map(lambda a: jnp.stack([_spoilt(a), a, _spoilt(a)]), one)


def _spoilt(a: jax.Array) -> jax.Array:
  if jnp.issubdtype(a.dtype, jnp.floating):
    return jnp.full_like(a, jnp.nan)
  return jnp.zeros_like(a)


def _place(control: Any, tables: int = 1, experts: int = 8):
  """Of three layers the one in the middle, two behind the last one.

  There are two tables, and the last one, which lies at `tables`, is read.
  """
  control = jnp.asarray(control, jnp.int32).at[0].set(2)
  hop, start = jnp.full((1,), 2, jnp.int32), tables - experts
  return kernel_rows.Place(control, hop, 0, start, 2, 3, experts)


def _error(got: Any, wanted: Any) -> float:
  a, b = (np.asarray(x, np.float64) for x in (got, wanted))
  return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def _experts(form: str | None, f: int, d: int) -> tuple[Any, jax.Array]:
  """A pool of random experts, and the same in float32."""
  rng = np.random.default_rng(0)
  weights = rng.normal(size=(_SLOTS, 3, f, d)).astype(np.float32) / d**0.5
  if form is None:
    return jnp.asarray(weights), jnp.asarray(weights)
  how = quant.layout(quant.parse(form), (3, f, d))
  blocks = np.stack([quant.pack(how, w) for w in weights])
  pool = quant.Packed(jnp.asarray(blocks), how)
  return pool, jnp.stack([quant.unpack(how, b) for b in pool.data])


def _choices(n: int, t: int, e: int) -> tuple[np.ndarray, np.ndarray]:
  """Distinct slots of each row's choices, and the table of all experts."""
  rng = np.random.default_rng(1)
  table = rng.permutation(_SLOTS)[:e].astype(np.int32)
  ids = np.stack([rng.permutation(e)[:t] for _ in range(n)])
  return table[ids], table


class ExpertsTest(parameterized.TestCase):
  @parameterized.product(
    form=[None, 'int8', 'int4', 'int4:32:zero'],
    # Fewer choices than experts, and more.
    shape=[(3, 2, 64, 64), (5, 2, 64, 64), (17, 3, 192, 192)],
  )
  def test_against_the_plain_form(self, form, shape):
    n, t, f, d = shape
    pool, wide = _experts(form, f, d)
    slots, table = _choices(n, t, 8)
    slots[0, 0] = -1  # Not in this wave.
    if n > 2:
      slots[2] = -1  # A row that has stopped.
    self._check(pool, wide, slots, table)

  def test_all_rows_the_same_expert(self):
    pool, wide = _experts(None, 32, 64)
    _, table = _choices(4, 1, 8)
    self._check(pool, wide, np.full((4, 1), table[3]), table)

  def test_what_nobody_names_has_no_part_in_it(self):
    pool, wide = _experts(None, 32, 64)
    slots, table = _choices(3, 2, 8)
    table[5] = -1
    slots = np.where(slots == table[4], -1, slots)
    named = set(slots[slots >= 0].tolist())
    rest = np.array([s for s in range(_SLOTS) if s not in named])
    self._check(pool.at[rest].set(jnp.nan), wide, slots, table)

  def _check(self, pool, wide, slots, table):
    n, t = slots.shape
    d = wide.shape[3]
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(n, d)), jnp.float32)
    weight = jnp.asarray(1 + 0.1 * rng.normal(size=d), jnp.float32)
    h = norm.rms_norm(x, weight, _EPS)
    distinct = np.unique(slots[slots >= 0]).astype(np.int32)
    empty = jnp.zeros((n, t, d), jnp.float32)
    wanted = experts.apply(
      wide, h, jnp.asarray(slots), jnp.asarray(distinct), len(distinct), empty
    )

    @_jit
    def run(pool, h, slots, control):
      return kernel_experts.apply(pool, h, slots, _place(control, 3))

    control = jnp.concatenate([jnp.full(3, 7), jnp.asarray(table)])
    got = run(pool, h, jnp.asarray(slots), control)
    named = (slots >= 0)[:, :, None]
    got = np.where(named, got, 0)
    self.assertLess(_error(got, np.where(named, wanted, 0)), 1e-5)


class CombineTest(absltest.TestCase):
  def test_waves_and_rows_that_stop(self):
    rng = np.random.default_rng(0)
    n, t, d, r = 3, 2, 64, 5
    x, y = rng.normal(size=(n, d)), rng.normal(size=(n, t, d))
    partial, weights = rng.normal(size=(r, t, d)), rng.random((n, t))
    slots, rows = np.array([[4, 5], [6, -1], [-1, -1]]), np.array([4, 0, r])
    y[slots < 0] = np.nan  # Poisoned: nobody wrote it.
    go = np.array([1, 1, 0])
    floats = [jnp.asarray(a, jnp.float32) for a in (x, y, weights)]
    scale = jnp.linspace(0.5, 2, d)
    blank = _rows(n)
    given = blank._replace(
      numbers=jnp.asarray(rows, jnp.int32),
      x=floats[0],
      slots=jnp.asarray(slots, jnp.int32),
      weights=floats[2],
      go=jnp.asarray(go, jnp.int32),
    )
    config = config_lib.tiny(model_dim=d)

    @_jit
    def run(given, y, partial):
      place = _place(jnp.zeros(2, jnp.int32))
      return kernel_experts.combine(
        config, given, y, partial, _stacked(scale), place
      )

    got, normed = run(given, floats[1], jnp.asarray(partial, jnp.float32))
    np.testing.assert_allclose(
      normed, norm.rms_norm(got, scale, _EPS), rtol=1e-5
    )
    outputs = y[0], np.stack([y[1, 0], partial[0, 1]])
    for i, out in enumerate(outputs):
      wanted = x[i] + weights[i] @ out
      np.testing.assert_allclose(got[i], wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[2], x[2], rtol=1e-6)


_MODELS = {
  'plain': {},
  'biases': {
    'qk_norm': None,
    'qkv_bias': True,
    'out_bias': True,
    'clip_qkv': 1.5,
  },
  'full': {'qk_norm': 'full', 'num_heads': 8, 'num_kv_heads': 4},
  'odd': {'head_dim': 24, 'num_heads': 6, 'num_kv_heads': 2, 'model_dim': 48},
  'head 96': {'head_dim': 96},
}


class AttentionTest(parameterized.TestCase):
  @parameterized.parameters(
    ('plain', 0), ('biases', 0), ('full', 0), ('odd', 40), ('head 96', 40),
    ('plain', 0, 16), ('plain', 40, 16), ('odd', 0, 16), ('plain', 17, 16),
  )  # fmt: skip
  def test_against_the_plain_form(self, model, window, step=128):
    """Steps of 16: each part of a row has several, or some have none."""
    how = mock.patch.object(kernel_attention, 'ATTEND', (step, 8, 1))
    self.enterContext(how)
    config = config_lib.tiny(**_MODELS[model])
    p = params.init(config, jax.random.key(0))['layers'][1]
    rng = np.random.default_rng(0)
    rows = np.array([3, 0, 5, 1, 6], np.int32)  # The last one is padding.
    positions = np.array([0, 63, 64, 130, 7], np.int32)
    shape = 6, config.num_kv_heads, 160, config.head_dim
    k, v = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    for row, position in zip(rows[:-1], positions, strict=False):
      # Poisoned: what lies behind a row's own text is never read.
      k[row, :, position:], v[row, :, position:] = np.nan, np.nan
    clean = kv_cache.LayerCache(
      *(jnp.nan_to_num(jnp.asarray(a)) for a in (k, v))
    )
    x = jnp.asarray(rng.normal(size=(5, config.model_dim)), jnp.float32)
    wanted, kept = block.attend(
      config, p, clean, window, x[:, None], rows, positions[:, None]
    )
    cache = kv_cache.LayerCache(jnp.asarray(k), jnp.asarray(v))
    got, new = _attend(config, p, cache, window, x, rows, positions, np.ones(5))
    self.assertLess(_error(got[:4], wanted[:4, 0]), 1e-5)
    for row, position in zip(rows[:-1], positions, strict=False):
      for a, b in zip(new, kept, strict=True):
        self.assertLess(
          _error(a[row, :, : position + 1], b[row, :, : position + 1]), 1e-5
        )

  def test_a_row_that_stops_changes_nothing(self):
    config = config_lib.tiny(out_bias=True)
    p = params.init(config, jax.random.key(0))['layers'][0]
    cache = kv_cache.LayerCache(
      *jax.random.normal(jax.random.key(1), (2, 3, 2, 32, 8))
    )
    x = jax.random.normal(jax.random.key(2), (2, 32))
    rows, positions = np.array([2, 0], np.int32), np.array([4, 5], np.int32)
    got, new = _attend(
      config, p, cache, 0, x, rows, positions, np.array([0, 1])
    )
    np.testing.assert_array_equal(got[0], x[0])
    for a, b in zip(new, cache, strict=True):
      np.testing.assert_array_equal(a[1:], b[1:])
      self.assertGreater(np.abs(np.asarray(a[0] - b[0])).max(), 0)

  def test_a_value_that_is_not_finite_is_kept_as_nan_keys(self):
    config = config_lib.tiny()
    p = params.init(config, jax.random.key(0))['layers'][0]
    cache = kv_cache.LayerCache(*jnp.zeros((2, 1, 2, 32, 8)))
    x = jnp.full((1, 32), jnp.inf)
    zero = np.zeros(1, np.int32)
    _, new = _attend(config, p, cache, 0, x, zero, zero, np.ones(1))
    self.assertTrue(np.isnan(np.asarray(new.k[0, :, 0])).all())
    self.assertTrue((np.asarray(new.v[0, :, 0]) == 0).all())

  def test_a_value_that_is_not_finite_is_told_at_once(self):
    """Seen to fail with a new key that was looked at before it was spoilt."""
    config = config_lib.tiny(qkv_bias=True)
    p = params.init(config, jax.random.key(0))['layers'][0]
    p['bv'] = p['bv'].at[-1].set(jnp.inf)
    cache = kv_cache.LayerCache(*jnp.zeros((2, 1, 2, 32, 8)))
    x, zero = jnp.ones((1, 32)), np.zeros(1, np.int32)
    got, _ = _attend(config, p, cache, 0, x, zero, zero, np.ones(1))
    self.assertFalse(np.isfinite(np.asarray(got)).any())


def _attend(config, p, cache, window, x, rows, positions, go):
  """The cache is one of three, and the others are left alone."""
  p, every = _stacked(params.merged(p)), _stacked(cache)
  config = dataclasses.replace(config, windows=(1, window, 1))
  given = _rows(len(go))._replace(x=x, go=jnp.asarray(go, jnp.int32))

  @_jit
  def run(x, caches, rows, positions):
    place = _place(jnp.zeros(3, jnp.int32))
    h = norm.rms_norm(x, p['attn_norm'][1], config.norm_eps)
    made = kernel_dense.project(config, p, place, given._replace(h=h))
    cos, sin = rope.turn(config.rope, config.head_dim, positions)
    mine = given._replace(numbers=rows, positions=positions, cos=cos, sin=sin)
    mixed, new = kernel_attention.attend(config, p, place, caches, made, mine)
    return kernel_dense.output(config, p, place, mixed, mine).x, new

  x, new = run(x, every, jnp.asarray(rows), jnp.asarray(positions))
  for part in new:
    assert np.isnan(np.asarray(part[::2])).all(), 'another layer was written'
  return x, kv_cache.LayerCache(*(part[1] for part in new))


class RouterTest(parameterized.TestCase):
  @parameterized.parameters((8, 1, True), (12, 3, False), (12, 3, True))
  def test_against_the_plain_form(self, experts, top_k, norm_topk):
    config = config_lib.tiny(
      num_experts=experts, top_k=top_k, norm_topk=norm_topk, model_dim=48
    )
    p = params.init(config, jax.random.key(0))['layers'][0]
    x = jax.random.normal(jax.random.key(1), (7, 48))
    got = _route(config, p, x)
    wanted = block.route(config, p, x)
    np.testing.assert_array_equal(got.answers[0, :, 2:], wanted.ids)
    np.testing.assert_allclose(got.weights, wanted.weights, rtol=2e-5)
    self.assertTrue((np.asarray(got.answers[0, :, 1]) == 1).all())
    np.testing.assert_allclose(
      got.h, norm.rms_norm(x, p['mlp_norm'], config.norm_eps), rtol=1e-5
    )
    # Row i of the launch is row 6 - i of the state.
    np.testing.assert_array_equal(got.kept_ids[::-1], wanted.ids)
    np.testing.assert_allclose(got.kept_x[::-1], x, rtol=1e-6)

  def test_ties_and_what_is_not_finite(self):
    config = config_lib.tiny(num_experts=12, top_k=3)
    p = params.init(config, jax.random.key(0))['layers'][0]
    p = p | {'router': jnp.ones_like(p['router'])}
    x = jnp.stack([jnp.ones(32), jnp.full(32, jnp.nan), jnp.zeros(32)])
    got = _route(config, p, x)
    np.testing.assert_array_equal(got.answers[0, :, 2:], [[0, 1, 2]] * 3)
    np.testing.assert_array_equal(got.answers[0, :, 1], [1, 0, 1])
    np.testing.assert_array_equal(got.go, [1, 0, 1])

  def test_who_misses_or_has_not_come_stops(self):
    config = config_lib.tiny()
    p = params.init(config, jax.random.key(0))['layers'][0]
    x = jax.random.normal(jax.random.key(1), (4, 32))
    wanted = np.asarray(block.route(config, p, x).ids)
    table = np.arange(8, dtype=np.int32) + 20
    table[wanted[1, 1]] = -1
    go = np.array([1, 1, 0, 1], np.int32)
    got = _route(config, p, x, table, go)
    for i in range(4):
      free = go[i] and wanted[1, 1] not in wanted[i]
      self.assertEqual(got.go[i], free)
      slots = wanted[i] + 20 if free else [-1, -1]
      np.testing.assert_array_equal(got.slots[i], slots)
    np.testing.assert_array_equal(got.answers[0, 2], [-1] * 4)
    np.testing.assert_array_equal(got.kept_ids[3 - 2], [7, 7])  # As it was.
    np.testing.assert_array_equal(got.kept_x[3 - 2], np.full(32, 5.0))

  def test_given_choices_are_weighed(self):
    config = config_lib.tiny(norm_topk=False)
    p = params.init(config, jax.random.key(0))['layers'][0]
    x = jax.random.normal(jax.random.key(1), (2, 32))
    # Request 1 at position 3 and request 4 at 5, of 3 requests x 4 positions.
    record = np.full((3, 4, 2), 6, np.int16)
    record[1, 3], record[1, 1] = (5, 0), (1, 7)
    p = p | {'forced': jnp.asarray(record)}
    got = _route(config, p, x, seeds=[1, 4], positions=[3, 5])
    given = np.array([[5, 0], [1, 7]])
    np.testing.assert_array_equal(got.answers[0, :, 2:], given)
    h = norm.rms_norm(x, p['mlp_norm'], config.norm_eps)
    scores = jax.nn.softmax(router.logits(p['router'], h))
    np.testing.assert_allclose(
      got.weights, np.take_along_axis(scores, given, 1), rtol=2e-5
    )


def _rows(n: int) -> kernel_rows.Rows:
  """Rows of nothing; tests fill in what a kernel looks at."""
  zero = jnp.zeros(n, jnp.int32)
  one = jnp.zeros((n, 1))
  return kernel_rows.Rows(
    zero, one, one, zero[:, None], one, zero + 1, zero, zero, one, one
  )


def _route(config, p, x, table=None, go=None, seeds=None, positions=None):
  """Both kernels of the router, on rows to which attention adds nothing."""
  p, n, t = _stacked(params.merged(p)), x.shape[0], config.top_k
  zero = np.zeros(n, np.int32)
  if table is None:
    table = np.arange(config.num_experts, dtype=np.int32)
  rows = _rows(n)._replace(
    numbers=jnp.arange(n, dtype=jnp.int32)[::-1],
    x=x,
    slots=jnp.zeros((n, t), jnp.int32),
    go=jnp.asarray(zero + 1 if go is None else go),
    seeds=jnp.asarray(zero if seeds is None else seeds, jnp.int32),
    positions=jnp.asarray(zero if positions is None else positions, jnp.int32),
  )

  @_jit
  def run(rows, control):
    mixed = jnp.zeros((n, config.num_heads * config.head_dim))
    place = _place(control, 2, config.num_experts)
    parts = kernel_dense.output(config, p, place, mixed, rows)
    kept = kernel_rows.Kept(
      jnp.full((n, config.model_dim), 5.0),
      jnp.full((n, t), 7),
      jnp.zeros((n, t)),
      jnp.zeros((n, 7), jnp.int32),
    )
    return kernel_router.choose(config, p, place, parts, rows, None, kept)

  return run(rows, jnp.concatenate([jnp.full(2, 99), jnp.asarray(table)]))


class TakeTest(absltest.TestCase):
  def test_rows_in_any_order(self):
    config = config_lib.tiny()
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(5, 32)), jnp.float32)
    ids = np.array([[3, 1], [0, 7], [2, 4], [5, 6], [1, 0]], np.int32)
    weights = rng.random((5, 2)).astype(np.float32)
    table = np.array([9, -1, 8, 7, 6, 5, 4, 3], np.int32)
    numbers = np.array([4, 2, 5], np.int32)
    positions = np.array([3, 9, 27, 81, 100])
    scale = jnp.linspace(0.5, 2, 32)
    registers = np.zeros((5, 4), np.int32)
    registers[:, 1], registers[:, 3] = positions, [11, 12, 13, 14, 15]
    control = jnp.concatenate([jnp.zeros(1, jnp.int32), numbers, table])

    @_jit
    def run(control, x, ids, weights, registers):
      return kernel_rows.take(
        config,
        _stacked(scale),
        3,
        1,
        _place(control, 4),
        kernel_rows.Kept(x, ids, weights, registers),
        (1, 3),
      )

    got = run(control, x, ids, weights, registers)
    np.testing.assert_array_equal(got.numbers, numbers)
    np.testing.assert_array_equal(got.seeds[:2], [15, 13])
    np.testing.assert_array_equal(got.positions[:2], positions[[4, 2]])
    np.testing.assert_array_equal(got.go, [1, 1, 0])
    np.testing.assert_array_equal(got.slots, [[-1, 9], [8, 6], [-1, -1]])
    for i, row in enumerate((4, 2)):
      np.testing.assert_array_equal(got.x[i], x[row])
      np.testing.assert_allclose(
        got.h[i], norm.rms_norm(x[row], scale, config.norm_eps), rtol=1e-5
      )
      np.testing.assert_array_equal(got.weights[i], weights[row])
      turn = rope.turn(config.rope, 8, jnp.asarray(positions[row]))
      np.testing.assert_allclose(got.cos[i], turn[0], atol=1e-5)
      np.testing.assert_allclose(got.sin[i], turn[1], atol=1e-5)


class HeadTest(parameterized.TestCase):
  """Three rows of four go on, and one of these is padding."""

  @parameterized.parameters(True, False)
  def test_against_the_plain_form(self, tied):
    config, top, x, registers, got = self._draw(tied, lambda top: top)
    rows, drawn, kept = got
    logits = embed.logits(config, top, x)
    self.assertGreater(len(set(np.asarray(logits.argmax(axis=1)))), 2)
    token = np.asarray(logits.argmax(axis=1))
    for i, row in ((0, 3), (2, 1)):
      self.assertEqual(int(drawn.token[i]), token[i])
      self.assertEqual(int(drawn.sound[i]), 1)
      position = registers[row, 1] + 1
      np.testing.assert_array_equal(kept[row], [token[i], position, 7])
      self.assertEqual(int(rows.positions[i]), position)
      new = top['embed'][token[i]]
      np.testing.assert_array_equal(rows.x[i], new)
      np.testing.assert_allclose(
        rows.h[i],
        norm.rms_norm(new, self._norms[0], config.norm_eps),
        rtol=1e-5,
      )
      turn = rope.turn(config.rope, 8, jnp.asarray(position))
      np.testing.assert_allclose(rows.cos[i], turn[0], atol=1e-5)
      np.testing.assert_allclose(rows.sin[i], turn[1], atol=1e-5)
    # Neither who stopped nor padding changes anything.
    for i in (1, 3):
      np.testing.assert_array_equal(rows.x[i], x[i])
    for row in (0, 2):
      np.testing.assert_array_equal(kept[row], registers[row])

  def test_ties_go_to_the_lowest_token(self):
    def flat(top):
      # Tokens of two parts of the vocabulary, and of one.
      return {k: v.at[...].set(1.0) for k, v in top.items()}

    *_, (_, drawn, _) = self._draw(True, flat)
    np.testing.assert_array_equal(np.asarray(drawn.token)[[0, 2]], [0, 0])

  def test_what_is_not_finite_is_told(self):
    def spoil(top):
      return top | {'embed': top['embed'].at[70, 3].set(jnp.nan)}

    *_, (_, drawn, _) = self._draw(True, spoil)
    np.testing.assert_array_equal(np.asarray(drawn.sound)[[0, 2]], [0, 0])

  def _draw(self, tied, change):
    config = config_lib.tiny(tied=tied)  # 96 tokens: a part, and half of one.
    top = params.init(config, jax.random.key(0))
    top = change({k: top[k] for k in ('embed', 'head') if k in top})
    x = jax.random.normal(jax.random.key(5), (4, 32))
    self._norms = jnp.linspace(0.5, 2, 64).reshape(2, 32)
    top['final_norm'] = jnp.ones(32)
    registers = np.array([[0, 5, 7], [0, 9, 7], [0, 3, 7], [0, 20, 7]])
    registers = registers.astype(np.int32)
    numbers = np.array([3, 2, 1, 4], np.int32)
    positions = registers[:, 1][np.minimum(numbers, 3)]

    @_jit
    def run(x, registers):
      given = _rows(4)._replace(
        x=x,
        h=norm.rms_norm(x, top['final_norm'], config.norm_eps),
        numbers=jnp.asarray(numbers),
        go=jnp.array([1, 0, 1, 1], jnp.int32),
        positions=jnp.asarray(positions),
      )
      found = kernel_head.best(top, given.h, given.go)
      return kernel_head.draw(
        config, top, self._norms, found, given, registers, (0, 1)
      )

    got = run(x, jnp.asarray(registers))
    return config, top, x, registers, got


class AgreeTest(parameterized.TestCase):
  @parameterized.parameters(
    (0, [1, 0, 1, 1], [1, 0, 1, 1]),
    (1, [1, 0, 1, 1], [0, 0, 0, 0]),
    (1, [1, 1, 0, 1], [1, 1, 0, 1]),  # Padding does not count.
  )
  def test_all_or_nobody(self, together, go, wanted):
    given = _rows(4)._replace(
      go=jnp.asarray(go, jnp.int32),
      numbers=jnp.array([0, 2, 3, 1], jnp.int32),
      slots=jnp.arange(8, dtype=jnp.int32).reshape(4, 2),
    )
    control = jnp.array([0, together, 0], jnp.int32)
    run = _jit(lambda rows: kernel_rows.agree(rows, 3, 1, _place(control)))
    got = run(given)
    np.testing.assert_array_equal(got.go, wanted)
    on = np.asarray(wanted)[:, None] > 0
    np.testing.assert_array_equal(
      got.slots, np.where(on, np.asarray(given.slots), -1)
    )


if __name__ == '__main__':
  absltest.main()
