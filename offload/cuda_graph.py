"""CUDA graphs put together from captured kernels and copies, and launched."""

from collections.abc import Sequence
from typing import Any, NamedTuple, NewType

from bevy_jax.offload import cuda

Captured = NewType('Captured', object)
Graph = NewType('Graph', object)


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


class Runtime(cuda.Runtime):
  """What graphs need of CUDA; see `cuda.Runtime`. Streams are addresses."""

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

  def chain(self, steps: Sequence[Captured | Copy]) -> Graph:
    """A graph that takes these steps one behind the other."""
    graph = self._call('cudaGraphCreate', 0)
    before: list[Any] = []
    for step in steps:
      given = graph, before or None, len(before)
      if isinstance(step, Copy):
        kinds = self._cuda.cudaMemcpyKind
        kind = kinds.cudaMemcpyDeviceToHost if step.home else self._to_device
        copied = step.to, step.source, step.nbytes, kind
        node = self._call('cudaGraphAddMemcpyNode1D', *given, *copied)
      else:
        node = self._call('cudaGraphAddChildGraphNode', *given, step)
      before = [node]
    made = self._call('cudaGraphInstantiate', graph, 0)
    self._call('cudaGraphDestroy', graph)
    return Graph(made)

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

  def _nodes(self, graph: Any, count: int) -> Any:
    code, *values = self._cuda.cudaGraphGetNodes(graph, count)
    if code != self._success:
      raise self._error('cudaGraphGetNodes', code)
    return values
