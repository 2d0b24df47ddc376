"""Random simulated runs through the validator, and logs that it must refuse.

Nothing in the validator comes from the engine. That each check can fail is
shown by `DoctoredTest`, one lie for each; that the runs would show a broken
engine or executor was seen with `begin_load` setting `resident` at once, with
`hold` not barring what is read, with a link or a device that begins two
things at once, and with host work that moves no clock.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

from absl.testing import absltest, parameterized

from bevy_jax import (
  baselines,
  engine,
  events,
  protocols,
  runahead,
  synthetic,
  validate,
  virtual,
)
from bevy_jax import config as config_lib
from bevy_jax import costs as costs_lib
from bevy_jax import request as request_lib
from bevy_jax.layers import config as model_config
from bevy_jax.offload import prefetch, slot_table

_SCHEDULERS = config_lib.SCHEDULERS | {
  'runahead_near': runahead.Runahead(max_lag=1),
  'runahead_deep': runahead.Runahead(depth=5),
  'lockstep_hops': baselines.Lockstep(hops=8),
  'runahead_hops': runahead.Runahead(hops=8),
  'runahead_free': runahead.Runahead(hops=8, max_lag=None, near=None, depth=4),
}
_PLAIN = ('bevy', 'split', 'largest', 'solo')
_SEEDS = 50
_FEW_SEEDS = 18
_NONE = prefetch.Nothing()
_PREFETCHERS = {
  'none': _NONE,
  'transition': prefetch.Transition(depth=2, confidence=0, guarded=False),
  'oracle': prefetch.Oracle(p=0.8, depth=2),
}


class _Ran(NamedTuple):
  log: list[events.Event]
  facts: validate.Facts
  requests: list[request_lib.Request]


def _costs(rng: random.Random) -> costs_lib.Costs:
  """Of any size, and often nothing at all."""
  pace = [rng.choice((3, 30, 300)) for _ in range(3)]

  def some(which: int) -> int:
    return rng.choice((0, rng.randint(1, pace[which])))

  return costs_lib.Costs(
    latency=some(0),
    load=rng.randint(1, pace[0]),
    launch=some(1),
    shared=some(1),
    expert=some(1),
    row=some(1),
    head=some(1),
    prompt=some(1),
    host_launch=some(2),
    host_answer=some(2),
    host_load=some(2),
  )


def _break(executor: virtual.VirtualExecutor, rate: float, seed: int) -> None:
  """Lets some loads fail in place of landing."""
  dice, poll = random.Random(seed), executor.poll

  def broken() -> list[protocols.Happened]:
    return [
      protocols.Failed(e.time, e.key, f'{e.key} is broken')
      if isinstance(e, protocols.Landed) and dice.random() < rate
      else e
      for e in poll()
    ]

  executor.poll = broken  # type: ignore[method-assign]


def _run(
  seed: int,
  scheduler: str,
  eviction: str,
  *,
  prefetcher: protocols.Prefetcher = _NONE,
  parted: bool = False,
  faults: float = 0.0,
  priority: bool = False,
) -> _Ran:
  """A random world, run to its end."""
  rng = random.Random(seed)
  far = getattr(_SCHEDULERS[scheduler], 'hops', 1)
  layers, experts = rng.randint(1, max(4, far)), rng.randint(4, 12)
  top_k = rng.randint(1, 4)
  rows = rng.randint(1, 16)
  slots = rng.choice((top_k, top_k + 1, 2 * top_k, layers * experts))
  slots = min(rng.choice((slots, rng.randint(top_k, 20))), layers * experts)
  quota: tuple[int, ...] = ()
  if parted:
    slots = max(slots, layers * top_k)
    quota = slot_table.split(slots, layers)
  model = model_config.tiny(
    num_layers=layers,
    num_experts=experts,
    top_k=top_k,
    moe_layers=(True,) * layers,
  )
  requests = [
    request_lib.Request(
      number=i,
      prompt=tuple(rng.randrange(20) for _ in range(rng.choice((1, 1, 9)))),
      new_tokens=rng.randint(1, 4),
      sampling=request_lib.SamplingParams(seed=rng.randrange(50)),
      eos_ids=(0,),
    )
    for i in range(rng.randint(1, 16))
  ]
  facts = validate.Facts(layers, experts, slots, rows, _costs(rng), quota)
  executor = virtual.VirtualExecutor(
    synthetic.Hash(experts, top_k, seed),
    facts.costs,
    layers,
    chunk=4,
    gates=prefetcher.gates,
    hops=rng.randint(1, 8) if far > 1 else 1,
    # Whoever overtakes whom, nothing impossible may come of it.
    urgent=(lambda key: key % 2 == 0) if priority else None,
  )
  if faults:
    _break(executor, faults, seed)
  found = engine.Engine(
    model,
    executor,
    _SCHEDULERS[scheduler],
    config_lib.EVICTIONS[eviction],
    rows=rows,
    slots=slots,
    link_depth=rng.randint(1, 8),
    quota=quota,
    prefetcher=prefetcher,
  )
  late = [r for r in requests if rng.random() < 0.3]
  for request in requests:
    if request not in late:
      found.submit(request)
  for _ in range(30_000):
    if late and (not found.busy or rng.random() < 0.02):
      found.submit(late.pop())
    if not found.busy:
      return _Ran(found.log, facts, requests)
    found.step()
  raise AssertionError('no end in sight')


class PropertyTest(parameterized.TestCase):
  @parameterized.parameters(
    *(
      (scheduler, eviction)
      for scheduler in _SCHEDULERS
      for eviction in ('lru', 'lfu_decayed', 'reuse')
      # Plain schedulers under two: time is short.
      if scheduler not in _PLAIN or eviction != 'lfu_decayed'
    )
  )
  def test_every_schedule_was_possible(self, scheduler, eviction):
    for seed in range(_SEEDS):
      with self.subTest(seed=seed):
        ran = _run(seed, scheduler, eviction)
        self.assertEqual(validate.faults(ran.log, ran.facts), [])
        over = [e for e in ran.log if isinstance(e, events.Finished)]
        self.assertLen(over, len(ran.requests))
        left = events.unfinished(ran.log)
        self.assertEqual([x for x in left if not x.startswith('load')], [])

  @parameterized.product(
    scheduler=tuple(_SCHEDULERS), prefetcher=tuple(_PREFETCHERS)
  )
  def test_with_prefetches_parts_and_failures(self, scheduler, prefetcher):
    """All of them in some worlds, and each of them alone in others."""
    prefetched = failed = 0
    for seed in range(2000, 2000 + _FEW_SEEDS):
      with self.subTest(seed=seed):
        ran = _run(
          seed,
          scheduler,
          ('lru', 'reuse')[seed % 2],
          prefetcher=_PREFETCHERS[prefetcher],
          parted=seed % 3 == 0,
          faults=(0.0, 0.0, 0.05)[seed // 3 % 3],
          priority=seed % 4 == 0,
        )
        self.assertEqual(validate.faults(ran.log, ran.facts), [])
        over = [e for e in ran.log if isinstance(e, events.Finished)]
        self.assertLen(over, len(ran.requests))
        causes = [e.cause for e in ran.log if isinstance(e, events.LoadIssued)]
        prefetched += causes.count('prefetch')
        failed += sum(isinstance(e, events.LoadFailed) for e in ran.log)
    self.assertGreater(failed, 0)
    self.assertEqual(prefetched > 0, prefetcher != 'none')


@functools.cache
def _sound() -> _Ran:
  """A run with prompts, waves, evictions and several rows."""
  for seed in itertools.count(1000):
    ran = _run(seed, 'runahead', 'lru')
    waves = [
      e for e in ran.log if isinstance(e, events.LaunchBegun) and not e.finish
    ]
    gone = [e for e in ran.log if isinstance(e, events.Evicted)]
    deep = ran.facts.layers > 1 and ran.facts.rows > 2
    slow = min(
      ran.facts.costs.launch, ran.facts.costs.expert, ran.facts.costs.load - 3
    )
    if waves and len(gone) > 20 and deep and slow > 0:
      return ran
  raise AssertionError


def _first(kind: type[events.Event], nth: int = 0) -> int:
  at = [i for i, e in enumerate(_sound().log) if isinstance(e, kind)]
  return at[nth]


def _decode(nth: int = 0) -> int:
  at = [
    i
    for i, e in enumerate(_sound().log)
    if isinstance(e, events.LaunchBegun) and e.kind == 'decode' and e.finish
  ]
  return at[nth]


def _change(at: int, **fields: object) -> list[events.Event]:
  log = list(_sound().log)
  log[at] = dataclasses.replace(log[at], **fields)
  return log


def _drop(at: int) -> list[events.Event]:
  log = list(_sound().log)
  del log[at]
  return log


def _move(at: int, to: int) -> list[events.Event]:
  log = list(_sound().log)
  log.insert(to, log.pop(at))
  return log


def _at(at: int) -> events.Event:
  return _sound().log[at]


def _landing_of_a_read_key() -> list[events.Event]:
  """The landing of what a launch reads, told behind the launch."""
  log, begun = _sound().log, _decode(4)
  at = max(
    i
    for i, e in enumerate(log[:begun])
    if isinstance(e, events.LoadLanded) and e.key in log[begun].experts
  )
  return _move(at, begun)


def _late_landing() -> list[events.Event]:
  log, begun = _sound().log, _decode(4)
  at = max(
    i
    for i, e in enumerate(log[:begun])
    if isinstance(e, events.LoadLanded) and e.key in log[begun].experts
  )
  return _change(at, time=log[begun].time + 1)


def _evicted_while_read() -> list[events.Event]:
  log, begun = list(_sound().log), _decode(4)
  key = log[begun].experts[0]
  slot = next(
    e.slot
    for e in reversed(log[:begun])
    if isinstance(e, events.LoadLanded) and e.key == key
  )
  log.insert(begun + 1, events.Evicted(log[begun].time, key, slot, True))
  return log


def _token_twice() -> list[events.Event]:
  at = _first(events.Token)
  log = list(_sound().log)
  log.insert(at, log[at])
  return log


def _routed(**change: Callable[[events.Routed], object]) -> list[events.Event]:
  at = _first(events.Routed, 5)
  event = _at(at)
  return _change(at, **{name: how(event) for name, how in change.items()})


def _failing() -> list[events.Event]:
  """The first load that somebody who decodes waits for, told to fail."""
  log, needs = list(_sound().log), {}
  experts = _sound().facts.experts
  for i, e in enumerate(log):
    if isinstance(e, events.Routed):
      needs[e.request] = {e.layer * experts + x for x in e.experts}
    elif isinstance(e, events.LaunchBegun):
      for number in e.requests:
        needs.pop(number, None)
    elif isinstance(e, events.LoadLanded) and any(
      e.key in keys for keys in needs.values()
    ):
      log[i] = events.LoadFailed(e.time, e.key, e.slot, 'broken')
      return log
  raise AssertionError


def _failing_unasked() -> list[events.Event]:
  at = _first(events.LoadLanded, 2)
  landed, log = _at(at), list(_sound().log)
  log.insert(at + 1, events.LoadFailed(landed.time, landed.key, 0, 'broken'))
  return log


def _two(kind: type[events.Event]) -> list[events.Event]:
  """The second of two in a row told to begin with the first."""
  at = [i for i, e in enumerate(_sound().log) if isinstance(e, kind)]
  for a, b in itertools.pairwise(at):
    first, second = _at(a), _at(b)
    if first.began < first.time <= second.began:
      return _change(b, began=first.began)
  raise AssertionError


def _fast_launch() -> list[events.Event]:
  begun = _at(_decode(2))
  at = next(
    i
    for i, e in enumerate(_sound().log)
    if isinstance(e, events.LaunchEnded) and e.launch == begun.launch
  )
  end = _at(at)
  log = _change(at, time=end.time - 1, began=-1)
  return [
    dataclasses.replace(e, time=end.time - 1)
    if isinstance(e, events.Routed | events.Token) and e.time == end.time
    else e
    for e in log
  ]


def _same_row() -> list[events.Event]:
  row = _at(_first(events.Admitted)).row
  return _change(_first(events.Admitted, 1), row=row)


def _gone_in_a_launch() -> list[events.Event]:
  log, at = list(_sound().log), _decode(2)
  who = log[at].requests[0]
  log.insert(at + 1, events.Finished(log[at].time, who, 'length'))
  return log


def _left_out() -> list[events.Event]:
  at = _decode(3)
  return _change(at, experts=_at(at).experts[1:])


def _prefill_left_out() -> list[events.Event]:
  at = next(
    i
    for i, e in enumerate(_sound().log)
    if isinstance(e, events.LaunchBegun)
    and e.kind == 'prefill'
    and e.layer >= 0
    and e.finish
  )
  return _change(at, experts=_at(at).experts[1:])


def _carried_twice() -> list[events.Event]:
  log, at = list(_sound().log), _decode(4)
  begun = log[at]
  log.insert(at + 1, dataclasses.replace(begun, launch=begun.launch + 1))
  return log


_LIES: dict[str, tuple[Callable[[], list[events.Event]], str]] = {
  'learned_late': (_landing_of_a_read_key, 'reads .*, not here'),
  'landed_late': (_late_landing, 'before it lands'),
  'never_landed': (lambda: _drop(_first(events.LoadLanded)), 'not here'),
  'evicted_while_read': (_evicted_while_read, 'is given up while'),
  'evicted_elsewhere': (
    lambda: _change(
      _first(events.Evicted), slot=_at(_first(events.Evicted)).slot + 1
    ),
    'where it does not lie',
  ),
  'overwritten': (lambda: _drop(_first(events.Evicted)), 'is overwritten'),
  'no_such_slot': (
    lambda: _change(_first(events.LoadIssued), slot=999), 'slot 999 is none'
  ),
  'loaded_twice': (
    lambda: _change(
      _first(events.LoadIssued, 1), key=_at(_first(events.LoadIssued)).key
    ),
    'is loaded twice',
  ),
  'landed_nowhere': (
    lambda: _change(_first(events.LoadLanded), key=998), 'not under way'
  ),
  'landed_before_issued': (
    lambda: _change(_first(events.LoadLanded, 2), time=-1),
    'lands before it began',
  ),
  'fast_link': (
    lambda: _change(
      _first(events.LoadLanded, 3),
      time=_at(_first(events.LoadLanded, 3)).time - 1,
    ),
    'faster than the link',
  ),
  'landings_shuffled': (
    lambda: _change(_first(events.LoadLanded, 3), time=10**9),
    'landings are told out of order',
  ),
  'ends_shuffled': (
    lambda: _change(_first(events.LaunchEnded, 3), time=10**9),
    'ends are told out of order',
  ),
  'two_loads': (lambda: _two(events.LoadLanded), 'two loads at once'),
  'two_launches': (lambda: _two(events.LaunchEnded), 'two launches at once'),
  'fast_device': (_fast_launch, 'faster than the device'),
  'ended_before_begun': (
    lambda: _change(_first(events.LaunchEnded, 3), time=-1),
    'ends before it began',
  ),
  'clock_back': (
    lambda: _change(_first(events.LoadIssued, 9), time=0), 'clock went back'
  ),
  'out_of_turn': (
    lambda: _change(_first(events.LaunchEnded, 3), launch=9999), 'out of turn'
  ),
  'launch_skipped': (
    lambda: _change(_decode(3), launch=9999), 'a launch is left out'
  ),
  'other_layer': (
    lambda: _change(_decode(3), layer=99), 'launched at 99'
  ),
  'read_of_another_layer': (
    lambda: _change(_decode(3), layer=_at(_decode(3)).layer + 1),
    'of another layer',
  ),
  'expert_left_out': (_left_out, 'leaves out'),
  'prompt_expert_left_out': (_prefill_left_out, 'leaves out'),
  'carried_twice': (_carried_twice, 'is in two launches'),
  'failed_and_gone_on': (_failing, 'wait for what has failed'),
  'failed_unasked': (_failing_unasked, 'fails that is not under way'),
  'nobody': (lambda: _change(_decode(3), requests=()), 'carries nobody'),
  'stranger': (lambda: _change(_decode(3), requests=(99,)), 'has no row'),
  'row_taken': (_same_row, 'is not free'),
  'admitted_early': (
    lambda: _change(_first(events.Admitted), arrived=10**9), 'before it came'
  ),
  'entered_unprepared': (
    lambda: _drop(_first(events.Prefilled)), 'without its prompt'
  ),
  'layer_skipped': (
    lambda: _routed(layer=lambda e: (e.layer + 1) % _sound().facts.layers),
    'is routed at layer',
  ),
  'wrong_token': (
    lambda: _routed(token=lambda e: e.token + 1), 'is routed at layer'
  ),
  'jump': (lambda: _routed(position=lambda e: e.position + 7), 'jumps'),
  'wrong_hits': (lambda: _routed(hits=lambda e: e.hits + 1), 'hits are told'),
  'routed_to_nothing': (
    lambda: _routed(experts=lambda e: (77,)), 'is routed to'
  ),
  'routed_unasked': (
    lambda: _routed(time=lambda e: e.time + 1), 'no launch of it has ended'
  ),
  'not_routed': (
    lambda: _drop(_first(events.Routed, 5)), 'before it is routed'
  ),
  'token_twice': (_token_twice, 'token 0 comes, not 1'),
  'token_early': (
    lambda: _move(_first(events.Token), _first(events.Routed) + 1),
    'has a token at layer',
  ),
  'ended_in_a_launch': (
    _gone_in_a_launch,
    'has no row, or in a launch',
  ),
}  # fmt: skip


class DoctoredTest(parameterized.TestCase):
  def test_the_sound_log_is_sound(self):
    ran = _sound()
    self.assertEqual(validate.faults(ran.log, ran.facts), [])

  @parameterized.named_parameters(*((k, *v) for k, v in _LIES.items()))
  def test_a_lie_is_told(self, lie, words):
    found = validate.faults(lie(), _sound().facts)
    self.assertRegex('\n'.join(found) or 'nothing is wrong', words)

  def test_a_layer_that_fills_more_than_its_part_is_told(self):
    facts = _sound().facts
    least = facts._replace(quota=(1,) * facts.layers)
    found = validate.faults(_sound().log, least)
    self.assertRegex('\n'.join(found), 'fills 2 of its 1 slots')

  def test_what_has_no_end_is_told(self):
    left = events.unfinished(_sound().log[: _decode(0) + 1])
    self.assertIn('launch', ' '.join(left))
    self.assertIn('request', ' '.join(left))


@functools.cache
def _far() -> tuple[_Ran, int, int]:
  """A run with hops: the begin and the end of a launch that crossed two."""
  for seed in itertools.count(2000):
    ran = _run(seed, 'runahead_free', 'lru')
    for i, e in enumerate(ran.log):
      if isinstance(e, events.Crossed) and set(e.layers) == {1, 2}:
        begun = next(
          b
          for b, x in enumerate(ran.log)
          if isinstance(x, events.LaunchBegun) and x.launch == e.launch
        )
        if ran.facts.costs.shared and _twice(ran.log, i):
          return ran, begun, i
  raise AssertionError


def _doctored(at: int, **fields: object) -> list[events.Event]:
  log = list(_far()[0].log)
  log[at] = dataclasses.replace(log[at], **fields)
  return log


def _twice(log: list[events.Event], crossed: int) -> list[int]:
  """Where requests have been routed that a launch then carried on."""
  told: list[tuple[int, int]] = []
  for i in range(crossed - 1, -1, -1):
    event = log[i]
    if isinstance(event, events.LaunchEnded):
      break
    if isinstance(event, events.Routed):
      told.append((i, event.request))
  requests = [request for _, request in told]
  return [i for i, r in reversed(told) if requests.count(r) > 1]


def _second_router() -> int:
  ran, _, crossed = _far()
  return _twice(ran.log, crossed)[0]


def _absent() -> tuple[int, ...]:
  """Experts of that router's layer that are not resident."""
  ran, begun, _ = _far()
  base = ran.log[_second_router()].layer * ran.facts.experts
  here: set[int] = set()
  for e in ran.log[:begun]:
    if isinstance(e, events.LoadLanded):
      here.add(e.key - base)
    elif isinstance(e, events.Evicted):
      here.discard(e.key - base)
  return tuple(e for e in range(ran.facts.experts) if e not in here)[:1]


def _given_up() -> list[events.Event]:
  ran, begun, crossed = _far()
  log, key = list(ran.log), ran.log[crossed].experts[0]
  slot = next(
    e.slot
    for e in reversed(log[:begun])
    if isinstance(e, events.LoadLanded) and e.key == key
  )
  log.insert(begun + 1, events.Evicted(log[begun].time, key, slot, False))
  return log


def _told_late() -> list[events.Event]:
  ran, _, crossed = _far()
  log = list(ran.log)
  after = next(
    i
    for i, e in enumerate(log)
    if i > crossed and isinstance(e, events.LoadIssued | events.LaunchBegun)
  )
  log.insert(after, log.pop(crossed))
  return log


class FarTest(parameterized.TestCase):
  """Lies about launches that cross several layers."""

  @parameterized.named_parameters(
    ('too_many', lambda: _doctored(_far()[1], hops=99), 'may cross 99 layers'),
    ('one', lambda: _doctored(_far()[1], hops=1), 'crosses 2'),
    (
      'absent',
      lambda: _doctored(_second_router(), experts=_absent()),
      'goes on without',
    ),
    ('given_up', _given_up, 'is given up while'),
    (
      'read',
      lambda: _doctored(_far()[2], experts=()),
      'read other experts',
    ),
    (
      'layers',
      lambda: _doctored(_far()[2], layers=(3,) * 9),
      'did not cross',
    ),
    ('late', _told_late, 'has not just ended'),
  )
  def test_a_lie_is_told(self, lie, words):
    ran, _, _ = _far()
    self.assertEqual(validate.faults(ran.log, ran.facts), [])
    found = validate.faults(lie(), ran.facts)
    self.assertRegex('\n'.join(found) or 'nothing is wrong', words)

  def test_each_layer_takes_its_time(self):
    """What one launch takes is not paid for as often as there are layers."""
    ran, begun, _ = _far()
    costs, number = ran.facts.costs, ran.log[begun].launch
    took = next(
      e.time - e.began
      for e in ran.log
      if isinstance(e, events.LaunchEnded) and e.launch == number
    )
    for more, wrong in ((0, False), (took // 2, True)):
      dearer = dataclasses.replace(costs, shared=costs.shared + more)
      found = validate.faults(ran.log, ran.facts._replace(costs=dearer))
      told = any(f'launch {number} is faster' in line for line in found)
      self.assertEqual(told, wrong)


if __name__ == '__main__':
  absltest.main()
