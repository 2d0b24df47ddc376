"""CUDA graphs put together from captured kernels and copies, and launched."""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple, NewType

import jax

from bevy_jax.offload import cuda

Captured = NewType('Captured', object)
Graph = NewType('Graph', object)

_DRIVER = 'cuda.bindings.driver'
_OVERLAPS_FROM = 12_030  # The driver's CUDA.


class Copy(NamedTuple):
  """A copy of bytes between pinned host memory and the device.

  Attributes:
    to: address.
    source: address.
    nbytes: how many.
    home: whether it is to the host.
  """

  to: int
  source: int
  nbytes: int
  home: bool


class Step(NamedTuple):
  """A kernel of a graph.

  Attributes:
    kernel: what to run.
    early: whether it may be begun before a kernel in front of it has ended: it
      waits by itself before it looks at what that one has made.
    name: as it was called by.
  """

  kernel: Captured
  early: bool
  name: str = ''


class Runtime(cuda.Runtime):
  """What graphs need of CUDA; see `cuda.Runtime`. Streams are addresses."""

  def __init__(
    self, device: jax.Device, module: Any = None, driver: Any = None
  ):
    super().__init__(device, module)
    self._driver = driver or importlib.import_module(_DRIVER)
    self._overlaps = self._drive('cuDriverGetVersion') >= _OVERLAPS_FROM

  def capture(self, stream: int) -> None:
    """What this stream is given from now on is not run but noted."""
    mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    self._call('cudaStreamBeginCapture', stream, mode)

  def captured(self, stream: int) -> Captured:
    """What was noted; the stream runs again what it is given.

    Raises:
      Error: it is something else than one kernel.
    """
    graph = self._call('cudaStreamEndCapture', stream)
    kernel = self._cuda.cudaGraphNodeType.cudaGraphNodeTypeKernel
    count = self._nodes(graph, 0)[1]
    kinds = [
      self._call('cudaGraphNodeGetType', node)
      for node in self._nodes(graph, count)[0]
    ]
    if kinds != [kernel]:
      raise cuda.Error(f'one kernel was expected, {kinds} were captured')
    return Captured(graph)

  def chain(self, steps: Sequence[Step | Copy]) -> Graph:
    """A graph that takes these steps one behind the other."""
    graph = self._call('cudaGraphCreate', 0)
    last: Step | Copy | None = None
    behind: list[Any] = []
    for step in steps:
      early = self._overlaps and _may_overlap(last, step)
      made = self._add(graph, step, [] if early else behind)
      node = [self._driver.CUgraphNode(int(made))]
      if early:
        self._overlap(graph, behind, node)
      last, behind = step, node
    made = self._call('cudaGraphInstantiate', graph, 0)
    self._call('cudaGraphDestroy', graph)
    return Graph(made)

  def _add(self, graph: Any, step: Step | Copy, behind: list[Any]) -> Any:
    """A node that begins when those before it have ended."""
    given = graph, behind or None, len(behind)
    if isinstance(step, Copy):
      kinds = self._cuda.cudaMemcpyKind
      kind = kinds.cudaMemcpyDeviceToHost if step.home else self._to_device
      copied = step.to, step.source, step.nbytes, kind
      return self._call('cudaGraphAddMemcpyNode1D', *given, *copied)
    # The driver knows kernels that were loaded through it, the runtime not.
    [source] = self._nodes(step.kernel, 1)[0]
    found = self._drive('cuGraphKernelNodeGetParams', source)
    return self._drive('cuGraphAddKernelNode', *given, found)

  def _overlap(self, graph: Any, first: list[Any], then: list[Any]) -> None:
    """A kernel may begin once all of another one has begun and said so."""
    driver = self._driver
    edge, kinds = driver.CUgraphEdgeData(), driver.CUgraphDependencyType
    edge.type = int(kinds.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    edge.from_port = int(driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC)
    name = 'cuGraphAddDependencies'  # With edges in it from CUDA 13 on.
    name = f'{name}_v2' if hasattr(driver, f'{name}_v2') else name
    self._drive(name, graph, first, then, [edge], 1)

  def upload(self, graph: Graph, stream: int) -> None:
    """Brings a graph to the device, so that its first launch costs no more."""
    self._call('cudaGraphUpload', graph, stream)

  def launch(self, graph: Graph, stream: int) -> None:
    """Begins a graph behind all that the stream was given."""
    code = self._cuda.cudaGraphLaunch(graph, stream)[0]
    if code != self._success:
      raise self._error('cudaGraphLaunch', code)

  def sleep(self, event: cuda.Event) -> None:
    """Waits until all that an event stands for has ended."""
    self._call('cudaEventSynchronize', event)

  def drop_graph(self, graph: Graph) -> None:
    """Frees a graph that is not running."""
    self._call('cudaGraphExecDestroy', graph)

  def _drive(self, name: str, *arguments: Any) -> Any:
    code, *values = getattr(self._driver, name)(*arguments)
    if code != self._driver.CUresult.CUDA_SUCCESS:
      text = self._driver.cuGetErrorString(code)[1]
      raise cuda.Error(f'{name} failed: {(text or b"").decode()} ({code})')
    return values[0] if values else None

  def _nodes(self, graph: Any, count: int) -> Any:
    code, *values = self._cuda.cudaGraphGetNodes(graph, count)
    if code != self._success:
      raise self._error('cudaGraphGetNodes', code)
    return values


def _may_overlap(one: Step | Copy | None, two: Step | Copy) -> bool:
  return isinstance(one, Step) and isinstance(two, Step) and two.early
