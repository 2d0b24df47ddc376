"""What launches cost device and host, everything resident, random weights."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bevy_jax import launches, programs, protocols, recorder, storage
from bevy_jax import request as request_lib
from bevy_jax.experiments import bench_models, calibration, floors
from bevy_jax.layers import config as model_config
from bevy_jax.layers import experts as experts_lib
from bevy_jax.layers import kernels, params, quant

_RING = 8
_TEMPLATES = 8  # Experts that are drawn; the others repeat them.
_ROUNDS = 5  # Their median counts.


class Point(NamedTuple):
  """What is measured.

  Attributes:
    shape: of `bench_models.MODELS`.
    form: what the experts are stored as.
    rows: of each launch.
    hops: layers of each launch.
    context: positions that every row has.
    kernels: see `EngineConfig`.
    turns: launches of a round.
  """

  shape: str
  form: str
  rows: int
  hops: int
  context: int = 512
  kernels: str = 'auto'
  turns: int = 40


class Cost(NamedTuple):
  """What launches of one point cost.

  Attributes:
    layer_us: of a layer, launches one behind the other, two in flight.
    layer_bytes: that it must read.
    floor_us: these bytes over what memory was measured to move.
    host_us: of a call that begins a launch.
    head_us: what a launch past head and sampling takes more.
    distinct: experts that a layer reads, mean.
    kernels: whether the GPU kernels ran.
  """

  layer_us: float
  layer_bytes: float
  floor_us: float
  host_us: float
  head_us: float
  distinct: float
  kernels: bool


def measure(point: Point, say: Callable[[str], None]) -> Cost:
  """A few layers of a shape, launched again and again.

  The layers are the least that a launch can cross without the head, twice
  over, so that launches read other weights than those before them.
  """
  config = bench_models.MODELS[point.shape]
  layers = 2 * point.hops + 1
  config = dataclasses.replace(
    config, num_layers=layers, moe_layers=(True,) * layers, windows=()
  )
  stored = storage.parse(point.form)
  form = stored if isinstance(stored, quant.Format) else None
  probe = _Probe(config, form, point)
  say('compiled')
  spent, host = probe.run(range(0, 2 * point.hops, point.hops), point.hops)
  plain, _ = probe.run([0], 1)
  last, _ = probe.run([layers - 1], 1)
  gpu = jax.default_backend() == 'gpu'
  rate = calibration.memory_gb_per_s(2**29 if gpu else 2**25)
  return Cost(
    layer_us=spent / point.hops,
    layer_bytes=probe.layer_bytes(),
    floor_us=probe.layer_bytes() / rate * 1e-3,
    host_us=host,
    head_us=last - plain,
    distinct=probe.distinct,
    kernels=probe.kernels,
  )


class _Probe:
  """Launches of a model that is not worth more than its shape.

  Attributes:
    kernels: whether they go through the GPU kernels.
    distinct: experts that the last launches' rows chose at a layer, mean.
  """

  def __init__(
    self,
    config: model_config.ModelConfig,
    form: quant.Format | None,
    point: Point,
  ):
    self._config, self._point = config, point
    on_gpu = jax.default_backend() == 'gpu'
    shared = bench_models.shared(config, 0, 'bfloat16' if on_gpu else 'float32')
    dtype = shared['embed'].dtype
    self._sizes = floors.count(config, shared, 0)
    self._top = sum(
      leaf.nbytes
      for k, leaf in shared.items()
      if k not in ('layers', *([] if config.tied else ['embed']))
    )
    self.kernels = kernels.chosen(point.kernels, config, dtype, form)
    if self.kernels:
      shared = params.stacked(shared)
    device = jax.devices()[0]
    home = jax.sharding.SingleDeviceSharding(device)
    pairs = config.num_layers * config.num_experts
    experts = pool(config, form, pairs, self.kernels, dtype)
    self._pool = jax.device_put(experts, home)
    found = programs.Programs(
      config, jax.device_put(shared, home), point.rows, True, device,
      point.hops, self.kernels,
    )  # fmt: skip
    # Room for the launches and for the token that each pass past the head adds.
    self._context = point.context + 4 * point.turns * _ROUNDS
    self._launches = launches.Launches(
      config, found, device,
      rows=point.rows, chunk=1, context=self._context, room=pairs,
      ring=_RING,
    )  # fmt: skip
    self._launches.fill_caches(0)
    self.distinct = 0.0
    self._how = quant.layout(form, config.expert_shape) if form else None
    capture = recorder.on(device) if self.kernels else None
    if capture:
      self._launches.record(self._experts(), capture)

  def layer_bytes(self) -> float:
    """What a layer must read."""
    config, point = self._config, self._point
    shared = (self._sizes.shared - self._top) / config.num_layers
    block = self._pool.nbytes / self._pool.shape[0]
    kv = self._sizes.kv / config.num_layers * point.rows * point.context
    return float(shared + self.distinct * block + kv)

  def run(self, starts: Any, hops: int) -> tuple[float, float]:
    """Microseconds of a launch, of the call that begins it; medians."""
    rounds, calls = [], []
    for batch in self._batches(starts, hops, 2):
      self._begin(batch).answer.block_until_ready()
    for _ in range(_ROUNDS):
      self._enter()
      flying: list[launches.Begun] = []
      begun = time.perf_counter()
      for batch in self._batches(starts, hops, self._point.turns):
        called = time.perf_counter()
        flying.append(self._begin(batch))
        calls.append(time.perf_counter() - called)
        if len(flying) > 1:
          flying.pop(0).answer.block_until_ready()
      last = flying.pop().answer.block_until_ready()
      rounds.append((time.perf_counter() - begun) / self._point.turns)
    k = self._config.top_k
    ids = np.asarray(last)[: self._point.rows, 2 : 2 + k]
    self.distinct = float(len(np.unique(ids)))
    return statistics.median(rounds) * 1e6, statistics.median(calls) * 1e6

  def _batches(
    self, starts: Any, hops: int, count: int
  ) -> Iterator[protocols.Batch]:
    e, rows = self._config.num_experts, range(self._point.rows)
    made = []
    for start in starts:
      layers = [(start + i) % self._config.num_layers for i in range(hops)]
      table = np.array([range(i * e, i * e + e) for i in layers], np.int32)
      made.append(protocols.Batch('decode', start, rows=rows, tables=table))
    for turn in range(count):
      yield made[turn % len(made)]

  def _begin(self, batch: protocols.Batch) -> launches.Begun:
    return self._launches.begin(batch, self._experts())

  def _experts(self) -> experts_lib.Pool:
    whole: jax.Array = self._pool
    return whole if self._how is None else quant.Packed(whole, self._how)

  def _enter(self) -> None:
    """All rows at the end of their context again."""
    nobody, point = request_lib.SamplingParams(), self._point
    entries = [
      protocols.Entry(row, row + 1, point.context, nobody)
      for row in range(point.rows)
    ]
    batch = protocols.Batch('enter', -1, entries=entries)
    self._begin(batch).answer.block_until_ready()


def pool(
  config: model_config.ModelConfig,
  form: quant.Format | None,
  count: int,
  padded: bool,
  dtype: jnp.dtype,
) -> jax.Array:
  """Random experts, few of them drawn; packed ones in their bytes."""
  how = quant.layout(form, config.expert_shape) if form else None
  kind = np.dtype(np.uint8 if how else dtype)
  size = (how.nbytes,) if how else config.expert_shape
  fill = bench_models.Fill(config, how, kind, 0)
  drawn = np.empty((min(count, _TEMPLATES), *size), kind)
  for key, block in enumerate(drawn):
    fill(key, block)
  if padded and how:
    count = kernels.slots_of(count, how.nbytes, form)
  turns = jnp.arange(count) % len(drawn)
  out: jax.Array = jax.jit(lambda a: a[turns])(jnp.asarray(drawn))
  return out
