"""What usual batched engines do: the whole batch, layer by layer."""

import dataclasses

from bevy_jax import protocols
from bevy_jax import request as request_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lockstep:
  """All active requests at one layer, in order; stalls on every miss.

  After the router all misses of the batch are wanted at once, in ascending
  order, and the experts are applied when all are resident. A union larger
  than what the layer may hold goes in waves of ascending ids. Requests that
  joined while the others were in the middle of a pass catch up with them
  first.
  """

  depth: int = 1

  def wants(self, view: protocols.View) -> list[protocols.Want]:
    """See `Scheduler`: the current wave of the batch's one layer."""
    batch = _batch(view)
    if not batch:
      return []
    layer, union = batch[0].layer, _union(batch)
    return [protocols.Want(layer, wave(union, view.room(layer)))]

  def launch(self, view: protocols.View) -> protocols.Launch | None:
    """See `Scheduler`: the wave once it is resident."""
    batch = _batch(view)
    if view.in_flight or not batch:
      return None
    layer, union = batch[0].layer, _union(batch)
    experts = wave(union, view.room(layer))
    if experts & ~view.resident[layer]:
      return None
    return protocols.Launch(layer, batch, experts, finish=experts == union)


def wave(experts: int, slots: int) -> int:
  """The lowest `slots` bits of a bitmap."""
  if experts.bit_count() <= slots:
    return experts
  kept = 0
  for _ in range(slots):
    low = experts & -experts
    kept |= low
    experts ^= low
  return kept


def _batch(view: protocols.View) -> list[request_lib.Progress]:
  """Who goes next: all at the least position, once everybody waits."""
  if not view.waiting or len(view.waiting) < view.active:
    return []
  last = min(p.position for p in view.waiting)
  return [p for p in view.waiting if p.position == last]


def _union(waiting: list[request_lib.Progress]) -> int:
  union = 0
  for progress in waiting:
    union |= progress.need
  return union
