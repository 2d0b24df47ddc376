"""How to run: one frozen record, checked before anything is built."""

import dataclasses
import difflib
import math

import jax

from bevy_jax import baselines, protocols, runahead
from bevy_jax import trace as trace_lib
from bevy_jax.layers import config as model_config
from bevy_jax.offload import eviction, host_store

SCHEDULERS: dict[str, protocols.Scheduler] = {
  'lockstep': baselines.Lockstep(),
  'runahead': runahead.Runahead(),
}
# `static` is made from a trace; `belady` would need the future.
EVICTIONS = eviction.EVICTIONS
# Host memory knows no requests: no rule that asks what they will use next.
HOST_EVICTIONS = {n: e for n, e in EVICTIONS.items() if not e.estimates}


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
    requests: R, rows that decode at the same time; more requests wait.
    scheduler: a name of `SCHEDULERS`.
    eviction: a name of `EVICTIONS`, or 'static' with a trace.
    trace: a routing trace whose most used experts `static` keeps.
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
    warmup: decode tokens a request before the measured window opens.
  """

  cache: float | int = 0.5
  cache_gib: float = 0.0
  host_gib: float = 0.0
  host_eviction: str = 'lfu_decayed'
  requests: int = 8
  scheduler: str = 'runahead'
  eviction: str = 'lfu_decayed'
  trace: str = ''
  link: str = 'auto'
  link_depth: int = 4
  context: int = 0
  chunk: int = 32
  dtype: str = 'auto'
  strict: bool = False
  warmup: int = 8

  def __post_init__(self) -> None:
    choose('scheduler', self.scheduler, SCHEDULERS)
    check_eviction(self.eviction, self.trace)
    choose('host eviction', self.host_eviction, HOST_EVICTIONS)
    choose('dtype', self.dtype, ('auto', 'float32', 'bfloat16'))
    parse_link(self.link)
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


def choose(what: str, name: str, known: object) -> None:
  """ValueError with the nearest known name where `name` is not known."""
  names = list(known)  # type: ignore[call-overload]
  if name in names:
    return
  near = [n for n in names if name and n.startswith(str(name))]
  near += difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
  hint = f'; did you mean {near[0]!r}?' if near else '.'
  raise ValueError(f'{what} {name!r} is not known{hint} Known: {names}.')


def check_eviction(name: str, trace: str) -> None:
  """ValueError where an engine cannot run an eviction of this name."""
  if name == 'belady':
    raise ValueError(
      "eviction 'belady' gives up the expert whose next use is farthest, "
      'which no running engine can know; replay a trace with it '
      f'(experiments.ablate --trace=FILE) or choose one of {names()}.'
    )
  choose('eviction', name, names())
  if name == 'static' and not trace:
    raise ValueError(
      "eviction 'static' keeps the most used experts of a routing trace; name "
      'one with trace (--set=engine.trace=FILE).'
    )


def names() -> list[str]:
  """Evictions that an engine can run."""
  return [*EVICTIONS, 'static']


def make_eviction(
  name: str, trace: str, layers: int, experts: int
) -> protocols.Eviction:
  """The eviction of a name that `check_eviction` accepts.

  Args:
    name: what it is called.
    trace: where the trace lies, read for 'static' alone.
    layers: layers of the model that have experts.
    experts: experts of a layer; ValueError where the trace has others.
  """
  if name != 'static':
    return EVICTIONS[name]
  found = trace_lib.load(trace)
  if (found.layers, found.num_experts) != (layers, experts):
    raise ValueError(
      f'trace {trace} has {found.layers} layers of {found.num_experts} '
      f'experts, but the model has {layers} of {experts}; give a trace of '
      'this model.'
    )
  return eviction.Static(popularity=found.popularity())


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
  if config.cache_gib:
    count = int(config.cache_gib * 2**30) // block_bytes
    if count < model.top_k:
      raise ValueError(
        f'cache_gib {config.cache_gib} is {count} slots of {block_bytes:,} '
        f'bytes, but one token uses {model.top_k} experts of a layer at once; '
        f'give at least {_gib(model.top_k * block_bytes)}.'
      )
    return min(count, pairs)
  if isinstance(config.cache, float):
    count = int(config.cache * pairs)
  else:
    count = config.cache
  if count < model.top_k:
    raise ValueError(
      f'cache {config.cache} is {count} slots, but one token uses '
      f'{model.top_k} experts of a layer at once; give at least '
      f'{model.top_k} slots, or a fraction of {model.top_k / pairs:.4f}.'
    )
  return min(count, pairs)


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
