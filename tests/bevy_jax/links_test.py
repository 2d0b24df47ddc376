"""What a link's name becomes on a device."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax import links
from bevy_jax.offload import cuda

BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


def resolve(link, stored=BF16, pool=BF16, obstacle=''):
  with mock.patch.object(cuda, 'obstacle', lambda device: obstacle):
    return links.resolve(link, jax.devices()[0], stored, pool)


class ResolveTest(parameterized.TestCase):
  @parameterized.parameters(
    ('auto', 'cuda', 'cuda'),
    ('cuda', 'cuda', 'cuda'),
    ('device_put', 'device_put', 'device_put'),
    ('throttled:2.5', 'cuda', 'throttled:2.5'),
    ('throttled:2.5:40', 'cuda', 'throttled:2.5:40'),
  )
  def test_where_cuda_is(self, link, transfer, words):
    found = resolve(link)
    self.assertEqual((found.transfer, found.words), (transfer, words))

  @parameterized.parameters('auto', 'throttled:2.5', 'device_put')
  def test_where_it_is_not(self, link):
    found = resolve(link, obstacle='a toaster is no CUDA device')
    self.assertEqual(found.transfer, 'device_put')
    if link == 'auto':
      self.assertEqual(found.words, 'device_put (a toaster is no CUDA device)')

  def test_experts_that_are_converted_take_device_put(self):
    found = resolve('auto', pool=F32)
    self.assertEqual(found.transfer, 'device_put')
    self.assertIn('bfloat16 experts are converted to the float32', found.words)

  @parameterized.parameters(
    (F32, '', 'converted to the float32 of the cache'),
    (BF16, 'a toaster is no CUDA device', 'but a toaster is no CUDA device'),
  )
  def test_by_name_it_is_refused(self, pool, obstacle, message):
    with self.assertRaisesRegex(ValueError, f"{message}. Use link 'auto'"):
      resolve('cuda', pool=pool, obstacle=obstacle)


if __name__ == '__main__':
  absltest.main()
