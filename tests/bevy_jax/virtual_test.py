"""The simulator's executor, with costs that are added up by hand.

Each test was seen to fail with the code broken on purpose: host work of each
kind that does not move the clock, a link or a device that does two things at
once, latency that is not hidden behind the load before, a link that waits for
demand on its way or never lets it overtake, a clock that moves when looked
at, a wait that goes too far, answers in another order.
"""

import json
import pathlib
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax import (
  baselines,
  engine,
  events,
  protocols,
  replay,
  synthetic,
  virtual,
)
from bevy_jax import config as config_lib
from bevy_jax import costs as costs_lib
from bevy_jax import request as request_lib
from bevy_jax import trace as trace_lib
from bevy_jax.layers import config as model_config

_GOLDEN = pathlib.Path(__file__).parent.parent / 'golden'
_HAND = json.loads((_GOLDEN / 'hand_schedule.json').read_text('utf-8'))


class _Chain:
  """The golden's routing: token t is followed by t + 1; `who` is the first."""

  def choices(self, who: int, position: int, layer: int) -> tuple[int, ...]:
    return tuple(_HAND['routing'][who + position][layer])

  def token(self, who: int, position: int) -> int:
    return who + position + 1

  def prompt(self, token: int, position: int, layer: int) -> tuple[int, ...]:
    return tuple(_HAND['routing'][token][layer])


def _model(layers: int, experts: int, top_k: int) -> model_config.ModelConfig:
  return model_config.tiny(
    num_layers=layers,
    num_experts=experts,
    top_k=top_k,
    moe_layers=(True,) * layers,
  )


def _run(
  executor: protocols.Executor,
  model: model_config.ModelConfig,
  requests: list[request_lib.Request],
  *,
  scheduler: str | protocols.Scheduler = 'lockstep',
  eviction: str = 'lru',
  rows: int = 2,
  slots: int = 4,
  link_depth: int = 4,
) -> list[events.Event]:
  found = engine.Engine(
    model,
    executor,
    config_lib.SCHEDULERS[scheduler]
    if isinstance(scheduler, str)
    else scheduler,
    config_lib.EVICTIONS[eviction],
    rows=rows,
    slots=slots,
    link_depth=link_depth,
  )
  for request in requests:
    found.submit(request)
  while found.busy:
    found.step()
  return found.log


def _schedule(log: list[events.Event]) -> tuple[list[Any], list[Any]]:
  """What happened in the golden's form, and when."""
  what: list[Any] = []
  when: list[list[int]] = []
  open_: dict[tuple[str, int], list[int]] = {}
  for e in log:
    if isinstance(e, events.LoadIssued):
      what.append(['load', e.key])
      when.append(open_.setdefault(('load', e.key), [e.time]))
    elif isinstance(e, events.LoadLanded):
      open_.pop(('load', e.key)).extend((e.began, e.time))
    elif isinstance(e, events.Evicted):
      what.append(['evict', e.key])
      when.append([e.time])
    elif isinstance(e, events.LaunchBegun):
      what.append([e.kind, list(e.requests), list(e.experts)])
      when.append(open_.setdefault(('launch', e.launch), [e.time]))
    elif isinstance(e, events.LaunchEnded):
      open_.pop(('launch', e.launch)).extend((e.began, e.time))
  return what, when


class HandTest(absltest.TestCase):
  def test_schedule_and_times_computed_by_hand(self):
    asked = [
      request_lib.Request(
        number=i,
        prompt=tuple(r['prompt']),
        new_tokens=r['new_tokens'],
        sampling=request_lib.SamplingParams(seed=r['prompt'][0]),
      )
      for i, r in enumerate(_HAND['requests'])
    ]
    executor = virtual.VirtualExecutor(
      _Chain(), costs_lib.Costs(**_HAND['costs']), layers=2
    )
    log = _run(executor, _model(2, 4, 2), asked, slots=_HAND['slots'])
    what, when = _schedule(log)
    self.assertEqual(what, _HAND['schedule'])
    self.assertEqual(when, _HAND['times'])
    texts = [
      [e.token for e in log if isinstance(e, events.Token) and e.request == i]
      for i in range(len(asked))
    ]
    self.assertEqual(texts, [r['text'] for r in _HAND['requests']])


def _executor(
  urgent: Iterable[int] = (), **costs: int
) -> virtual.VirtualExecutor:
  return virtual.VirtualExecutor(
    _Chain(),
    costs_lib.Costs(**costs),
    layers=2,
    urgent=set(urgent).__contains__,
  )


def _landings(executor: virtual.VirtualExecutor) -> list[tuple[int, int]]:
  found = []
  while True:
    found += [(e.key, e.time) for e in executor.poll()]
    try:
      executor.wait()
    except AssertionError:
      return found


class LinkTest(absltest.TestCase):
  def test_latency_hides_behind_the_load_before(self):
    executor = _executor(latency=5, load=10, host_load=1)
    executor.load(0, 0)  # at 1: 6..16
    executor.load(1, 1)  # at 2: 16..26
    self.assertEqual(executor.now(), 2)
    self.assertEqual(_landings(executor), [(0, 16), (1, 26)])
    executor.load(2, 2)  # at 27: 32..42
    self.assertEqual(_landings(executor), [(2, 42)])

  def test_demand_overtakes_what_the_link_has_not_begun(self):
    executor = _executor((2, 3), load=10, host_load=1)
    for key in range(4):
      executor.load(key, key)  # The first at 1: it is begun at once.
    self.assertEqual(_landings(executor), [(0, 11), (2, 21), (3, 31), (1, 41)])

  def test_a_prefetch_that_is_awaited_now_overtakes_too(self):
    awaited: set[int] = set()
    executor = virtual.VirtualExecutor(
      _Chain(), costs_lib.Costs(load=10), layers=2, urgent=awaited.__contains__
    )
    for key in range(4):
      executor.load(key, key)
    awaited.add(3)
    self.assertEqual(_landings(executor), [(0, 10), (3, 20), (1, 30), (2, 40)])

  def test_without_priority_nothing_overtakes(self):
    executor = virtual.VirtualExecutor(
      _Chain(), costs_lib.Costs(load=10), layers=2
    )
    for key in range(3):
      executor.load(key, key)
    self.assertEqual(_landings(executor), [(0, 10), (1, 20), (2, 30)])

  def test_an_idle_link_does_not_wait_for_demand_on_its_way(self):
    executor = _executor((1,), latency=5, load=10, host_launch=3)
    executor.load(0, 0)  # 5..15
    executor.launch(0, protocols.Batch('prefill', -1, chunk=_chunk(1)))
    executor.load(1, 1)  # Not before 3 + 5.
    self.assertEqual([k for k, _ in _landings_only(executor)], [0, 1])


def _chunk(tokens: int) -> protocols.Chunk:
  return protocols.Chunk([0], [[0] * tokens], [0])


def _landings_only(
  executor: virtual.VirtualExecutor,
) -> list[tuple[int, int]]:
  found = []
  while len(found) < 2:
    executor.wait()
    found += [
      (e.key, e.time)
      for e in executor.poll()
      if isinstance(e, protocols.Landed)
    ]
  return found


def _enter() -> protocols.Batch:
  entry = protocols.Entry(0, 0, 0, request_lib.SamplingParams())
  return protocols.Batch('enter', -1, entries=[entry])


class HostTest(absltest.TestCase):
  """What is seen late, and what a landing and rows cost; by hand."""

  def test_looks_now_and_then_while_both_are_busy(self):
    executor = _executor(load=50, launch=30, host_look=7, host_wake=3)
    executor.launch(0, _enter())  # 0..30
    executor.load(0, 0)  # 0..50
    executor.wait()
    self.assertEqual(executor.now(), 35)  # After five looks.
    (ended,) = executor.poll()
    self.assertEqual(ended.time, 30)
    executor.wait()  # The link alone: 50, and 3 overslept.
    self.assertEqual(executor.now(), 53)
    executor.launch(1, _enter())  # 53..83
    executor.poll()
    executor.wait()  # A launch alone wakes it.
    self.assertEqual(executor.now(), 83)

  def test_what_is_there_already_is_not_waited_for(self):
    executor = _executor(load=5, host_land=2, host_wake=9, host_load=20)
    executor.load(0, 0)  # 20..25
    executor.load(1, 1)  # 40..45, and the host has come to 40.
    executor.wait()
    self.assertEqual(executor.now(), 40)
    self.assertEqual([e.time for e in executor.poll()], [25])
    executor.wait()
    self.assertEqual(executor.now(), 45 + 9)

  def test_landings_and_rows_cost_the_host(self):
    executor = _executor(
      load=10, host_land=4, host_launch=3, host_row=2, launch=1
    )
    executor.load(0, 0)
    executor.wait()
    executor.poll()
    self.assertEqual(executor.now(), 14)
    executor.launch(0, _enter())
    self.assertEqual(executor.now(), 17)
    executor.wait()
    executor.poll()
    tables = np.zeros((1, 8), np.int32)
    decode = protocols.Batch('decode', 0, rows=[0], tables=tables)
    executor.launch(1, decode)
    self.assertEqual(executor.now(), 18 + 3 + 2)

  def test_a_device_does_not_tell_when_it_turned_to_something(self):
    executor = virtual.VirtualExecutor(
      _Chain(), costs_lib.Costs(load=10, launch=5), layers=2, told=False
    )
    executor.load(0, 0)
    executor.launch(0, _enter())
    executor.wait()
    executor.wait()
    found = executor.poll()
    self.assertEqual([e.began for e in found], [-1])
    self.assertEqual(found[0].time, 5)
    executor.wait()
    self.assertEqual([(e.time, e.began) for e in executor.poll()], [(10, -1)])


class DeviceTest(absltest.TestCase):
  def test_the_host_works_while_link_and_device_go_on(self):
    executor = _executor(
      load=10, launch=30, host_launch=7, host_load=1, host_answer=2
    )
    executor.load(0, 0)  # 1..11
    entry = protocols.Entry(0, 0, 0, request_lib.SamplingParams())
    executor.launch(0, protocols.Batch('enter', -1, entries=[entry]))
    self.assertEqual(executor.now(), 8)  # The device: 8..38.
    for key in range(1, 5):
      executor.load(key, key)
    # The link: 11..51 without a pause; the host has come to 12.
    self.assertEqual([e.key for e in executor.poll()], [0])
    executor.wait()
    self.assertEqual(executor.now(), 21)
    executor.wait()
    found = []
    while len(found) < 5:
      executor.wait()
      found += [(type(e).__name__, e.time) for e in executor.poll()]
    self.assertEqual(
      found,
      [
        ('Landed', 21),
        ('Landed', 31),
        ('Ended', 38),
        ('Landed', 41),
        ('Landed', 51),
      ],
    )
    self.assertEqual(executor.now(), 51)

  def test_prefill_by_hand(self):
    executor = _executor(launch=2, shared=3, expert=4, prompt=5, host_launch=1)
    executor.launch(0, protocols.Batch('prefill', -1, chunk=_chunk(3)))
    wave = protocols.Batch(
      'prefill', 0, 0b11, slots=[[0, 1]] * 3, distinct=[0, 1], finish=False
    )
    executor.launch(1, wave)
    executor.launch(2, wave._replace(finish=True))
    executor.wait()
    ends = []
    while len(ends) < 3:
      ends += executor.poll()
      if len(ends) < 3:
        executor.wait()
    # 1 + 2 + 3 + 3 * 5; 2 + 2 * 4 + 15 for a wave; 3 more to go on.
    self.assertEqual([e.time for e in ends], [21, 46, 74])
    self.assertEqual([e.began for e in ends], [1, 21, 46])
    self.assertEqual(ends[0].hops[0].choices[:3], [(0, 1)] * 3)
    self.assertLen(ends[0].hops[0].choices, executor.chunk)
    self.assertEqual(ends[1].hops, ())

  def test_hops_by_hand(self):
    """Each layer takes what a launch would; who misses stops."""
    executor = virtual.VirtualExecutor(
      synthetic.Hash(6, 2, 3),
      costs_lib.Costs(launch=100, shared=10, expert=1, row=1000, head=7),
      layers=3,
      hops=3,
    )
    entries = [
      protocols.Entry(row, 0, 5, request_lib.SamplingParams(seed=row))
      for row in range(2)
    ]
    executor.launch(0, protocols.Batch('enter', -1, entries=entries))
    one, two = (
      [synthetic.Hash(6, 2, 3).choices(who, 5, i) for i in range(3)]
      for who in range(2)
    )
    self.assertNotEqual(set(one[2]), set(two[2]))
    tables = np.full((3, 6), -1, np.int32)
    for layer, ids in enumerate((one[0] + two[0], one[1] + two[1], one[2])):
      tables[layer, list(ids)] = 0
    counts = [len({*one[0], *two[0]}), len({*one[1], *two[1]}), 2]
    experts = sum(1 << e for e in {*one[0], *two[0]})
    batch = protocols.Batch('decode', 0, experts, [0, 1], tables)
    executor.launch(1, batch)
    executor.wait()
    executor.poll()
    executor.wait()
    (ended,) = executor.poll()
    took = 3 * (100 + 10 + 2 * 1000) + sum(counts) + 7
    self.assertEqual(ended.time - ended.began, took)
    self.assertEqual(
      [list(hop.places) for hop in ended.hops][1:], [[0, 1], [0]]
    )
    self.assertEqual(ended.hops[0].choices, [one[1], two[1]])
    self.assertEqual(ended.hops[1].choices, [one[2], two[2]])
    self.assertNotEqual(ended.hops[2].tokens, [-1])

  def test_all_together_or_nobody(self):
    executor = virtual.VirtualExecutor(
      synthetic.Hash(6, 2, 3), costs_lib.Costs(launch=1), layers=3, hops=3
    )
    entries = [
      protocols.Entry(row, 0, 5, request_lib.SamplingParams(seed=row))
      for row in range(2)
    ]
    executor.launch(0, protocols.Batch('enter', -1, entries=entries))
    tables = np.zeros((2, 6), np.int32)
    (missed, *_) = synthetic.Hash(6, 2, 3).choices(1, 5, 1)
    tables[1, missed] = -1
    batch = protocols.Batch('decode', 0, 0b111111, [0, 1], tables, True)
    executor.launch(1, batch)
    executor.wait()
    executor.poll()
    executor.wait()
    self.assertLen(executor.poll()[0].hops, 1)

  def test_the_clock_moves_forward_alone(self):
    executor = virtual.VirtualExecutor(
      synthetic.Hash(6, 2, 3), costs_lib.Costs(load=9, launch=5), layers=3
    )
    seen = []
    kept = executor.now

    def now() -> int:
      seen.append(kept())
      return seen[-1]

    executor.now = now  # type: ignore[method-assign]
    requests = [
      request_lib.Request(number=i, prompt=(1, 2, 3), new_tokens=4)
      for i in range(5)
    ]
    _run(executor, _model(3, 6, 2), requests, scheduler='runahead', slots=7)
    self.assertEqual(seen, sorted(seen))
    self.assertGreater(len(set(seen)), 50)
    before = kept()
    self.assertEqual([kept() for _ in range(100)], [before] * 100)

  def test_nothing_in_flight_is_a_deadlock(self):
    executor = _executor()
    with self.assertRaisesRegex(AssertionError, 'nothing is in flight'):
      executor.wait()
    executor.load(0, 0)
    executor.close()
    with self.assertRaisesRegex(AssertionError, 'nothing is in flight'):
      executor.wait()


class RecordedTest(parameterized.TestCase):
  def test_the_bundled_trace(self):
    trace = trace_lib.load('bundled')
    self.assertEqual(trace.experts.shape, (16, 96, 24, 4))
    self.assertEqual(trace.num_experts, 32)
    self.assertEqual(trace.meta['licence'], 'Apache-2.0')
    self.assertIn('LICENSE.gptoss20b', [
      p.name for p in trace_lib.BUNDLED.parent.iterdir()
    ])  # fmt: skip

  def test_every_token_of_a_request_is_replayed(self):
    trace = trace_lib.load('bundled')
    requests = virtual.requests(trace, 3, 5, 6)
    executor = virtual.VirtualExecutor(
      virtual.Recorded(trace), costs_lib.Costs(load=3, launch=1), trace.layers
    )
    log = _run(executor, virtual.shape(trace), requests, rows=2, slots=300)
    routed = np.full((5, 6, 24, 4), -1)
    for e in log:
      if isinstance(e, events.Routed) and e.token < 6:
        routed[e.request, e.token, e.layer] = e.experts
    np.testing.assert_array_equal(routed, trace.experts[3:8, :6])

  @parameterized.parameters(
    ((-1, 2, 4), 'has requests 0 to 15'),
    ((0, 0, 4), 'at least one'),
    ((10, 7, 4), 'requests 10 to 16'),
    ((0, 1, -1), '0 tokens'),
  )
  def test_refuses_what_is_not_there(self, asked, words):
    with self.assertRaisesRegex(ValueError, words):
      virtual.requests(trace_lib.load('bundled'), *asked)

  def test_a_trace_knows_no_prompts(self):
    trace = trace_lib.load('bundled')
    executor = virtual.VirtualExecutor(
      virtual.Recorded(trace), costs_lib.Costs(launch=1), trace.layers
    )
    long = [request_lib.Request(number=0, prompt=(0, 1), new_tokens=2)]
    with self.assertRaisesRegex(ValueError, 'prompt of one token'):
      _run(executor, virtual.shape(trace), long)

  @parameterized.product(
    eviction=('lru', 'lfu_decayed', 'reuse'),
    world=((1, 0.1, 1), (4, 0.25, 1), (6, 0.01, 8), (7, 0.5, 4), (2, 0.9, 24)),
  )
  def test_lockstep_loads_what_the_slot_table_alone_says(self, eviction, world):
    """Any timing; at a cache of 0.01 a union goes in waves.

    However many layers a launch crosses. Seen to fail with one in which rows
    need not go together.
    """
    rows, cache, hops = world
    trace = trace_lib.load('bundled')
    slots = int(cache * 24 * 32)
    rng = random.Random(f'{eviction}{world}')
    costs = costs_lib.Costs(
      **{
        name: rng.choice((0, 1, 30, 1000))
        for name in ('latency', 'load', 'launch', 'expert', 'row', 'host_load')
      }
    )
    executor = virtual.VirtualExecutor(
      virtual.Recorded(trace), costs, trace.layers, hops=hops
    )
    log = _run(
      executor,
      virtual.shape(trace),
      virtual.requests(trace, 2, rows, 5),
      scheduler=baselines.Lockstep(hops=hops),
      eviction=eviction,
      rows=rows,
      slots=slots,
      link_depth=rng.randint(1, 5),
    )
    loads = [0]
    for e in log:
      loads[-1] += isinstance(e, events.LoadIssued)
      if isinstance(e, events.LaunchBegun) and e.kind == 'decode' and e.finish:
        loads.append(0)
      if isinstance(e, events.Crossed):
        loads += [0] * (max(e.layers) - 1)
    wanted = replay.misses(
      trace,
      range(2, 2 + rows),
      range(5),
      slots,
      config_lib.EVICTIONS[eviction],
    )
    self.assertEqual(loads, [*wanted, 0])


if __name__ == '__main__':
  absltest.main()
