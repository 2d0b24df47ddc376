"""Measures this machine for the simulator: link, memory, launches, layers."""

import dataclasses
import datetime
import json
import math
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.table

from bevy_jax import config as config_lib
from bevy_jax import loading
from bevy_jax.experiments import (
  host_times,
  layer_times,
  link_speed,
  outcome,
  overrides,
  run,
)
from bevy_jax.layers import config as model_config
from bevy_jax.layers import params as params_lib
from bevy_jax.offload import cuda, host_store

VERSION = 2  # Of platform.json.
_TOKENS = 24  # Decoded to see what the host does.
_WARMUP = 4  # Of them.
_TURNS = 3  # Runs of each scheduler.
_COPIES = 8


class Found(NamedTuple):
  """Everything measured; see `document` for what becomes of it.

  Attributes:
    expert_bytes: of an expert of the model.
    layer_bytes: shared weights of one of its layers, on average.
    links: rates by transfer, the one that is used first.
    memory_gb_per_s: of a copy on the device, reads and writes.
    launch_us: from the call to the end of a launch without work.
    prefill_us: of one more prompt token in a layer.
    host: what the host does.
    beside: what launches took beside it.
    table: decode launches, corrected by that.
    head: (rows, us) of head and sampling.
    head_bytes: of the head.
  """

  expert_bytes: int
  layer_bytes: int
  links: dict[str, list[link_speed.Rate]]
  memory_gb_per_s: float
  launch_us: float
  prefill_us: float
  host: host_times.Host
  beside: list[host_times.Beside]
  table: list[layer_times.Launch]
  head: list[tuple[int, float]]
  head_bytes: int

  @property
  def link_depth(self) -> int:
    """The least depth that is within 5 % of the best for this model."""
    rates = next(iter(self.links.values()))
    return link_speed.best_depth(rates, self.expert_bytes)


def measure(model: loading.Loaded, config: config_lib.EngineConfig) -> Found:
  """All of it, with the link that `config.link` gives."""
  nbytes = model.experts.block_bytes
  leaves = jax.tree.leaves(model.params['layers'])
  probe = layer_times.Probe(model, config)
  used = probe.executor.link.transfer
  (table, head), prefill = probe.table(), probe.prefill_us()
  runs, rows = probe.runs(_TOKENS, _TURNS), config.requests
  host = host_times.host(runs, rows, _WARMUP)
  beside = host_times.beside(
    runs, table, len(model.config.moe_ids), probe.buckets, rows, _WARMUP
  )
  table, head = host_times.corrected(table, head, beside, probe.buckets)
  del probe
  gpu = jax.default_backend() != 'cpu'
  top = 2**24 if gpu else 2**22
  sizes = sorted({nbytes, *(4**i for i in range(8, 13) if 4**i <= top)})
  names = [used, *({'cuda', 'device_put'} - {used})]
  links = {
    name: link_speed.measure(name, sizes, 2**29 if gpu else 2**26)
    for name in names
    if name != 'cuda' or not cuda.obstacle(jax.devices()[0])
  }
  if not host.loads:
    # With room for all experts the runs loaded nothing: what is known of a
    # load's host time is how long the link alone kept it.
    alone = [r for r in links[used] if r.nbytes == nbytes]
    host = host._replace(land=alone[-1].host_us)
  return Found(
    expert_bytes=nbytes,
    layer_bytes=sum(leaf.nbytes for leaf in leaves) // model.config.num_layers,
    links=links,
    memory_gb_per_s=memory_gb_per_s(2**30 if gpu else 2**26),
    launch_us=empty_launch_us(),
    prefill_us=prefill,
    host=host,
    beside=beside,
    table=table,
    head=head,
    head_bytes=head_bytes(model.params),
  )


def head_bytes(params: dict[str, Any]) -> int:
  """Of the matrix that the last layer's output goes through."""
  return int(params['head' if 'head' in params else 'embed'].nbytes)


def memory_gb_per_s(nbytes: int) -> float:
  """Bytes read and written by copies on the device, best of five."""
  add = jax.jit(lambda x: x + 1)
  x = jnp.arange(nbytes // 4, dtype=jnp.float32)
  jax.block_until_ready(add(x))
  spent = []
  for _ in range(5):
    begun = time.perf_counter()
    # Several in a row, so that one wait for the last is nothing beside them.
    jax.block_until_ready([add(x) for _ in range(_COPIES)])
    spent.append(time.perf_counter() - begun)
  return _COPIES * 2 * nbytes / min(spent) * 1e-9


def empty_launch_us() -> float:
  """From the call to the end of a launch that adds one, median of 100."""
  home = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  host = home.with_memory_kind('pinned_host')
  add = jax.jit(lambda x: (x + 1, x), out_shardings=(home, host))
  x, _ = jax.block_until_ready(add(jnp.zeros(8, jnp.int32, device=home)))
  spent = []
  for _ in range(100):
    x, answer = add(x)
    begun = time.perf_counter()
    answer.block_until_ready()
    spent.append(time.perf_counter() - begun)
  return statistics.median(spent) * 1e6


def document(found: Found, source: str) -> dict[str, Any]:
  """`platform.json`; the rates are those of the transfer that is used."""
  rates = next(iter(found.links.values()))
  device = jax.devices()[0]
  return {
    'version': VERSION,
    'device': f'{device.platform}: {device.device_kind}',
    'source': source,
    'link': {
      'latency_us': link_speed.latency_us(rates, found.expert_bytes),
      'gb_per_s': [
        {'bytes': r.nbytes, 'depth': r.depth, 'gb_per_s': r.gb_per_s}
        for r in rates
      ],
    },
    'memory_gb_per_s': found.memory_gb_per_s,
    'launch_us': found.launch_us,
    'prefill_us': found.prefill_us,
    'host': {
      'launch_us': found.host.launch,
      'answer_us': found.host.answer,
      'row_us': found.host.row,
      'load_us': found.host.load,
      'land_us': found.host.land,
      'look_us': found.host.look,
      'wake_us': found.host.wake,
    },
    'layer': {
      'expert_bytes': found.expert_bytes,
      'layer_bytes': found.layer_bytes,
      'table': [
        {'rows': m.rows, 'distinct': m.distinct, 'hops': 1, 'us': m.us}
        for m in found.table
      ],
    },
    'head': {
      'bytes': found.head_bytes,
      'table': [{'rows': rows, 'us': us} for rows, us in found.head],
    },
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
  """What is measured.

  Attributes:
    model: 'demo' or a directory; not looked at where a shape is given.
    shape: `field=value` of a random model, see `random_model`.
    engine: how it runs.
  """

  model: str
  shape: tuple[str, ...]
  engine: config_lib.EngineConfig


def main(asked: Asked, out: str) -> outcome.Outcome:
  """Measures, writes the platform to `out` and shows the tables.

  Raises:
    ValueError: no such model, shape or folder, or a throttled link.
  """
  config = asked.engine
  if config.link.startswith('throttled'):
    raise ValueError(f'link {config.link!r} is not this machine; give auto.')
  folder = pathlib.Path(out).resolve().parent
  if not folder.is_dir():
    raise ValueError(f'{out} cannot be written: {folder} does not exist.')
  begun = time.perf_counter()
  if asked.shape:
    loaded = random_model(asked.shape, config)
  else:
    dtype = config_lib.param_dtype(config)
    loaded = loading.load(asked.model, param_dtype=dtype, engine=config)
  config = _room(config, loaded.config)
  found = measure(loaded, config)
  versions = ', '.join(f'{k} {v}' for k, v in run.versions().items())
  today = datetime.date.today().isoformat()
  whole = document(found, f'{run.command()}; {today}; {versions}')
  pathlib.Path(out).write_text(json.dumps(whole, indent=1) + '\n', 'utf-8')
  last = (
    f'{out}, {time.perf_counter() - begun:.0f} s; use it with '
    f'--platform=file:{out}'
  )
  return outcome.Outcome(whole, (*_shown(found), last))


def random_model(
  shape: Sequence[str], config: config_lib.EngineConfig
) -> loading.Loaded:
  """A model of a shape (`num_layers=2`, `expert_dim=768`, ...), all MoE.

  What is not given is as in `layers.config.tiny`. The experts are one block
  of random weights, turned by another number of places for each.
  """
  found = overrides.apply(model_config.tiny(), shape)
  found = dataclasses.replace(
    found, moe_layers=(True,) * found.num_layers, context=4096
  )
  wanted = config_lib.param_dtype(config) or 'bfloat16'
  dtype = np.dtype(jnp.dtype(wanted))
  params = jax.tree.map(
    lambda leaf: leaf.astype(dtype), params_lib.init(found, jax.random.key(0))
  )
  one = np.random.default_rng(0).normal(size=math.prod(found.expert_shape))
  one = (one / math.sqrt(found.model_dim)).astype(dtype)

  def fill(key: int, out: np.ndarray) -> None:
    out.reshape(-1)[:] = np.roll(one, key * 7919)

  count = found.num_layers * found.num_experts
  memory = loading.memory(config.link, count, found.expert_shape, dtype, dtype)
  store = host_store.HostStore.build(
    count, found.expert_shape, dtype, fill, memory=memory
  )
  return loading.Loaded(found, params, store, pathlib.Path())


def _room(
  config: config_lib.EngineConfig, model: model_config.ModelConfig
) -> config_lib.EngineConfig:
  """Slots for all experts of a layer, so that a launch may use any of them."""
  slots = max(config_lib.slots(config, model), model.num_experts)
  return dataclasses.replace(config, cache=slots)


def _shown(found: Found) -> Iterator[rich.table.Table | str]:
  for name, rates in found.links.items():
    table = rich.table.Table(title=f'link by {name}: GB/s (host us a load)')
    table.add_column('bytes', justify='right')
    for depth in link_speed.DEPTHS:
      table.add_column(f'{depth} at once', justify='right')
    for nbytes in sorted({r.nbytes for r in rates}):
      here = [r for r in rates if r.nbytes == nbytes]
      cells = [f'{r.gb_per_s:.2f} ({r.host_us:.0f})' for r in here]
      table.add_row(f'{nbytes:,}', *cells)
    yield table
  table = rich.table.Table(title='one layer of decoding, us')
  counts = sorted({m.distinct for m in found.table})
  for name in ('rows', *(f'{n} experts' for n in counts)):
    table.add_column(name, justify='right')
  for rows in sorted({m.rows for m in found.table}):
    us = {m.distinct: f'{m.us:.0f}' for m in found.table if m.rows == rows}
    table.add_row(f'{rows}', *(us.get(n, '') for n in counts))
  yield table
  host = found.host
  lines = (
    f'device memory {found.memory_gb_per_s:.1f} GB/s; an empty launch '
    f'{found.launch_us:.0f} us; a prompt token {found.prefill_us:.2f} us a '
    'layer',
    'head and sampling, us more by rows: '
    + (', '.join(f'{rows}: {us:.0f}' for rows, us in found.head) or 'included'),
    'in runs launches take so many times as long as one by one, by rows: '
    + ', '.join(f'{b.rows}: {b.factor:.2f} ({b.seen})' for b in found.beside),
    f'host: {host.launch:.0f} us a launch, {host.answer:.0f} us an answer, '
    f'{host.row:.0f} us a row of it; {host.load:.0f} us a load that begins, '
    f'{host.land:.0f} us one that lands ({host.loads:.1f} loads a launch); it '
    f'looks every {host.look:.0f} us and oversleeps {host.wake:.0f} us',
    f'link_depth={found.link_depth} is within 5 % of the best for '
    f'{found.expert_bytes:,} bytes',
  )
  yield from lines
