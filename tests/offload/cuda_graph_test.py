"""CUDA graphs put together: order, what is refused, errors in CUDA's words.

The module is played; on a GPU `device_test` and `parity_test` run real ones.
Seen to fail: steps that do not depend on the one before, a capture of two
kernels or of a copy that is taken, a failed launch passed over.
"""

import enum
import functools
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

  def __init__(self, captured=('kernel',), failing='', edges=None):
    self.captured, self.failing = list(captured), failing
    self._edges = {} if edges is None else edges
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
        # Of a graph that was captured: its kernel tells whose it is.
        graph, count = arguments
        found = [f'{node} {graph}' for node in self.captured]
        if graph == 'graph':
          found = self.captured
        return found[:count], len(found)
      case 'cudaGraphNodeGetType':
        return (arguments[0],)
      case 'cudaGraphCreate' | 'cudaGraphInstantiate':
        return (name,)
      case 'cudaGraphAddMemcpyNode1D':
        number = 1000 + len(self.named(name))
        for node in arguments[1] or ():
          self._edges[node, number] = 0, 0
        return (number,)
    return ()

  def named(self, name):
    return [call[1:] for call in self.calls if call[0] == name]


class _Driver:
  """Kernels by the numbers of their nodes, and edges with port and type."""

  CUresult = SimpleNamespace(CUDA_SUCCESS=0)
  CUgraphNode = int
  CUgraphEdgeData = functools.partial(SimpleNamespace, from_port=0, type=0)
  CUgraphDependencyType = SimpleNamespace(
    CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC=1
  )
  CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC = 1

  def __init__(self, version=13_000, failing=''):
    self._version, self._failing = version, failing
    self.kernels: dict[int, Any] = {}
    self.edges: dict[tuple[int, int], tuple[int, int]] = {}

  def cuDriverGetVersion(self):
    return 0, self._version

  def cuGetErrorString(self, code):
    return 0, b'it broke'

  def cuGraphKernelNodeGetParams(self, node):
    return 0, node

  def cuGraphAddKernelNode(self, graph, before, count, kernel):
    if self._failing == 'cuGraphAddKernelNode':
      return 1, None
    assert (graph, count) == ('cudaGraphCreate', len(before or ()))
    number = 101 + len(self.kernels)
    self.kernels[number] = kernel
    self.edges |= {(node, number): (0, 0) for node in before or ()}
    return 0, number

  def cuGraphAddDependencies(self, graph, first, then, edges, count):
    [pair], [edge] = zip(first, then, strict=True), edges
    assert count == 1
    self.edges[pair] = edge.from_port, edge.type
    return (0,)


def _runtime(module, driver=None):
  device = SimpleNamespace(local_hardware_id=0)
  return cuda_graph.Runtime(device, module, driver or _Driver())


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

  @parameterized.parameters((13_000, (1, 1)), (12_020, (0, 0)))
  def test_steps_follow_each_other(self, version, early):
    """Where the driver is too old every step waits for all of the last."""
    driver = _Driver(version)
    module = _Cuda(edges=driver.edges)
    copy, step = cuda_graph.Copy, cuda_graph.Step
    made = _runtime(module, driver).chain(
      [
        copy(10, 20, 4, False),
        step('a', True),  # Never behind a copy.
        step('b', True),
        step('c', False),
        copy(30, 40, 8, True),
      ]
    )
    self.assertEqual(made, 'cudaGraphInstantiate')
    up, down = module.named('cudaGraphAddMemcpyNode1D')
    self.assertEqual(up[1:], (None, 0, 10, 20, 4, 'up'))
    self.assertEqual(down[3:], (30, 40, 8, 'down'))
    self.assertEqual(
      driver.kernels, {101 + i: f'kernel {x}' for i, x in enumerate('abc')}
    )
    full = 0, 0
    self.assertEqual(
      driver.edges,
      {
        (1001, 101): full,
        (101, 102): early,
        (102, 103): full,
        (103, 1002): full,
      },
    )
    self.assertLen(module.named('cudaGraphDestroy'), 1)

  def test_errors_of_the_driver_are_told(self):
    runtime = _runtime(_Cuda(), _Driver(failing='cuGraphAddKernelNode'))
    with self.assertRaisesRegex(cuda.Error, 'AddKernelNode failed: it broke'):
      runtime.chain([cuda_graph.Step('a', False)])

  def test_errors_are_told(self):
    runtime = _runtime(_Cuda(failing='cudaGraphLaunch'))
    with self.assertRaisesRegex(cuda.Error, 'cudaGraphLaunch failed: it is'):
      runtime.launch('graph', 7)


if __name__ == '__main__':
  absltest.main()
