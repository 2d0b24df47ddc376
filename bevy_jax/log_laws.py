"""Laws that an event log must keep, whoever made the decisions."""

from collections.abc import Sequence
from typing import TypeVar

from bevy_jax import events, figures, scripted, validate
from bevy_jax import request as request_lib
from bevy_jax import worlds as worlds_lib
from bevy_jax.law import LawBroken, must

_Kind = TypeVar('_Kind', bound=events.Event)


def check(
  world: worlds_lib.World, log: Sequence[events.Event], quota: Sequence[int]
) -> None:
  """LawBroken where the log of a world breaks a law.

  Args:
    world: where it was made.
    log: its events, past the landing of the last load.
    quota: slots of each layer; empty where all share one pool.
  """
  _texts(world, log)
  _pairs(log)
  _counters(world, log)
  _failures(world, log)
  model = world.model
  facts = validate.Facts(
    len(model.moe_ids),
    model.num_experts,
    sum(quota) or world.slots,
    world.rows,
    quota=quota,
  )
  faults = validate.faults(log, facts)
  must(not faults, 'a schedule is possible', '; '.join(faults[:2]))


def of(log: Sequence[events.Event], kind: type[_Kind]) -> list[_Kind]:
  """The events of one kind."""
  return [event for event in log if isinstance(event, kind)]


def text(world: worlds_lib.World, request: request_lib.Request) -> list[int]:
  """What a request says, whatever runs beside it."""
  out: list[int] = []
  layers = range(len(world.model.moe_ids))
  who, position = request.sampling.seed, len(request.prompt) - 1
  spoilt = {(who, position, layer) for layer in layers}
  while world.error not in spoilt:
    position += 1
    # A token whose own first router fails comes in that router's answer.
    if world.error == (who, position, 0):
      break
    out.append(scripted.draw(who, position - 1))
    if out[-1] in request.eos_ids or len(out) == request.new_tokens:
      break
    spoilt = {(who, position, layer) for layer in layers}
  return out


def _texts(world: worlds_lib.World, log: Sequence[events.Event]) -> None:
  """Everybody ends once, with the tokens that it would have alone."""
  tokens: dict[int, list[events.Token]] = {}
  for event in of(log, events.Token):
    tokens.setdefault(event.request, []).append(event)
  ends = {e.request: e for e in of(log, events.Finished)}
  count = len(of(log, events.Finished))
  once = len(ends) == count == len(world.requests)
  must(once, 'nobody ends twice', f'{count} ends of {len(world.requests)}')
  for request in world.requests:
    mine, end = tokens.get(request.number, []), ends[request.number]
    who = f'request {request.number}'
    order = [t.index for t in mine]
    law = 'tokens in order'
    must(order == [*range(len(mine))], law, f'{who} has tokens {order}')
    wanted, got = text(world, request), [t.token for t in mine]
    if 'broken' in end.detail:
      what = f'{who} ends for {end.reason!r} where a load has failed'
      must(end.reason == 'error', 'every load ends or is told', what)
      wanted = wanted[: len(mine)]
    same = got in (wanted, wanted[: request.new_tokens])
    must(same, law, f'{who} says {got}, alone it says {wanted}')


def _pairs(log: Sequence[events.Event]) -> None:
  """Loads and launches end once each, launches in turn."""
  law, loading = 'every load ends or is told', dict[int, int]()
  for e in log:
    if isinstance(e, events.LoadIssued):
      must(e.key not in loading, 'one copy', f'key {e.key} is loaded twice')
      loading[e.key] = e.slot
    elif isinstance(e, events.LoadLanded | events.LoadFailed):
      slot = loading.pop(e.key, None)
      must(slot == e.slot, law, f'key {e.key} lands in {e.slot}, not {slot}')
  must(not loading, law, f'{loading} never land')
  begun = [e.launch for e in of(log, events.LaunchBegun)]
  ended = [e.launch for e in of(log, events.LaunchEnded)]
  turn = begun == ended == [*range(len(begun))]
  must(turn, 'launches end in turn', f'{begun} begin, {ended} end')


def _counters(world: worlds_lib.World, log: Sequence[events.Event]) -> None:
  """What a report counts can be counted again from the events."""
  counts = figures.cache(log)
  counts |= figures.prefetch(log, world.model.num_experts, -1, len(log), 1)
  uses = sum(len(e.experts) for e in of(log, events.Routed))
  causes = [e.cause for e in of(log, events.LoadIssued)]
  parts = ('demand_loads', 'reloads', 'prefetch_loads')
  fates = _fates(log)
  for what, holds in (
    ('uses', counts['uses'] == uses),
    ('hits', counts['hits'] <= counts['uses']),
    ('parts of loads', counts['loads'] == sum(counts[k] for k in parts)),
    ('loads', counts['loads'] == len(causes) - causes.count('prefill')),
    ('prefetches', counts['prefetch_loads'] == len(fates)),
    ('wasted', counts['wasted_prefetches'] == fates.count('wasted')),
    ('all wasted', counts['wasted_prefetches'] <= counts['wasted_loads']),
    ('late', counts['late_prefetches'] <= len(fates)),
  ):
    if not holds:
      raise LawBroken('counters add up', f'{what} of {counts}')
  for e in of(log, events.Judged):
    sound = e.useful <= min(e.right, e.away, e.missing)
    sound = sound and max(e.right, e.away) <= e.guessed
    must(sound, 'counters add up', f'{e}')


def _fates(log: Sequence[events.Event]) -> list[str]:
  """What became of each prefetch, told from the launches."""
  fates: list[str] = []
  failed: set[int] = set()
  at: dict[int, int] = {}
  for e in log:
    if isinstance(e, events.LoadIssued) and e.cause == 'prefetch':
      what = f'key {e.key} is prefetched after it failed'
      must(e.key not in failed, 'what failed is not guessed', what)
      at[e.key] = len(fates)
      fates.append('kept')
    elif isinstance(e, events.LoadFailed):
      at.pop(e.key, None)
      failed.add(e.key)
    elif isinstance(e, events.LaunchBegun | events.Crossed):
      for key in set(e.experts) & set(at):
        fates[at[key]] = 'used'
    elif isinstance(e, events.Evicted) and e.key in at:
      number = at.pop(e.key)
      fates[number] = {'kept': 'wasted'}.get(fates[number], 'used')
  return fates


def _failures(world: worlds_lib.World, log: Sequence[events.Event]) -> None:
  """Who ends for a failed load awaited just that expert."""
  prompts: events.PrefillRouted | None = None
  decoding: dict[int, events.Routed] = {}
  for e in log:
    if isinstance(e, events.PrefillRouted):
      prompts = e
    elif isinstance(e, events.Routed):
      decoding[e.request] = e
    elif isinstance(e, events.Finished) and 'broken' in e.detail:
      key = int(e.detail.split()[0])
      layer, expert = divmod(key, world.model.num_experts)
      at = decoding.get(e.request, prompts)
      needed = at is not None and at.layer == layer and expert in at.experts
      what = f'request {e.request} ends for key {key}, which it did not need'
      must(needed, 'it ends nobody else', what)
