"""Whom the GPU kernels serve, and how many slots they need."""

import types
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kernel_call, kernels, quant


class UnfitTest(parameterized.TestCase):
  def test_a_plain_model_fits(self):
    for form in (None, quant.parse('int8')):
      config = config_lib.tiny(expert_dim=32)
      self.assertEqual(kernels.unfit(config, jnp.bfloat16, form), '')

  @parameterized.parameters(
    ({'moe_layers': (True, False, True, True), 'dense_dim': 8}, 'no experts'),
    ({'shared_dim': 16}, 'shared expert'),
    ({'head_dim': 9}, 'halved'),
    ({'model_dim': 40}, 'does not divide'),
    ({'expert_dim': 24}, 'does not divide'),
  )
  def test_why_not(self, changes, words):
    config = config_lib.tiny(**changes)
    self.assertIn(words, kernels.unfit(config, jnp.bfloat16, None))
    with self.assertRaisesRegex(ValueError, 'kernels is on, but .*' + words):
      kernels.chosen('on', config, jnp.bfloat16, None)
    self.assertFalse(kernels.chosen('auto', config, jnp.bfloat16, None))

  def test_types_and_groups(self):
    config = config_lib.tiny(model_dim=96, expert_dim=64)
    self.assertIn('float16', kernels.unfit(config, jnp.float16, None))
    for d, f in (96, 64), (64, 96):
      config = config_lib.tiny(model_dim=d, expert_dim=f)
      why = kernels.unfit(config, jnp.bfloat16, quant.parse('int4'))
      self.assertIn('two groups', why)
      self.assertEqual(
        kernels.unfit(config, jnp.bfloat16, quant.parse('int8')), ''
      )

  def test_off_is_off_and_on_is_on(self):
    config = config_lib.tiny()
    self.assertTrue(kernels.chosen('on', config, jnp.float32, None))
    self.assertFalse(kernels.chosen('off', config, jnp.bfloat16, None))
    # In float32 they are not faster than the plain form is exact.
    self.assertFalse(kernels.chosen('auto', config, jnp.float32, None))

  @parameterized.parameters(('cpu', False), ('gpu', True))
  def test_auto_is_on_where_there_is_a_gpu(self, backend, wanted):
    with mock.patch.object(jax, 'default_backend', lambda: backend):
      got = kernels.chosen('auto', config_lib.tiny(), jnp.bfloat16, None)
    self.assertEqual(got, wanted)


class ChainedTest(parameterized.TestCase):
  @parameterized.parameters(
    ('9.0', True), ('12.0', True), ('8.9', False), ('gfx942', False), (None, 0)
  )
  def test_from_compute_capability_9_on(self, found, wanted):
    device = types.SimpleNamespace()
    if found is not None:
      device.compute_capability = found
    with (
      mock.patch.object(jax, 'default_backend', lambda: 'gpu'),
      mock.patch.object(jax, 'devices', lambda: [device]),
    ):
      self.assertEqual(kernel_call.chained(), wanted)

  def test_interpreted_kernels_are_not(self):
    if jax.default_backend() != 'gpu':
      self.assertFalse(kernel_call.chained())


class SlotsTest(parameterized.TestCase):
  @parameterized.parameters(
    (2**21, 1024, 2**21),  # 2 GiB.
    (2**21 + 1, 1024, 2**22 + 1),
    (2**22, 1024, 2**22 + 1),
    (2**22 + 1, 1024, 2**22 + 1),
    (3, 2**30, 5),
  )
  def test_bytes_between_two_and_four_gib(self, slots, block, wanted):
    form = quant.parse('int8')
    self.assertEqual(kernels.slots_of(slots, block, form), wanted)
    self.assertEqual(kernels.slots_of(slots, block, None), slots)


if __name__ == '__main__':
  absltest.main()
