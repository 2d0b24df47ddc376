"""The few CUDA calls that direct copies need, checked, and nothing more."""

import importlib
from typing import Any, NewType

import jax

Stream = NewType('Stream', object)
Event = NewType('Event', object)

_MODULE = 'cuda.bindings.runtime'


class Error(RuntimeError):
  """A CUDA call that failed: which, and CUDA's own words for why."""


def obstacle(device: jax.Device) -> str:
  """Why a device cannot be used directly; empty where it can."""
  version = str(getattr(device.client, 'platform_version', ''))
  if 'cuda' not in version.lower():
    return f'{device.device_kind} is no CUDA device'
  try:
    importlib.import_module(_MODULE)
  except ImportError as error:
    return f'{_MODULE} cannot be imported ({error}): install cuda-bindings'
  return ''


class Runtime:
  """CUDA's runtime on one device; every call raises `Error` where it fails.

  The device becomes the current one of the calling thread, and streams and
  events belong to it. None of these calls waits unless its name says so.
  """

  def __init__(self, device: jax.Device, module: Any = None):
    self._cuda = module or importlib.import_module(_MODULE)
    self._success = self._cuda.cudaError_t.cudaSuccess
    self._not_ready = self._cuda.cudaError_t.cudaErrorNotReady
    self._to_device = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
    self._call('cudaSetDevice', int(device.local_hardware_id or 0))

  def stream(self) -> Stream:
    """A new stream that no other stream waits for."""
    flags = self._cuda.cudaStreamNonBlocking
    return Stream(self._call('cudaStreamCreateWithFlags', flags))

  def event(self) -> Event:
    """A new event that takes no time stamps: those cost a little."""
    flags = self._cuda.cudaEventDisableTiming
    return Event(self._call('cudaEventCreateWithFlags', flags))

  def copy(self, to: int, source: int, nbytes: int, stream: Stream) -> None:
    """Begins to copy host memory to the device, behind what `stream` has."""
    code = self._cuda.cudaMemcpyAsync(
      to, source, nbytes, self._to_device, stream
    )[0]
    if code != self._success:
      raise self._error('cudaMemcpyAsync', code)

  def record(self, event: Event, stream: Stream) -> None:
    """The event stands for all that `stream` was given until now."""
    code = self._cuda.cudaEventRecord(event, stream)[0]
    if code != self._success:
      raise self._error('cudaEventRecord', code)

  def is_done(self, event: Event) -> bool:
    """Whether all that an event stands for has ended."""
    code = self._cuda.cudaEventQuery(event)[0]
    if code == self._success:
      return True
    if code == self._not_ready:
      return False
    raise self._error('cudaEventQuery', code)

  def wait(self, stream: Stream) -> None:
    """Waits until a stream has done all it was given."""
    self._call('cudaStreamSynchronize', stream)

  def wait_all(self) -> None:
    """Waits until the device has done all that it was given."""
    self._call('cudaDeviceSynchronize')

  def drop_stream(self, stream: Stream) -> None:
    """Frees a stream."""
    self._call('cudaStreamDestroy', stream)

  def drop_event(self, event: Event) -> None:
    """Frees an event."""
    self._call('cudaEventDestroy', event)

  def register(self, address: int, nbytes: int) -> None:
    """Pins host memory that is ours; whole pages are pinned at once."""
    flags = self._cuda.cudaHostRegisterDefault
    self._call('cudaHostRegister', address, nbytes, flags)

  def unregister(self, address: int) -> None:
    """Undoes `register` of this very address."""
    self._call('cudaHostUnregister', address)

  def _call(self, name: str, *arguments: Any) -> Any:
    code, *values = getattr(self._cuda, name)(*arguments)
    if code != self._success:
      raise self._error(name, code)
    return values[0] if values else None

  def _error(self, name: str, code: Any) -> Error:
    failed, text = self._cuda.cudaGetErrorString(code)
    said = 'no text' if failed != self._success else text
    said = said.decode() if isinstance(said, bytes) else str(said)
    return Error(f'{name} failed: {said} ({getattr(code, "name", code)})')
