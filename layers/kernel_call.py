"""What the GPU kernels share: how one is called, blocks, masks, products.

The kernels are Pallas with its Triton lowering (WORKSPACE.md tells why). They
are compiled on a GPU and interpreted elsewhere, where only tests want them.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

# Rows of the smallest matrix product of a tensor core.
LEAST_ROWS = 16
# Parts of an expert; the interpreter wants typed indices.
GATE, UP, DOWN = map(np.int32, range(3))
_CHAINED_FROM = 9
_WAIT = """
griddepcontrol.wait;
griddepcontrol.launch_dependents;
mov.u32 $0, $1;
"""


class View(NamedTuple):
  """An operand that a kernel sees in another shape, or an output likewise.

  Attributes:
    array: the operand; of an output what the kernel writes.
    shape: as the kernel sees the operand; of an output what it is for all
      others.
  """

  array: Any
  shape: tuple[int, ...]


class Recorder(Protocol):
  """Notes calls of kernels instead of making them."""

  def call(
    self,
    name: str,
    run: Callable[..., tuple[Any, ...]],
    operands: Sequence[jax.Array],
    aliases: Mapping[int, int],
    *,
    early: bool,
  ) -> tuple[jax.Array, ...]:
    """Arrays that `run(*operands, token)` will have written.

    `run` also takes an int32 `[1]` that its kernel does not look at: what
    must happen before the kernel gives it. Aliased operands are given up.
    `early`: it may be begun while the kernel in front of it still runs.
    """


_recorders: list[Recorder] = []


@contextlib.contextmanager
def recorded(by: Recorder) -> Iterator[None]:
  """Inside, every call of a kernel is noted by a recorder."""
  _recorders.append(by)
  try:
    yield
  finally:
    _recorders.pop()


def interpreted() -> bool:
  """Whether kernels are interpreted, for want of a GPU."""
  return jax.default_backend() != 'gpu'


def call(
  kernel: Callable[..., None],
  name: str,
  grid: tuple[int, ...],
  out: Any,
  operands: Sequence[jax.Array | View],
  *,
  warps: int = 4,
  stages: int = 3,
  aliases: Mapping[int, int] | None = None,
  early: Callable[..., tuple[Any, ...]] | None = None,
) -> Any:
  """Runs a kernel; refs are whole arrays, inputs first.

  Args:
    kernel: reads its place from `pl.program_id`.
    name: as profilers show it.
    grid: how many programs.
    out: a `jax.ShapeDtypeStruct` for each array that it writes, or a `View`.
    operands: its inputs.
    warps: of 32 threads, a program.
    stages: loads under way ahead of the product that uses them.
    aliases: inputs that outputs are written over.
    early: makes of the same refs a tuple that the kernel is given before them.
      With it a graph may begin a kernel while the one in front of it still
      runs; it reads nothing that kernels of a graph write.
  """
  single = not isinstance(out, tuple) or isinstance(out, View)
  outs = (out,) if single else out
  views = [o if isinstance(o, View) else View(o, o.shape) for o in operands]
  made = [o if isinstance(o, View) else View(o, o.shape) for o in outs]
  count, over = len(views), dict(aliases or {})

  body = _with_early(kernel, early) if early else kernel

  def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    seen = [a.reshape(v.shape) for a, v in zip(arrays, views, strict=False)]
    written = pl.pallas_call(
      lambda *refs: body(*refs[:count], *refs[len(arrays) :]),
      grid=grid,
      out_shape=tuple(v.array for v in made),
      input_output_aliases=over,
      interpret=interpreted(),
      compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
      name=name,
    )(*seen, *arrays[count:])
    return tuple(a.reshape(v.shape) for a, v in zip(written, made, strict=True))

  arrays = [v.array for v in views]
  if _recorders:
    may = early is not None and chained()
    found = _recorders[-1].call(name, run, arrays, over, early=may)
  else:
    found = run(*arrays)
  return found[0] if single else found


def chained() -> bool:
  """Whether kernels may be begun before those in front of them have ended.

  From compute capability 9.0 on a graph may do so ("programmatic dependent
  launch"). Such a kernel waits, behind its `early` part, for what it was begun
  behind; begun in any other way there is nothing to wait for.
  """
  if interpreted():
    return False
  # 'gfx942' where a GPU is AMD's.
  found = str(getattr(jax.devices()[0], 'compute_capability', ''))
  major = found.partition('.')[0]
  return major.isdigit() and int(major) >= _CHAINED_FROM


def _with_early(
  kernel: Callable[..., None], early: Callable[..., tuple[Any, ...]]
) -> Callable[..., None]:
  """A kernel whose early part comes before it waits; see `call`."""

  def body(*refs: Any) -> None:
    made = early(*refs)
    if chained():
      _behind_the_last(lambda: kernel(*made, *refs))
    else:
      kernel(*made, *refs)

  return body


def _behind_the_last(body: Callable[[], None]) -> None:
  """Does the body once the kernel in front of this one has ended.

  From then on the next kernel may be begun. Triton takes the assembly for a
  function of its operand. That the body hangs on its result keeps the body's
  memory accesses behind it.
  """
  [same] = plgpu.elementwise_inline_asm(
    _WAIT,
    args=[jnp.full((1,), pl.program_id(0))],
    constraints='=r,r',
    pack=1,
    result_shape_dtypes=[shape((1,), jnp.int32)],
  )
  pl.when(jnp.max(same) >= 0)(body)


def constant(ref: Any, index: Any) -> jax.Array:
  """A number that no kernel of a graph writes, past a stale first cache."""
  if not chained():
    out: jax.Array = ref[index]
    return out
  found: jax.Array = plgpu.load(ref.at[index], volatile=True)
  return found


def shape(size: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
  """Of an array that a kernel writes."""
  return jax.ShapeDtypeStruct(size, dtype)


def block(size: int, most: int) -> int:
  """The largest power of two that divides a size, `most` at most."""
  return min(size & -size, most)


def padded(count: int, least: int = 1) -> int:
  """The next power of two, `least` at least."""
  return max(least, 1 << max(0, count - 1).bit_length())


def whole(size: int, least: int = 1) -> tuple[Any, jax.Array]:
  """A slice of a whole axis, padded, and which of it is real."""
  width = padded(size, least)
  return pl.ds(0, width), jnp.arange(width, dtype=jnp.int32) < size


def some(first: Any, count: int) -> tuple[Any, jax.Array]:
  """A slice of a part of an axis, padded, and which of it is real."""
  at, real = whole(count)
  return pl.ds(first, at.size), real


def load(ref: Any, mask: jax.Array | None = None) -> jax.Array:
  """Loads a ref; 0 where the mask is False."""
  other = None if mask is None else 0
  out: jax.Array = plgpu.load(ref, mask=mask, other=other)
  return out


def fresh(ref: Any, mask: jax.Array) -> jax.Array:
  """Loads what other programs have just written, past a stale first cache."""
  out: jax.Array = plgpu.load(ref, mask=mask, other=0, volatile=True)
  return out


def store(ref: Any, value: jax.Array, mask: jax.Array | None = None) -> None:
  """Stores into a ref where the mask is True."""
  plgpu.store(ref, value.astype(ref.dtype), mask=mask)


def dot(
  weights: jax.Array, rows_RxK: jax.Array, *, first: bool = False
) -> jax.Array:
  """Weights `[O, K]`, or `[K, O]` where K is first, on rows: float32 `[R, O]`.

  Weights are on the left, where a tensor core takes many at once straight
  from where they have been loaded to; the rows of a launch are few.
  """
  return _general(weights, rows_RxK, 0 if first else 1, 1).T


def dot_rows(
  rows_RxK: jax.Array, weights: jax.Array, *, first: bool = False
) -> jax.Array:
  """The same with the rows on the left, for weights made on the way."""
  return _general(rows_RxK, weights, 1, 0 if first else 1)


def _general(a: jax.Array, b: jax.Array, over: int, also: int) -> jax.Array:
  if interpreted():
    # A CPU may add up a product of bfloat16 in bfloat16.
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  wide = a.dtype == jnp.float32
  out: jax.Array = jax.lax.dot_general(
    a,
    b,
    (((over,), (also,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST if wide else None,
    preferred_element_type=jnp.float32,
  )
  return out


def named(
  slots: Any, slot: jax.Array, first: jax.Array | None = None
) -> jax.Array:
  """Whether any choice of `slots [N, T]` names a slot; -1 is none.

  Of the first choices, row by row, where so many are asked for.
  """
  n, t = slots.shape
  size = padded(n), padded(t)
  row = jax.lax.broadcasted_iota(jnp.int32, size, 0)
  choice = jax.lax.broadcasted_iota(jnp.int32, size, 1)
  real = (row < n) & (choice < t)
  if first is not None:
    real &= row * t + choice < first
  all_slots = load(slots.at[pl.ds(0, size[0]), pl.ds(0, size[1])], real)
  hits = jnp.where(real & (all_slots == slot), 1, 0)
  out: jax.Array = (jnp.max(hits) > 0) & (slot >= 0)
  return out


def anybody(go: Any) -> jax.Array:
  """Whether any row goes on."""
  at, real = whole(go.shape[0])
  found: jax.Array = jnp.max(load(go.at[at], real)) > 0
  return found


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """SiLU(gate) * up."""
  return gate / (1 + jnp.exp(-gate)) * up


def load_rows(
  ref: Any, columns: Any, rows: int, width: int, *of: jax.Array
) -> jax.Array:
  """Some columns of all rows, `[rows, width]`; 0 in rows that are padding.

  `of` is what comes before the rows in the ref's shape.
  """
  line = jax.lax.broadcasted_iota(jnp.int32, (rows, width), 0)
  return load(ref.at[(*of, pl.ds(0, rows), columns)], line < ref.shape[-2])


def load_some(
  ref: Any, first: Any, rows: int, width: int, *of: jax.Array
) -> jax.Array:
  """The same from column `first` on, 0 behind the last one."""
  line = jax.lax.broadcasted_iota(jnp.int32, (rows, width), 0)
  column = first + jax.lax.broadcasted_iota(jnp.int32, (rows, width), 1)
  real = (line < ref.shape[-2]) & (column < ref.shape[-1])
  return load(ref.at[(*of, pl.ds(0, rows), pl.ds(first, width))], real)


def store_rows(
  ref: Any, columns: Any, value: jax.Array, *of: jax.Array
) -> None:
  """Stores some columns of all rows, but for padding; see `load_rows`."""
  line = jax.lax.broadcasted_iota(jnp.int32, value.shape, 0)
  there = ref.at[(*of, pl.ds(0, value.shape[0]), columns)]
  store(there, value, line < ref.shape[-2])


def store_block(ref: Any, value: jax.Array, rows: int, columns: int) -> None:
  """Stores the first rows and columns of a padded tile."""
  row = jax.lax.broadcasted_iota(jnp.int32, value.shape, 0)
  column = jax.lax.broadcasted_iota(jnp.int32, value.shape, 1)
  store(ref, value, (row < rows) & (column < columns))


def store_choices(
  out_NxTxD: Any, slots: Any, slot: jax.Array, at: Any, value: jax.Array
) -> None:
  """Stores what a slot makes of all rows for each choice that names it."""
  n, t = slots.shape
  rows = value.shape[0]
  lines = jnp.arange(rows, dtype=jnp.int32)
  for choice in map(np.int32, range(t)):
    named_here = load(slots.at[pl.ds(0, rows), choice], lines < n) == slot
    mask = jnp.broadcast_to((named_here & (lines < n))[:, None], value.shape)
    store(out_NxTxD.at[pl.ds(0, rows), choice, at], value, mask)


def normed(
  x_D: jax.Array, weights_D: jax.Array, width: int, eps: float
) -> jax.Array:
  """One row behind its norm, rounded where `norm.rms_norm` rounds."""
  wide = x_D.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.sum(wide * wide) / width + eps)
  return (wide * scale).astype(x_D.dtype) * weights_D.astype(x_D.dtype)
