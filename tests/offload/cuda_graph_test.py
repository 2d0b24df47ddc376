"""CUDA graphs put together: order, what is refused, errors in CUDA's words.

The module is played; on a GPU `device_test` and `parity_test` run real ones.
Seen to fail: steps that do not depend on the one before, a capture of two
kernels or of a copy that is taken, a failed launch passed over.
"""

import enum
from types import SimpleNamespace
from typing import Any

from absl.testing import absltest, parameterized

from bevy_jax.offload import cuda, cuda_graph


class _Code(enum.IntEnum):
  cudaSuccess = 0
  cudaErrorInvalidValue = 1
  cudaErrorNotReady = 600


class _Cuda:
  """Graphs are lists of (node, dependencies), nodes are their numbers."""

  cudaError_t = _Code
  cudaMemcpyKind = SimpleNamespace(
    cudaMemcpyHostToDevice='up', cudaMemcpyDeviceToHost='down'
  )
  cudaGraphNodeType = SimpleNamespace(cudaGraphNodeTypeKernel='kernel')
  cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeRelaxed='any')

  def __init__(self, captured=('kernel',), failing=''):
    self.captured, self.failing = list(captured), failing
    self.calls: list[tuple[Any, ...]] = []

  def __getattr__(self, name):
    def call(*arguments):
      self.calls.append((name, *arguments))
      if name == self.failing:
        return (_Code.cudaErrorInvalidValue, *[None] * 2)
      return (_Code.cudaSuccess, *self._answer(name, arguments))

    return call

  def _answer(self, name, arguments):
    match name:
      case 'cudaGetErrorString':
        return (b'it is wrong',)
      case 'cudaStreamEndCapture':
        return ('graph',)
      case 'cudaGraphGetNodes':
        return self.captured[: arguments[1]], len(self.captured)
      case 'cudaGraphNodeGetType':
        return (arguments[0],)
      case 'cudaGraphCreate' | 'cudaGraphInstantiate':
        return (name,)
      case 'cudaGraphAddChildGraphNode' | 'cudaGraphAddMemcpyNode1D':
        return (len(self.calls),)
    return ()

  def named(self, name):
    return [call[1:] for call in self.calls if call[0] == name]


def _runtime(module):
  return cuda_graph.Runtime(SimpleNamespace(local_hardware_id=0), module)


class CudaGraphTest(parameterized.TestCase):
  def test_one_kernel_is_captured(self):
    module = _Cuda()
    runtime = _runtime(module)
    runtime.capture(7)
    self.assertEqual(runtime.captured(7), 'graph')
    self.assertEqual(module.named('cudaStreamBeginCapture'), [(7, 'any')])

  @parameterized.parameters((('kernel', 'kernel'),), (('copy',),), ((),))
  def test_nothing_else_is(self, found):
    with self.assertRaisesRegex(cuda.Error, 'one kernel was expected'):
      _runtime(_Cuda(found)).captured(7)

  def test_steps_follow_each_other(self):
    module = _Cuda()
    copy = cuda_graph.Copy
    steps = [copy(10, 20, 4, False), 'a', 'b', copy(30, 40, 8, True)]
    made = _runtime(module).chain(steps)
    self.assertEqual(made, 'cudaGraphInstantiate')
    (up, down) = module.named('cudaGraphAddMemcpyNode1D')
    (a, b) = module.named('cudaGraphAddChildGraphNode')
    self.assertEqual(up[1:], (None, 0, 10, 20, 4, 'up'))
    self.assertEqual((a[3], b[3]), ('a', 'b'))
    self.assertEqual(down[3:], (30, 40, 8, 'down'))
    nodes = [i + 1 for i, call in enumerate(module.calls) if 'Add' in call[0]]
    for step, before in zip((a, b, down), nodes, strict=False):
      self.assertEqual(step[1:3], ([before], 1))
    self.assertLen(module.named('cudaGraphDestroy'), 1)

  def test_errors_are_told(self):
    runtime = _runtime(_Cuda(failing='cudaGraphLaunch'))
    with self.assertRaisesRegex(cuda.Error, 'cudaGraphLaunch failed: it is'):
      runtime.launch('graph', 7)


if __name__ == '__main__':
  absltest.main()
