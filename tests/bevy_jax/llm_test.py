"""LLM on the demo model: the five-line use, streaming, stops, refusals."""

import copy
import dataclasses
import functools
from typing import Any

import pytest
from absl.testing import absltest, parameterized

from bevy_jax import LLM, SamplingParams, events, protocols, relive
from bevy_jax import config as config_lib
from bevy_jax.experiments import simulation
from bevy_jax.layers import reference
from bevy_jax.offload import prefetch

PROMPTS = ('The captain said', 'def read(path):\n    return', 'Once')


@functools.cache
def _llm() -> LLM:
  return LLM.load('demo', cache=0.25, requests=2, context=64, strict=True)


class LlmTest(parameterized.TestCase):
  def test_generate_keeps_the_order_of_more_prompts_than_rows(self):
    outs = list(_llm().generate(PROMPTS, new_tokens=6))
    self.assertEqual([o.number for o in outs], [0, 1, 2])
    for out in outs:
      self.assertLen(out.tokens, 6)
      self.assertEqual(out.reason, 'length')
      self.assertEqual(out.text, _llm().text.decode(out.tokens))

  @parameterized.parameters(0.0, 0.8)
  def test_tokens_are_those_of_the_reference(self, temperature):
    llm = _llm()
    settings = SamplingParams(temperature=temperature, top_p=0.9, seed=5)
    (out,) = llm.generate(PROMPTS[:1], 8, settings)
    model = llm.model
    blocks = [model.experts.block(k).view for k in range(len(model.experts))]
    shape = (len(model.config.moe_ids), model.config.num_experts)
    experts = reference.stack(blocks, shape)
    want = reference.generate(
      model.config,
      model.params,
      experts,
      llm.text.encode(PROMPTS[0]),
      8,
      temperature=temperature,
      top_p=0.9,
      seed=5,
    )
    self.assertEqual(list(out.tokens), want)

  def test_same_seed_same_text_whatever_runs_beside_it(self):
    settings = SamplingParams(temperature=1.0, seed=11)
    (alone,) = _llm().generate(PROMPTS[:1], 8, settings)
    beside = next(_llm().generate(PROMPTS, 8, settings))
    self.assertEqual(alone.tokens, beside.tokens)
    other = SamplingParams(temperature=1.0, seed=12)
    (changed,) = _llm().generate(PROMPTS[:1], 8, other)
    self.assertNotEqual(alone.tokens, changed.tokens)

  def test_pieces_add_up_to_the_text(self):
    texts = ['', '']
    reasons = {}
    for piece in _llm().stream(PROMPTS[:2], 8):
      texts[piece.number] += piece.text
      if piece.reason:
        reasons[piece.number] = piece.reason
    outs = list(_llm().generate(PROMPTS[:2], 8))
    self.assertEqual(texts, [o.text for o in outs])
    self.assertEqual(reasons, {0: 'length', 1: 'length'})

  def test_stop_string_ends_a_request_and_is_cut(self):
    (whole,) = _llm().generate(PROMPTS[:1], 8)
    stop = whole.text[2:4]
    (cut,) = _llm().generate(PROMPTS[:1], 8, stop=[stop])
    self.assertEqual(cut.reason, 'stop')
    self.assertEqual(cut.text, whole.text[: whole.text.index(stop)])
    self.assertLess(len(cut.tokens), 8)

  def test_another_engine_takes_the_device_whole(self):
    (first,) = _llm().generate(PROMPTS[:1], 6)
    engine = _llm().engine('lockstep', 'lru')
    list(_llm().run(engine, _llm().requests(PROMPTS[1:2], 6)))
    (again,) = _llm().generate(PROMPTS[:1], 6)
    self.assertEqual(first.tokens, again.tokens)

  def test_a_prefetcher_comes_as_it_is(self):
    (first,) = _llm().generate(PROMPTS[:1], 6)
    rule = prefetch.Transition(confidence=0, guarded=False)
    engine = _llm().engine('lockstep', prefetch=rule)
    list(_llm().run(engine, _llm().requests(PROMPTS[:1], 6)))
    tokens = [e.token for e in engine.log if isinstance(e, events.Token)]
    self.assertEqual(tuple(tokens), first.tokens)
    self.assertTrue(any(isinstance(e, events.Judged) for e in engine.log))
    with pytest.raises(ValueError, match='no running engine can know'):
      _llm().engine(prefetch=prefetch.Oracle())

  def test_two_calls_at_once_are_refused(self):
    one = _llm().stream(PROMPTS[:1], 6)
    next(one)
    two = _llm().stream(PROMPTS[:1], 6)
    next(two)
    with pytest.raises(ValueError, match='one call at a'):
      list(one)
    self.assertNotEmpty(list(two))

  def test_the_log_does_not_grow_from_call_to_call(self):
    list(_llm().generate(PROMPTS[:1], 4))
    engine = _llm()._engine
    lengths = []
    for _ in range(3):
      list(_llm().generate(PROMPTS[:1], 4))
      self.assertIs(_llm()._engine, engine)
      lengths.append(sum(isinstance(e, events.Token) for e in engine.log))
    self.assertEqual(lengths, [4, 4, 4])

  def test_an_engine_asked_for_keeps_its_log(self):
    engine = _llm().engine('lockstep')
    list(_llm().run(engine, _llm().requests(PROMPTS[:1], 4)))
    before = len(engine.log)
    list(_llm().generate(PROMPTS[:1], 4))
    self.assertLen(engine.log, before)
    self.assertIsNot(_llm()._engine, engine)

  def test_sampling_settings_are_counted(self):
    settings = [SamplingParams()] * 2
    with pytest.raises(ValueError, match='3 prompts, but 2 sampling'):
      list(_llm().generate(PROMPTS, 4, settings))

  def test_stop_must_be_a_list(self):
    with pytest.raises(ValueError, match='must be a list'):
      list(_llm().generate(PROMPTS, 4, stop='###'))

  @parameterized.named_parameters(
    ('nothing', [], 4, 'nothing to generate'),
    ('one_text', 'hello', 4, 'list of texts'),
    ('no_tokens', [[]], 4, 'at least 1'),
    ('no_new', ['x'], 0, 'at least 1'),
    ('too_long', ['x'], 1000, '64 positions'),
    ('foreign_token', [[9999]], 4, 'the model knows 0 to'),
  )
  def test_refuses(self, prompts, new_tokens, message):
    with pytest.raises(ValueError, match=message):
      list(_llm().generate(prompts, new_tokens))

  @parameterized.named_parameters(
    ('cache', {'cache': 3}, 'at least 4 slots'),
    ('option', {'cachee': 3}, "did you mean 'cache'"),
    ('scheduler', {'scheduler': 'runahed'}, "did you mean 'runahead'"),
    ('rows', {'requests': 0}, 'at least 1'),
    ('context', {'context': 4096}, '1024 positions'),
    ('memory', {'requests': 10**6, 'context': 1024}, 'GiB left'),
  )
  def test_refuses_at_construction(self, options, message):
    with pytest.raises(ValueError, match=message):
      LLM.load('demo', **options)


class RecordedTest(parameterized.TestCase):
  """Seen to fail with another eviction than the run's."""

  @parameterized.parameters(
    ('runahead', 'lru'), ('runahead', 'lfu_decayed'), ('lockstep', 'reuse')
  )
  def test_a_run_comes_again_count_by_count(self, scheduler, eviction):
    """With its own landings and launches: all hits, misses, evictions."""
    llm = _llm()
    ran = llm.engine(scheduler, eviction)
    for _ in llm.run(ran, llm.requests(PROMPTS, 6)):
      pass
    again = relive.relive(
      ran.log,
      llm.model.config,
      config_lib.SCHEDULERS[scheduler],
      config_lib.EVICTIONS[eviction],
      rows=2,
      slots=llm.slots,
      link_depth=llm.config.link_depth,
      chunk=llm.config.chunk,
    )
    counted = [_counts(e) for e in ran.log]
    # A load may land when nobody looks any more.
    self.assertEqual([_counts(e) for e in again], counted[: len(again)])
    self.assertGreater(len(again), len(counted) - 8)
    self.assertTrue(any(isinstance(e, events.Evicted) for e in again))


class _Overheard:
  """A scheduler whose views are kept, as they were, with what it decided."""

  def __init__(self, scheduler: protocols.Scheduler):
    self.heard: list[tuple[protocols.View, Any, Any]] = []
    self._scheduler, self.depth = scheduler, scheduler.depth
    self._view, self._wants = protocols.View([], 0, 0, [], [], 0), list[Any]()

  def wants(self, view: protocols.View) -> list[protocols.Want]:
    kept = copy.deepcopy(view)
    found = self._scheduler.wants(view)
    self.heard.append((kept, list(found), ...))
    return found

  def launch(self, view: protocols.View) -> protocols.Launch | None:
    kept = copy.deepcopy(view)
    found = self._scheduler.launch(view)
    self.heard.append((kept, ..., _launched(found)))
    return found


class _Watched:
  """An eviction whose choices are kept with what it chose from."""

  def __init__(self, rule: protocols.Eviction):
    self.seen: list[tuple[Any, Any, int]] = []
    self._rule, self.estimates = rule, rule.estimates

  def victim(self, barred: Any, uses: Any) -> int:
    kept = barred.copy(), copy.deepcopy(uses)
    found = self._rule.victim(barred, uses)
    self.seen.append((*kept, found))
    return found


def _launched(launch: protocols.Launch | None) -> Any:
  if launch is None:
    return None
  who = [p.request.number for p in launch.group]
  return launch._replace(group=who)


@functools.cache
def _simulation() -> simulation.Simulation:
  config = simulation.Replay(expert_mb=0.1, cache=0.5, requests=2, tokens=4)
  return simulation.Simulation(config)


class TwoWorldsTest(parameterized.TestCase):
  """One scheduler, eviction, prefetcher for the device and the simulator.

  Seen to fail with `simulation` copying a scheduler, with a scheduler that
  counts its calls or looks at the clock, and with an eviction that remembers
  its last victim.
  """

  @parameterized.product(
    scheduler=tuple(config_lib.SCHEDULERS), eviction=('lru', 'reuse')
  )
  def test_the_very_same_objects(self, scheduler, eviction):
    rule = prefetch.Transition(depth=2)
    engines = [
      world.engine(scheduler, eviction, rule)
      for world in (_llm(), _simulation())
    ]
    for engine in engines:
      self.assertIs(engine._scheduler, config_lib.SCHEDULERS[scheduler])
      self.assertIs(engine._loads._eviction, config_lib.EVICTIONS[eviction])
      self.assertIs(engine._loads.guesses._prefetcher, rule)
    # Plain values that nobody can change while they decide.
    for policy in (
      config_lib.SCHEDULERS[scheduler], config_lib.EVICTIONS[eviction], rule,
    ):  # fmt: skip
      field = dataclasses.fields(policy)[0].name
      with self.assertRaises(dataclasses.FrozenInstanceError):
        setattr(policy, field, getattr(policy, field))

  @parameterized.parameters(
    # No simulator runs a model's gates, and no device knows the future.
    *sorted({*config_lib.PREFETCHERS} - {'next_gate', 'oracle'})
  )
  def test_a_name_means_the_same_in_both(self, name):
    device, simulated = _llm().prefetcher(name), _simulation()._prefetcher(name)
    self.assertEqual(device, simulated)
    self.assertIs(type(device), type(simulated))

  @parameterized.parameters(
    ('runahead', 'lru'), ('runahead', 'reuse'), ('lockstep', 'lfu_decayed'),
    ('bevy', 'lru'), ('largest', 'lru'),
  )  # fmt: skip
  def test_what_the_device_saw_is_decided_again(self, scheduler, eviction):
    """By the simulator's objects, from the views alone and backwards."""
    llm = _llm()
    ran = llm.engine(scheduler, eviction)
    heard = _Overheard(ran._scheduler)
    seen = _Watched(ran._loads._eviction)
    ran._scheduler, ran._loads._eviction = heard, seen
    for _ in llm.run(ran, llm.requests(PROMPTS, 6)):
      pass
    there = _simulation().engine(scheduler, eviction)
    launches = 0
    for view, wants, launch in reversed(heard.heard):
      if wants is not ...:
        self.assertEqual(there._scheduler.wants(view), wants)
      else:
        found = there._scheduler.launch(view)
        self.assertEqual(_launched(found), launch)
        launches += launch is not None
    begun = [e for e in ran.log if isinstance(e, events.LaunchBegun)]
    self.assertEqual(launches, sum(e.kind == 'decode' for e in begun))
    for barred, uses, victim in reversed(seen.seen):
      found = there._loads._eviction.victim(barred, uses)
      self.assertEqual(found, victim)
    self.assertGreater(len(seen.seen), 20)


def _counts(event: events.Event) -> dict[str, Any]:
  """All of an event but its times."""
  times = ('time', 'host', 'arrived', 'began')
  found = {k: v for k, v in dataclasses.asdict(event).items() if k not in times}
  return found | {'event': type(event).__name__}


if __name__ == '__main__':
  absltest.main()
