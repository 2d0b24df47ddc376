"""CUDA's runtime played on host memory, for tests where there is no GPU."""

import ctypes
import enum
from collections import deque
from typing import Any

_TORN = 0xA5  # What a copy leaves behind until it has ended.


class Code(enum.IntEnum):
  """The codes that it returns."""

  cudaSuccess = 0
  cudaErrorInvalidValue = 1
  cudaErrorNotReady = 600


class Kind(enum.IntEnum):
  """The kind that it copies."""

  cudaMemcpyHostToDevice = 1


class Runtime:
  """Stands for the module `cuda.bindings.runtime`; see `cuda.Runtime`.

  A copy is as late as it may be: its target holds torn bytes until somebody
  waits for the stream, or has asked for an event behind it `lag` times.

  Attributes:
    lag: how often an event says that it is not ready.
    failing: names of calls that fail from now on.
    calls: name and arguments of every call.
    pinned: address -> bytes of what is registered.
    live: streams and events that were not destroyed.
  """

  cudaError_t = Code  # the names are CUDA's
  cudaMemcpyKind = Kind
  cudaStreamNonBlocking = 1
  cudaEventDisableTiming = 2
  cudaHostRegisterDefault = 0

  def __init__(self, lag: int = 1):
    self.lag = lag
    self.failing: set[str] = set()
    self.calls: list[tuple[Any, ...]] = []
    self.pinned: dict[int, int] = {}
    self.live: set[int] = set()
    self._numbers = 0
    # Stream -> what it was given: copies, and events by their number.
    self._queued: dict[int, deque[tuple[int, int, int] | int]] = {}
    self._behind: dict[int, int] = {}  # Event -> the stream it is in.
    self._asked: dict[int, int] = {}

  def cudaSetDevice(self, ordinal: int) -> tuple[Any, ...]:
    return self._log('cudaSetDevice', ordinal)

  def cudaGetErrorString(self, code: Code) -> tuple[Any, ...]:
    return Code.cudaSuccess, code.name.encode()

  def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
    number = self._new()
    self._queued[number] = deque()
    return *self._log('cudaStreamCreateWithFlags', flags), number

  def cudaEventCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
    return *self._log('cudaEventCreateWithFlags', flags), self._new()

  def cudaMemcpyAsync(
    self, to: int, source: int, nbytes: int, kind: int, stream: int
  ) -> tuple[Any, ...]:
    code = self._log('cudaMemcpyAsync', to, source, nbytes, kind, stream)
    if code[0] == Code.cudaSuccess:
      ctypes.memset(to, _TORN, nbytes)
      self._queued[stream].append((to, source, nbytes))
    return code

  def cudaEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
    code = self._log('cudaEventRecord', event, stream)
    if code[0] == Code.cudaSuccess:
      self._queued[stream].append(event)
      self._behind[event], self._asked[event] = stream, 0
    return code

  def cudaEventQuery(self, event: int) -> tuple[Any, ...]:
    code = self._log('cudaEventQuery', event)
    if code[0] != Code.cudaSuccess or event not in self._behind:
      return code
    self._asked[event] += 1
    if self._asked[event] <= self.lag:
      return (Code.cudaErrorNotReady,)
    self._run(self._behind[event], event)
    return code

  def cudaStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
    self._run(stream)
    return self._log('cudaStreamSynchronize', stream)

  def cudaDeviceSynchronize(self) -> tuple[Any, ...]:
    for stream in self._queued:
      self._run(stream)
    return self._log('cudaDeviceSynchronize')

  def cudaStreamDestroy(self, stream: int) -> tuple[Any, ...]:
    self.live.remove(stream)
    return self._log('cudaStreamDestroy', stream)

  def cudaEventDestroy(self, event: int) -> tuple[Any, ...]:
    self.live.remove(event)
    return self._log('cudaEventDestroy', event)

  def cudaHostRegister(
    self, address: int, nbytes: int, flags: int
  ) -> tuple[Any, ...]:
    code = self._log('cudaHostRegister', address, nbytes, flags)
    if code[0] == Code.cudaSuccess:
      self.pinned[address] = nbytes
    return code

  def cudaHostUnregister(self, address: int) -> tuple[Any, ...]:
    del self.pinned[address]
    return self._log('cudaHostUnregister', address)

  def _log(self, name: str, *arguments: Any) -> tuple[Code]:
    self.calls.append((name, *arguments))
    if name in self.failing:
      return (Code.cudaErrorInvalidValue,)
    return (Code.cudaSuccess,)

  def _new(self) -> int:
    self._numbers += 1
    self.live.add(self._numbers)
    return self._numbers

  def _run(self, stream: int, until: int | None = None) -> None:
    """Does what a stream was given, up to an event or all of it."""
    queued = self._queued[stream]
    while queued:
      item = queued.popleft()
      if isinstance(item, tuple):
        ctypes.memmove(*item)
        continue
      self._behind.pop(item, None)
      if item == until:
        return
