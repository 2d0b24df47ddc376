"""The checked calls of CUDA's runtime."""

from unittest import mock

import jax
from absl.testing import absltest

from bevy_jax.offload import cuda, cuda_fake


class RuntimeTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.fake = cuda_fake.Runtime(lag=2)
    self.runtime = cuda.Runtime(jax.devices()[0], self.fake)

  def test_the_device_is_made_the_current_one(self):
    ordinal = jax.devices()[0].local_hardware_id or 0
    self.assertEqual(self.fake.calls, [('cudaSetDevice', ordinal)])

  def test_an_event_stands_for_what_came_before_it(self):
    stream, event = self.runtime.stream(), self.runtime.event()
    self.runtime.record(event, stream)
    done = [self.runtime.is_done(event) for _ in range(4)]
    self.assertEqual(done, [False, False, True, True])

  def test_a_failure_names_the_call_and_the_reason(self):
    """Seen to fail: a call whose code nobody looks at."""
    runtime, fake = self.runtime, self.fake
    stream, event = runtime.stream(), runtime.event()
    runtime.record(event, stream)
    for name, call in {
      'cudaMemcpyAsync': lambda: runtime.copy(0, 0, 0, stream),
      'cudaEventRecord': lambda: runtime.record(event, stream),
      'cudaEventQuery': lambda: runtime.is_done(event),
      'cudaStreamSynchronize': lambda: runtime.wait(stream),
      'cudaDeviceSynchronize': runtime.wait_all,
      'cudaHostRegister': lambda: runtime.register(4096, 1),
      'cudaStreamCreateWithFlags': runtime.stream,
      'cudaEventCreateWithFlags': runtime.event,
    }.items():
      fake.failing = {name}
      with self.assertRaisesRegex(
        cuda.Error, f'{name} failed: cudaErrorInvalidValue'
      ):
        call()


class ObstacleTest(absltest.TestCase):
  def test_a_device_without_cuda_is_named(self):
    device = mock.Mock(device_kind='toaster')
    device.client.platform_version = 'bread 3'
    self.assertEqual(cuda.obstacle(device), 'toaster is no CUDA device')

  def test_what_is_missing_is_named(self):
    device = mock.Mock()
    device.client.platform_version = 'PJRT C API\ncuda 13000'
    with mock.patch.object(
      cuda.importlib, 'import_module', side_effect=ImportError('no cuda')
    ):
      self.assertRegex(
        cuda.obstacle(device), 'no cuda.*: install cuda-bindings$'
      )
    with mock.patch.object(cuda.importlib, 'import_module'):
      self.assertEqual(cuda.obstacle(device), '')


class GpuTest(absltest.TestCase):
  def test_words_of_a_real_failure(self):
    why = cuda.obstacle(jax.devices()[0])
    if why:
      self.skipTest(why)
    runtime = cuda.Runtime(jax.devices()[0])
    with self.assertRaisesRegex(cuda.Error, 'cudaHostUnregister failed: .+'):
      runtime.unregister(4096)


if __name__ == '__main__':
  absltest.main()
