"""Overrides: applied with their type, refused by name."""

import dataclasses

import pytest
from absl.testing import absltest, parameterized

from bevy_jax.experiments import configs, overrides


class OverridesTest(parameterized.TestCase):
  @parameterized.parameters(
    ('new_tokens=7', 'new_tokens', 7),
    ('temperature=1', 'temperature', 1),
    ('ignore_eos=true', 'ignore_eos', True),
    ('compare=lockstep,runahead', 'compare', ('lockstep', 'runahead')),
    ('model=some/dir', 'model', 'some/dir'),
  )
  def test_sets_a_field(self, assignment, field, value):
    record = overrides.apply(configs.plain(), [assignment])
    self.assertEqual(getattr(record, field), value)

  def test_sets_fields_of_the_engine(self):
    record = overrides.apply(
      configs.plain(), ['engine.cache=64', 'engine.eviction=lru']
    )
    self.assertEqual(record.engine.cache, 64)
    self.assertEqual(record.engine.eviction, 'lru')
    self.assertEqual(
      dataclasses.replace(record, engine=configs.plain().engine),
      configs.plain(),
    )

  def test_a_link_that_is_set_is_not_balanced_again(self):
    demo = configs.demo()
    set_link = configs.assign(demo, ['link=throttled:5'])
    self.assertEqual(
      (set_link.engine.link, set_link.balance), ('throttled:5', 0)
    )
    self.assertEqual(
      configs.assign(demo, ['link_depth=2']).balance, demo.balance
    )

  @parameterized.parameters(
    ('cache=64', 'engine.cache=64'),
    ('strict = true', 'engine.strict = true'),
    ('model=x', 'model=x'),
    ('nonsense=1', 'nonsense=1'),
  )
  def test_fields_of_the_engine_need_no_prefix(self, given, meant):
    self.assertEqual(configs.qualified(given), meant)

  @parameterized.parameters(
    ('new_token=7', "did you mean 'new_tokens'"),
    ('engine.evictoin=lru', "did you mean 'eviction'"),
    ('new_tokens=many', 'expected a value of type int'),
    ('new_tokens=1.5', 'expected a value of type int'),
    ('ignore_eos=1', 'expected a value of type bool'),
    ('new_tokens', 'has no "="'),
    ('model.x=1', 'no fields of its own'),
    ('engine.requests=0', 'at least 1'),
  )
  def test_refuses(self, assignment, message):
    with pytest.raises(ValueError, match=message):
      overrides.apply(configs.plain(), [assignment])


if __name__ == '__main__':
  absltest.main()
