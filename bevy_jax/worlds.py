"""Random small worlds, and a run of three policies in one of them."""

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bevy_jax import engine, events, protocols, scripted, twice
from bevy_jax import request as request_lib
from bevy_jax import watch as watch_lib
from bevy_jax.law import LawBroken, must
from bevy_jax.layers import config as model_config
from bevy_jax.offload import eviction as eviction_lib
from bevy_jax.offload import prefetch, slot_table

_MOODS = 8  # Looks at who is said to wait for ever.
_STEPS = 20_000  # More than any sound run of such a world takes.


class Trio(NamedTuple):
  """Three policies, and how they are tried.

  Attributes:
    scheduler: who schedules.
    eviction: who evicts; None for `static` with a popularity by chance.
    prefetcher: who prefetches.
    parted: whether every layer has its own part of the slots.
    far: whether the world has up to nine layers, for launches of many.
  """

  scheduler: protocols.Scheduler
  eviction: protocols.Eviction | None
  prefetcher: protocols.Prefetcher = prefetch.PREFETCHERS['none']
  parted: bool = False
  far: bool = False


class World(NamedTuple):
  """A random machine, model and list of requests.

  Attributes:
    model: its shape; nothing else of it is used.
    rows: R.
    slots: size of the cache.
    link_depth: loads on the link at once.
    requests: what is asked for.
    arrivals: steps of the engine before each of them is submitted.
    error: (seed of a request, position, layer) at which a value is not
      finite; None for none.
    seed: what it was drawn by.
    faults: how likely a load fails.
  """

  model: model_config.ModelConfig
  rows: int
  slots: int
  link_depth: int
  requests: list[request_lib.Request]
  arrivals: list[int]
  error: tuple[int, int, int] | None
  seed: int
  faults: float = 0.0


def world(seed: int, far: bool = False) -> World:
  """A world drawn by a seed; a far one has up to nine layers."""
  rng = random.Random(seed)
  most = 9 if far else 4
  layers, experts = rng.randint(1, most), rng.randint(4, 12)
  top_k = rng.randint(1, 4)
  trailing = rng.random() < 0.3
  model = model_config.tiny(
    num_layers=layers + trailing,
    num_experts=experts,
    top_k=top_k,
    moe_layers=(True,) * layers + (False,) * trailing,
    dense_dim=8,
  )
  pairs = layers * experts
  few = rng.randint(top_k, 2 * experts)
  sizes = (top_k, 2 * top_k - 1, few, few, few, pairs)
  # Who is to come far needs most of the experts.
  slots = rng.choice((*sizes, pairs, pairs) if most > 4 else sizes)
  count = rng.randint(1, 12)
  requests = [
    request_lib.Request(
      number=i,
      prompt=tuple(rng.randrange(20) for _ in range(rng.choice((1, 2, 5, 13)))),
      new_tokens=rng.randint(1, 6),
      sampling=request_lib.SamplingParams(seed=rng.randrange(6)),
      eos_ids=(0, 1),
    )
    for i in range(count)
  ]
  who = rng.choice(requests)
  at = len(who.prompt) - 1 + rng.randint(0, 2)
  error = (who.sampling.seed, at, rng.randrange(layers))
  return World(
    model,
    rng.randint(1, 8),
    min(slots, pairs),
    rng.randint(1, 8),
    requests,
    sorted(rng.choice((0, rng.randrange(150))) for _ in range(count)),
    error if rng.random() < 0.3 else None,
    seed,
    rng.choice((0.0, 0.0, 0.02, 0.3)),
  )


def run(trio: Trio, world: World, pure: bool = False) -> list[events.Event]:
  """Runs a world under watch, past the landing of the last load.

  Args:
    trio: the policies.
    world: where.
    pure: whether every policy is asked twice, see `twice`.

  Raises:
    LawBroken: a law was broken on the way.
  """
  quota = parts(trio, world)
  slots = sum(quota) or world.slots
  fake = scripted.Scripted(
    world.model, slots, world.seed, world.error, world.faults
  )
  scheduler, eviction, prefetcher = _policies(trio, world, pure)
  found = engine.Engine(
    world.model,
    fake,
    scheduler,
    eviction,
    rows=world.rows,
    slots=slots,
    link_depth=world.link_depth,
    prefetcher=prefetcher,
    quota=quota,
  )
  bound = world.rows * world.model.top_k + 2 * world.link_depth
  watch = watch_lib.Watch(found, fake, trio.scheduler, bound)
  submitted = 0
  for step in itertools.count():
    must(step < _STEPS, 'no deadlock', 'requests wait and no end is in sight')
    idle = not found.busy and not fake.busy
    while submitted < len(world.requests) and (
      idle or world.arrivals[submitted] <= step
    ):
      found.submit(world.requests[submitted])
      submitted, idle = submitted + 1, False
    if idle:
      return found.log
    if not found.busy:
      fake.wait()
    try:
      watch.step(submitted, world.rows)
    except LawBroken as error:
      _moody(error, found, scheduler)
      raise
  raise AssertionError


def _moody(
  error: LawBroken, found: engine.Engine, scheduler: protocols.Scheduler
) -> None:
  """Who launches nobody, and later somebody from the same view, is not pure."""
  if error.law != 'no deadlock' or found._prefill is not None:
    return
  if any(scheduler.launch(found.view) for _ in range(_MOODS)):
    what = 'launch: nobody, and then somebody'
    raise LawBroken(twice.PURE, what) from error


def parts(trio: Trio, world: World) -> Sequence[int]:
  """Slots of each layer, at least a token's experts; empty for one pool."""
  if not trio.parted:
    return ()
  layers = len(world.model.moe_ids)
  least = layers * world.model.top_k
  return slot_table.split(max(world.slots, least), layers)


def _policies(
  trio: Trio, world: World, pure: bool
) -> tuple[protocols.Scheduler, protocols.Eviction, protocols.Prefetcher]:
  scheduler, eviction, prefetcher = (
    trio.scheduler,
    trio.eviction,
    trio.prefetcher,
  )
  if eviction is None:
    keys = len(world.model.moe_ids) * world.model.num_experts
    rng = np.random.default_rng(world.seed)
    eviction = eviction_lib.Static(popularity=rng.random(keys))
  if not pure:
    return scheduler, eviction, prefetcher
  return (
    twice.Scheduler(scheduler),
    twice.Eviction(eviction),
    twice.Prefetcher(prefetcher),
  )
