"""Nonsense is refused at construction, with a fix."""

import re
import tempfile
from typing import Any

import jax
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax import config, policies, trace
from bevy_jax.layers import config as model_config
from bevy_jax.offload import prefetch, uses


class ConfigTest(parameterized.TestCase):
  @parameterized.parameters(
    ({'scheduler': 'runahed'}, "did you mean 'runahead'"),
    ({'scheduler': 'xyzzy'}, 'Known:.*lockstep'),
    ({'eviction': 'lfu_'}, "did you mean 'lfu_decayed'"),
    ({'eviction': 'belady'}, 'no running engine can know'),
    ({'eviction': 'static'}, 'name one with trace'),
    ({'prefetch': 'nextgate'}, "did you mean 'next_gate'"),
    ({'prefetch': 'transition:dept=2'}, "option 'dept'.*mean 'depth'"),
    ({'prefetch': 'transition:p=0.5'}, "option 'p' is not known"),
    ({'prefetch': 'transition:depth=0'}, "depth must be 1 to 64, not '0'"),
    ({'prefetch': 'history:confidence=2'}, 'confidence must be 0 to 1'),
    ({'prefetch': 'history:confidence=nan'}, 'confidence must be 0 to 1'),
    ({'prefetch': 'history:guarded=1'}, 'guarded must be true or false'),
    ({'prefetch': 'none:depth=1'}, "'none' takes no options"),
    ({'prefetch': 'transition:warm=true'}, 'name one with trace'),
    ({'prefetch': 'oracle:p=0.9'}, 'no running engine can know'),
    ({'dtype': 'float16'}, "did you mean '"),
    ({'requests': 0}, 'requests is 0; it must be at least 1'),
    ({'requests': 2.5}, 'must be an integer'),
    ({'requests': True}, 'must be an integer'),
    ({'link_depth': 0}, 'at least 1'),
    ({'chunk': 0}, 'at least 1'),
    ({'warmup': -1}, 'at least 0'),
    ({'capacity': 'layers'}, "did you mean 'layer'"),
    ({'cache': 0.0}, r'must lie in \(0, 1\]'),
    ({'cache': 1.5}, 'whole number for slots'),
    ({'cache': '50%'}, 'give a fraction'),
    ({'link': 'device_put:3'}, 'takes no numbers'),
    ({'link': 'auto:3'}, 'takes no numbers'),
    ({'link': 'cudA'}, "did you mean 'cuda'"),
    ({'link': 'throttled'}, 'throttled:GB_PER_S'),
    ({'link': 'throttled:0'}, 'throttled:GB_PER_S'),
    ({'link': 'throttled:1:-2'}, 'throttled:GB_PER_S'),
    ({'link': 'throttled:fast'}, 'throttled:GB_PER_S'),
    ({'link': 'throtled:3'}, "did you mean 'throttled'"),
  )
  def test_refused(self, changes: dict[str, object], said: str):
    with self.assertRaisesRegex(ValueError, said):
      config.EngineConfig(**changes)

  def test_static_keeps_what_its_trace_uses(self):
    experts = np.zeros((1, 3, 2, 1), np.int16)
    experts[0, :, 1, 0] = [2, 2, 1]
    lengths = np.array([3], np.int32)
    found = trace.Trace(experts=experts, lengths=lengths, num_experts=3)
    with tempfile.TemporaryDirectory() as folder:
      path = f'{folder}/trace.npz'
      trace.save(path, found)
      record = config.EngineConfig(eviction='static', trace=path)
      rule = policies.make_eviction('static', record.trace, 2, 3)
      with self.assertRaisesRegex(ValueError, '2 layers of 3 experts, but'):
        policies.make_eviction('static', record.trace, 2, 4)
    for gone in (1, 2, 3):  # Not the used ones: 0, 4 and 5.
      barred = np.full(6, np.inf)
      barred[[0, 4, 5, gone]] = 0
      self.assertEqual(rule.victim(barred, uses.Uses(2, 3)), gone)

  def test_prefetchers(self):
    found, warm = config.parse_prefetch(
      'transition:depth=2:confidence=0.3:guarded=false:warm=true'
    )
    self.assertTrue(warm)
    self.assertEqual(
      found, prefetch.Transition(depth=2, confidence=0.3, guarded=False)
    )
    found, warm = config.parse_prefetch('oracle:p=0.9:seed=7')
    self.assertFalse(warm)
    self.assertEqual(found, prefetch.Oracle(p=0.9, seed=7))
    experts = np.zeros((1, 3, 2, 1), np.int16)
    experts[0, :, 1, 0] = [2, 2, 1]
    lengths = np.array([3], np.int32)
    found = trace.Trace(experts=experts, lengths=lengths, num_experts=3)
    with tempfile.TemporaryDirectory() as folder:
      path = f'{folder}/trace.npz'
      trace.save(path, found)
      warm = policies.make_prefetch('transition:warm=true', path, 2, 3)
      with self.assertRaisesRegex(ValueError, '2 layers of 3 experts, but'):
        policies.make_prefetch('popularity:warm=true', path, 2, 4)
    np.testing.assert_array_equal(
      warm.counts.pairs[:, :, :],
      [
        [[0, 1, 2], [0, 0, 0], [0, 0, 0]],
        [[0, 0, 0], [0, 0, 0], [2, 0, 0]],
      ],
    )
    np.testing.assert_array_equal(warm.counts.followed, [[3, 0, 0], [0, 0, 2]])
    np.testing.assert_array_equal(warm.counts.popular, [[3, 0, 0], [0, 1, 2]])
    np.testing.assert_array_equal(warm.counts.passes, [3, 3])

  def test_links(self):
    self.assertEqual(config.parse_link('device_put'), ('device_put', 0.0, 0.0))
    self.assertEqual(
      config.parse_link('throttled:12.5'), ('throttled', 12.5, 0)
    )
    self.assertEqual(config.parse_link('throttled:1:8'), ('throttled', 1, 8))

  @parameterized.parameters(
    (0.5, 16), (1.0, 32), (0.07, 2), (0.99, 31), (2, 2), (7, 7), (500, 32)
  )
  def test_slots(self, cache: float | int, wanted: int):
    made = config.EngineConfig(cache=cache)
    self.assertEqual(config.slots(made, model_config.tiny()), wanted)

  @parameterized.parameters(1, 0.06, 0, -3)
  def test_too_few_slots(self, cache: float | int):
    made = config.EngineConfig(cache=cache)
    with self.assertRaisesRegex(ValueError, 'at least 2 slots'):
      config.slots(made, model_config.tiny())

  @parameterized.parameters(7, 0.24, 1, 0)
  def test_too_few_slots_for_every_layer(self, cache: float | int):
    model = model_config.tiny()
    made = config.EngineConfig(cache=cache, capacity='layer')
    with self.assertRaisesRegex(ValueError, 'each of 4 layers.* 8 slots, or'):
      config.slots(made, model)

  def test_the_least_that_an_error_names_works(self):
    model = model_config.tiny(num_experts=7, top_k=3)
    for capacity in config.CAPACITIES:
      made = config.EngineConfig(cache=1, capacity=capacity)
      with self.assertRaises(ValueError) as caught:
        config.slots(made, model)
      number, _, fraction = (
        str(caught.exception).split('at least ')[1].rpartition(' of ')
      )
      slots = int(number.split()[0])
      least = model.top_k * (4 if capacity == 'layer' else 1)
      self.assertEqual(slots, least)
      for cache in (slots, float(fraction.rstrip('.'))):
        made = config.EngineConfig(cache=cache, capacity=capacity)
        self.assertGreaterEqual(config.slots(made, model), least)

  def test_quotas(self):
    parted = config.EngineConfig(capacity='layer')
    self.assertEqual(config.quota(parted, 4, 10), (3, 3, 2, 2))
    self.assertEqual(config.quota(config.EngineConfig(), 4, 10), ())

  def test_slots_by_bytes(self):
    model = model_config.tiny()
    made = config.EngineConfig(cache_gib=10_000 / 2**30)
    self.assertEqual(config.slots(made, model, 1000), 10)
    self.assertEqual(config.slots(made, model, 3333), 3)
    self.assertEqual(config.slots(made, model, 1), 32)
    with self.assertRaisesRegex(ValueError, 'is 1 slots.*give at least') as c:
      config.slots(made, model, 9_999)
    self._enough('cache_gib', str(c.exception), 9_999)

  def _enough(self, name: str, said: str, block_bytes: int) -> None:
    """What a refusal asks for works."""
    (gib,) = re.findall(r'at least (\d+\.\d+)', said)
    made = config.EngineConfig(**{name: float(gib)})
    if name == 'host_gib':
      self.assertGreaterEqual(config.host_blocks(made, 99, block_bytes), 4)
    else:
      found = config.slots(made, model_config.tiny(), block_bytes)
      self.assertGreaterEqual(found, 2)

  @parameterized.parameters(
    (0.0, 99), (400_000, 4), (499_999, 4), (9.9e6, 99), (1e12, 99)
  )
  def test_host_blocks(self, nbytes: float, wanted: int):
    made = config.EngineConfig(host_gib=nbytes / 2**30)
    self.assertEqual(config.host_blocks(made, 99, 100_000), wanted)

  def test_too_few_host_blocks(self):
    made = config.EngineConfig(host_gib=399_999 / 2**30)
    with self.assertRaisesRegex(ValueError, 'holds 3 experts') as caught:
      config.host_blocks(made, 99, 100_000)
    self._enough('host_gib', str(caught.exception), 100_000)
    # All of a tiny model are enough, however deep the link.
    self.assertEqual(config.host_blocks(made, 3, 100_000), 3)

  @parameterized.parameters(
    ({'host_gib': -1}, 'host_gib is -1'),
    ({'host_gib': float('nan')}, 'host_gib is nan'),
    ({'cache_gib': True}, 'cache_gib is True'),
    ({'cache_gib': '3'}, "cache_gib is '3'"),
    ({'host_eviction': 'reuse'}, "host eviction 'reuse' is not known"),
  )
  def test_refuses_budgets(self, options: dict[str, Any], said: str):
    with self.assertRaisesRegex(ValueError, said):
      config.EngineConfig(**options)

  def test_slots_count_layers_with_experts_only(self):
    model = model_config.tiny(moe_layers=(True, False, True, False))
    self.assertEqual(config.slots(config.EngineConfig(cache=1.0), model), 16)

  def test_more_bytes_than_memory(self):
    with self.assertRaisesRegex(ValueError, 'GiB'):
      config.check_memory(
        config.EngineConfig(), 2**60, 0, jax.local_devices()[0]
      )


if __name__ == '__main__':
  absltest.main()
