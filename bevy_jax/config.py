"""How to run: one frozen record, checked before anything is built."""

import dataclasses
import math

import jax

from bevy_jax import hops, policies
from bevy_jax.layers import config as model_config
from bevy_jax.offload import host_store, slot_table

# Who describes a run finds its policies here as well.
SCHEDULERS = policies.SCHEDULERS
EVICTIONS = policies.EVICTIONS
PREFETCHERS = policies.PREFETCHERS
HOST_EVICTIONS = policies.HOST_EVICTIONS
choose = policies.choose
names = policies.names
check_eviction = policies.check_eviction
check_prefetch = policies.check_prefetch
parse_prefetch = policies.parse_prefetch
warmed = policies.warmed
KERNELS = ('auto', 'on', 'off')
CAPACITIES = ('global', 'layer')


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
  """Everything that a run depends on beside the model and its requests.

  Attributes:
    cache: experts on the device: a float is a fraction of all (layer,
      expert) pairs, an integer a number of slots.
    cache_gib: the same as bytes in GiB, to compare at equal bytes; 0 for what
      `cache` says.
    host_gib: GiB of host memory for experts, those on the device included;
      the others stay on disk. 0 for all of them.
    host_eviction: which expert in host memory makes room for another one.
    capacity: 'global', where all layers share the slots, or 'layer', where
      each layer has an even part of them for its own experts alone.
    requests: R, rows that decode at the same time; more requests wait.
    scheduler: a name of `SCHEDULERS`, or one of your own: an object, or text
      such as 'my_module.MyScheduler(lag=3)'; see `policies`.
    eviction: a name of `EVICTIONS`, 'static' with a trace, or your own.
    prefetch: a name of `PREFETCHERS`, with options as in
      'transition:depth=2:confidence=0.3', or your own; see `parse_prefetch`.
    trace: a routing trace whose most used experts `static` keeps, and that
      `transition` and `popularity` start from with `warm=true`.
    hops: layers that a launch may cross where the experts are there: a
      number, 'pass' for all; 'auto' is 8 through the GPU kernels, else 1.
    link: 'auto' is 'cuda' (direct copies) where it can be and 'device_put'
      elsewhere; either by name; or 'throttled:GB_PER_S[:LATENCY_US]', which
      makes a slower link of what 'auto' gives.
    link_depth: loads on the link at once.
    context: positions a row can hold; 0 for what the requests need.
    chunk: prompt tokens a row that one prefill launch takes.
    dtype: 'float32' or 'bfloat16'; 'auto' is float32 on a CPU, where
      bfloat16 is many times slower, and the checkpoint's type elsewhere.
    strict: one row bucket, and float32 where dtype is 'auto': bitwise equal
      under every scheduler. Without it a group of another size may be
      multiplied in another order.
    kernels: 'auto' decodes through the GPU kernels in bfloat16 on a GPU.
    warmup: decode tokens a request before the measured window opens.
  """

  cache: float | int = 0.5
  cache_gib: float = 0.0
  host_gib: float = 0.0
  host_eviction: str = 'lfu_decayed'
  capacity: str = 'global'
  requests: int = 8
  scheduler: policies.Scheduler = 'runahead'
  eviction: policies.Eviction = 'lfu_decayed'
  prefetch: policies.Prefetcher = 'none'
  trace: str = ''
  hops: int | str = 'auto'
  link: str = 'auto'
  link_depth: int = 4
  context: int = 0
  chunk: int = 32
  dtype: str = 'auto'
  strict: bool = False
  kernels: str = 'auto'
  warmup: int = 8

  def __post_init__(self) -> None:
    policies.scheduler(self.scheduler)
    choose('capacity', self.capacity, CAPACITIES)
    check_eviction(self.eviction, self.trace)
    check_prefetch(self.prefetch, self.trace)
    choose('host eviction', self.host_eviction, HOST_EVICTIONS)
    choose('dtype', self.dtype, ('auto', 'float32', 'bfloat16'))
    choose('kernels', self.kernels, KERNELS)
    parse_link(self.link)
    hops.check(self.hops)
    for name, least in (
      ('requests', 1),
      ('link_depth', 1),
      ('context', 0),
      ('chunk', 1),
      ('warmup', 0),
    ):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f'{name} is {value!r}; it must be an integer.')
      if value < least:
        raise ValueError(f'{name} is {value}; it must be at least {least}.')
    for name in ('cache_gib', 'host_gib'):
      gib = getattr(self, name)
      number = isinstance(gib, int | float) and not isinstance(gib, bool)
      if not number or not math.isfinite(gib) or gib < 0:
        raise ValueError(
          f'{name} is {gib!r}; give GiB such as 24 or 1.5, or 0 for no budget.'
        )
    if isinstance(self.cache, bool) or not isinstance(self.cache, int | float):
      raise ValueError(
        f'cache is {self.cache!r}; give a fraction such as 0.5 or a number of '
        'slots such as 64.'
      )
    if isinstance(self.cache, float) and not 0 < self.cache <= 1:
      raise ValueError(
        f'cache is {self.cache}; a value with a point is a fraction of all '
        'experts and must lie in (0, 1]. Give a whole number for slots.'
      )


def parse_link(link: str) -> tuple[str, float, float]:
  """A link's kind, bandwidth in GB/s (0 unbounded) and latency in us."""
  kind, *numbers = link.split(':')
  choose('link', kind, ('auto', 'cuda', 'device_put', 'throttled'))
  form = "'auto', 'cuda', 'device_put' or 'throttled:GB_PER_S[:LATENCY_US]'"
  if kind != 'throttled':
    if numbers:
      raise ValueError(f'link is {link!r}; {kind} takes no numbers: {form}.')
    return kind, 0.0, 0.0
  try:
    values = [float(n) for n in numbers]
  except ValueError:
    values = []
  sound = all(math.isfinite(v) and v >= 0 for v in values)
  if len(values) not in (1, 2) or not sound or values[0] == 0:
    raise ValueError(f'link is {link!r}; it must be {form}.')
  return kind, values[0], values[1] if len(values) == 2 else 0.0


def slots(
  config: EngineConfig, model: model_config.ModelConfig, block_bytes: int = 0
) -> int:
  """Slots of the cache; ValueError says the least.

  `block_bytes` are those of one slot: what `cache_gib` is counted in.
  """
  pairs = len(model.moe_ids) * model.num_experts
  asked, count = f'cache {config.cache}', config.cache
  if config.cache_gib:
    asked = f'cache_gib {config.cache_gib}'
    count = int(config.cache_gib * 2**30) // block_bytes
  elif isinstance(config.cache, float):
    count = int(config.cache * pairs)
  parts = len(model.moe_ids) if config.capacity == 'layer' else 1
  least = parts * model.top_k
  if count < least:
    each = f' in each of {parts} layers' if parts > 1 else ''
    enough = f'a fraction of {math.ceil(least / pairs * 1e4) / 1e4}'
    if config.cache_gib:
      enough = f'a cache_gib of at least {_gib(least * block_bytes)}'
    raise ValueError(
      f'{asked} is {count} slots, but one token uses {model.top_k} experts of '
      f'a layer at once{each}; give at least {least} slots, or {enough}.'
    )
  return min(int(count), pairs)


def host_blocks(config: EngineConfig, count: int, block_bytes: int) -> int:
  """How many of `count` experts host memory holds; `count` where all fit.

  Args:
    config: how to run.
    count: experts of the model.
    block_bytes: of one, as it lies in memory.

  Raises:
    ValueError: too few; says the least.
  """
  if not config.host_gib:
    return count
  blocks = min(int(config.host_gib * 2**30) // block_bytes, count)
  # Every load that may be on the link needs its block at the same time.
  least = min(config.link_depth, count)
  if blocks < least:
    raise ValueError(
      f'host_gib {config.host_gib} holds {blocks} experts of {block_bytes:,} '
      f'bytes, but {config.link_depth} loads may be on the link at once '
      '(link_depth) and each needs its own; give at least '
      f'{_gib(least * block_bytes)}, or 0 for all {count} experts.'
    )
  return blocks


def _gib(nbytes: int) -> str:
  """Rounded up, so that giving it is enough."""
  return f'{math.ceil(nbytes / 2**30 * 1e6) / 1e6:.6f}'


def quota(config: EngineConfig, layers: int, slots: int) -> tuple[int, ...]:
  """Slots that each layer may fill; empty where all share one pool."""
  return slot_table.split(slots, layers) if config.capacity == 'layer' else ()


def param_dtype(config: EngineConfig) -> str | None:
  """Type of the weights on the device; None for the checkpoint's own."""
  if config.dtype != 'auto':
    return config.dtype
  exact = config.strict or jax.default_backend() == 'cpu'
  return 'float32' if exact else None


def device_bytes(device: jax.Device) -> int | None:
  """Bytes that a device can still give; None where it does not tell."""
  stats = device.memory_stats() if device.platform != 'cpu' else None
  if stats and 'bytes_limit' in stats:
    return int(stats['bytes_limit'] - stats.get('bytes_in_use', 0))
  return host_store.available()


def check_memory(
  config: EngineConfig, pool: int, kv: int, device: jax.Device
) -> None:
  """ValueError where the cache and the keys and values cannot fit."""
  have = device_bytes(device)
  if have is not None and pool + kv > have:
    raise ValueError(
      f'cache {config.cache} takes {pool / 2**30:.2f} GiB and the keys and '
      f'values of {config.requests} requests take {kv / 2**30:.2f} GiB, but '
      f'{device.device_kind} has {have / 2**30:.2f} GiB left; lower cache, '
      'requests or context.'
    )
