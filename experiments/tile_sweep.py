"""Which tiles serve an expert kernel best: measured one by one on a GPU."""

import functools
import gzip
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bevy_jax import storage
from bevy_jax.experiments import bench_models, launch_times
from bevy_jax.layers import (
  kernel_experts,
  kernel_packed,
  kernel_rows,
  kernel_tiles,
  quant,
)

# What each field of a tile may be, for gate and up as for the way down.
_CHOICES = {
  'outer': (16, 32, 64, 128),
  'inner': (32, 64, 128, 256),
  'warps': (2, 4, 8),
  'stages': (2, 3, 4, 5, 6),
}
_LAYERS = 4  # Each call reads others of their experts than the one before.
_TURNS = 2  # Calls of a program; each is compiled.
_ROUNDS = 8  # Runs of a program; the median of all calls counts.
_BETTER = 0.98  # Of the best time so far: less is noise.


class Case(NamedTuple):
  """What tiles are wanted for.

  Attributes:
    shape: of `bench_models.MODELS`.
    form: what the experts are stored as.
    rows: of a launch.
  """

  shape: str
  form: str
  rows: int


class Found(NamedTuple):
  """The best tile of one kernel, and what it takes.

  Attributes:
    tile: see `kernel_tiles`.
    us: microseconds of a call.
    before_us: with the tile that is taken now.
  """

  tile: kernel_tiles.Tile
  us: float
  before_us: float


def search(
  start: kernel_tiles.Tile,
  measure: Callable[[kernel_tiles.Tile], float],
  fixed: Container[str] = (),
) -> Found:
  """Changes one field at a time while that helps, but for `fixed` ones.

  `measure` gives a tile's microseconds, infinity where it cannot run.
  """
  seen: dict[kernel_tiles.Tile, float] = {start: measure(start)}
  best = start
  while True:
    for tile in _around(best, fixed):
      if tile not in seen:
        seen[tile] = measure(tile)
    found = min(seen, key=seen.__getitem__)
    if seen[found] >= _BETTER * seen[best]:
      return Found(best, seen[best], seen[start])
    best = found


def _around(
  tile: kernel_tiles.Tile, fixed: Container[str]
) -> Iterator[kernel_tiles.Tile]:
  for name, values in _CHOICES.items():
    if name in fixed:
      continue
    at = values.index(getattr(tile, name))
    for value in (*values[max(0, at - 1) : at], *values[at + 1 : at + 2]):
      yield tile._replace(**{name: value})


class Sweep:
  """The two kernels of a case, on random experts of a few layers."""

  def __init__(self, case: Case):
    config = bench_models.MODELS[case.shape]
    stored = storage.parse(case.form)
    form = stored if isinstance(stored, quant.Format) else None
    self.form = form.name if form else 'float'
    self.shape, self.rows = config.expert_shape, case.rows
    gpu = jax.default_backend() == 'gpu'
    dtype = jnp.bfloat16 if gpu else jnp.float32
    e, t = config.num_experts, config.top_k
    data = launch_times.pool(config, form, _LAYERS * e, True, dtype)
    self._pool: Any = data
    if form:
      self._pool = quant.Packed(data, quant.layout(form, self.shape))
    rng = np.random.default_rng(0)
    # Other choices each turn: equal calls would be made once.
    turns = range(_TURNS)
    ids = [[rng.permutation(e)[:t] for _ in range(case.rows)] for _ in turns]
    first = np.arange(_TURNS)[:, None, None] % _LAYERS * e
    self._slots = jnp.asarray(first + np.array(ids), jnp.int32)
    self._control = jnp.arange(_LAYERS * e, dtype=jnp.int32)
    self._experts = e
    x = rng.normal(size=(case.rows, config.model_dim))
    self._h = jnp.asarray(x, dtype)
    listed = kernel_rows.listed(self._place(0), self._slots[0])
    wide = rng.normal(size=(listed, case.rows, config.expert_dim))
    self._hidden = jnp.asarray(wide, dtype)

  def _place(self, turn: int) -> kernel_rows.Place:
    layer = jnp.full((1,), turn % _LAYERS, jnp.int32)
    return kernel_rows.Place(
      self._control, layer, 0, 0, _LAYERS, _LAYERS, self._experts
    )

  def best(self, inner: Sequence[int] = ()) -> tuple[Found, Found]:
    """For gate and up, and for the way down.

    `inner` of each, where it is given: sums of the same steps for all rows.
    """
    now = kernel_tiles.expert(self.form, self.shape, self.rows)
    fixed = ['inner'] if inner else []
    found = []
    for part, tile in enumerate(now):
      start = tile._replace(inner=inner[part]) if inner else tile
      found.append(search(start, functools.partial(self.time, part), fixed))
    return found[0], found[1]

  def time(self, part: int, tile: kernel_tiles.Tile) -> float:
    """Microseconds of a kernel; infinity where it cannot be compiled."""
    module: Any = kernel_experts
    if isinstance(self._pool, quant.Packed):
      module = kernel_packed
    kernel = module.down if part else module.gate_up
    given = self._hidden if part else self._h

    @jax.jit
    def run(pool: Any, given: Any, slots: Any, control: Any) -> list[Any]:
      out = []
      for turn in range(_TURNS):
        place = self._place(turn)._replace(control=control)
        out.append(kernel(pool, given, slots[turn], place, tile))
      return out

    arguments = self._pool, given, self._slots, self._control
    try:
      jax.block_until_ready(run(*arguments))
    except jax.errors.JaxRuntimeError:
      return float('inf')  # Too much shared memory, say.
    name = kernel.__name__
    spent = _profiled(lambda: jax.block_until_ready(run(*arguments)), name)
    return statistics.median(spent)


def _profiled(run: Callable[[], Any], name: str) -> list[float]:
  """Microseconds of each call of a kernel, `_ROUNDS` runs of a program.

  By the profiler where a GPU computes: XLA takes 60 us from one kernel to the
  next, longer than most of them. By the clock elsewhere.
  """
  with tempfile.TemporaryDirectory() as folder:
    spent = []
    with jax.profiler.trace(folder):
      for _ in range(_ROUNDS):
        begun = time.perf_counter()
        run()
        spent.append((time.perf_counter() - begun) / _TURNS * 1e6)
    files = pathlib.Path(folder).rglob('*.trace.json.gz')
    told = [json.loads(gzip.decompress(file.read_bytes())) for file in files]
  found = on_device(told[0]['traceEvents'], name) if told else []
  return found or spent


def on_device(events: Sequence[dict[str, Any]], name: str) -> list[float]:
  """Microseconds of each kernel whose name begins so, by a profile's events."""
  gpus = {
    event['pid']
    for event in events
    if event.get('name') == 'process_name' and 'GPU' in event['args']['name']
  }
  return [
    event['dur']
    for event in events
    if event.get('ph') == 'X'
    and event['pid'] in gpus
    and event['name'].startswith(name)
  ]
