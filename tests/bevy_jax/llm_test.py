"""LLM on the demo model: the five-line use, streaming, stops, refusals."""

import dataclasses
import functools
from typing import Any

import pytest
from absl.testing import absltest, parameterized

from bevy_jax import LLM, SamplingParams, events, relive
from bevy_jax import config as config_lib
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


def _counts(event: events.Event) -> dict[str, Any]:
  """All of an event but its times."""
  times = ('time', 'host', 'arrived', 'began')
  found = {k: v for k, v in dataclasses.asdict(event).items() if k not in times}
  return found | {'event': type(event).__name__}


if __name__ == '__main__':
  absltest.main()
