"""What no engine can go below: bytes of memory, bytes of the link."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from bevy_jax import device as device_lib
from bevy_jax import events, protocols
from bevy_jax import window as window_lib
from bevy_jax.layers import config as model_config


class Rates(NamedTuple):
  """What this machine was measured to move.

  Attributes:
    memory_gb_per_s: of a copy on the device, reads and writes.
    link_gb_per_s: of loads through the executor's own link.
  """

  memory_gb_per_s: float
  link_gb_per_s: float


class Bytes(NamedTuple):
  """What a full pass of all rows reads.

  Attributes:
    shared: shared weights of all layers and the head, once a pass.
    expert: one expert.
    kv: keys and values of one position of one row, all layers.
  """

  shared: int
  expert: int
  kv: int


def count(
  config: model_config.ModelConfig, params: dict[str, Any], expert: int
) -> Bytes:
  """The bytes of a model; of the embedding only what serves as the head."""
  kept = {k: v for k, v in params.items() if k != 'embed' or config.tied}
  layers = [
    {k: v for k, v in p.items() if k != 'forced'} for p in params['layers']
  ]
  leaves = jax.tree.leaves(kept | {'layers': layers})
  width = config.num_kv_heads * config.head_dim * leaves[0].dtype.itemsize
  return Bytes(
    sum(leaf.nbytes for leaf in leaves),
    expert,
    2 * config.num_layers * width,
  )


def find(
  log: Sequence[events.Event],
  window: window_lib.Window,
  sizes: Bytes,
  rates: Rates,
  *,
  rows: int,
  layers: int,
  past: int,
  loads: int,
) -> dict[str, float]:
  """Seconds of the window's floors, and tokens/s that they allow.

  The memory floor lets all rows go through a layer together: shared weights
  once a pass, each distinct expert of a step once, each row's own keys and
  values. The link floor is what this run has loaded at the link's best rate.

  Args:
    log: of a run.
    window: what was measured of it.
    sizes: see `Bytes`.
    rates: see `Rates`.
    rows: R.
    layers: MoE layers.
    past: positions that every row began with.
    loads: that began in the window.
  """
  used: dict[tuple[int, int], int] = {}
  revealed = positions = 0
  for event in window.inside(log):
    if isinstance(event, events.Routed):
      revealed += 1
      positions += past + event.token + 1
      at = event.token, event.layer
      for e in event.experts:
        used[at] = used.get(at, 0) | 1 << e
  distinct = sum(bitmap.bit_count() for bitmap in used.values())
  passes = revealed / layers / rows
  nbytes = passes * sizes.shared + distinct * sizes.expert
  nbytes += positions / layers * sizes.kv
  memory_s = nbytes / rates.memory_gb_per_s * 1e-9
  link_s = loads * sizes.expert / rates.link_gb_per_s * 1e-9
  tokens = window.tokens(log)
  return {
    'memory_floor_s': memory_s,
    'link_floor_s': link_s,
    'memory_floor_tokens_per_s': tokens / memory_s if memory_s else 0.0,
    'link_floor_tokens_per_s': tokens / link_s if link_s else 0.0,
    'of_the_floor': max(memory_s, link_s) / window.seconds,
    'distinct_a_pass': distinct / passes if passes else 0.0,
  }


def link_gb_per_s(
  executor: device_lib.DeviceExecutor,
  count: int,
  nbytes: int,
  depth: int,
  budget: int,
) -> float:
  """Rate of loads through an executor's own link, the better of two runs.

  Args:
    executor: nothing may be in flight; slots are overwritten.
    count: experts in the store.
    nbytes: of each.
    depth: loads at once.
    budget: bytes to move, within 16 to 512 loads.
  """
  many = min(max(budget // nbytes, 16), 512)
  depth = max(1, min(depth, count, executor.slots))
  best = 0.0
  for _ in range(2):
    begun = landed = 0
    start = executor.now()
    while landed < many:
      while begun < many and begun - landed < depth:
        executor.load(begun % count, begun % executor.slots)
        begun += 1
      happened = executor.poll()
      for event in happened:
        if isinstance(event, protocols.Failed):
          raise ValueError(f'a load failed: {event.reason}.')
      landed += len(happened)
      if not happened:
        executor.wait()
    executor.drain()
    best = max(best, many * nbytes / (executor.now() - start))
  return best
