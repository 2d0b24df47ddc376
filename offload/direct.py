"""Copies from pinned memory straight into the slots of the pool, by CUDA.

JAX owns the pool and never hears of these copies. That is safe because:

- The pool stays where it is. Its buffer belongs to one array that we hold
  for as long as we copy; no program donates it (`programs.py` passes it
  as an input alone, and the slot write, which donates it, is not used beside
  direct copies); JAX does not move or compact live buffers. `begin` asserts
  that nobody donated it after all.
- Nobody reads a slot while it is written. A slot is given to a load only
  when no launch in flight holds it (`SlotTable.evict`), and a launch is in
  flight until its answer, which its last kernels write, was seen.
- Whoever reads it afterwards sees the new bytes. A load counts as landed
  once its event was seen to have ended, by this host thread; a launch that
  the thread begins later is ordered behind all of the copy, and kernels
  begin with nothing cached in their processors; one that a graph begins early
  waits before it reads experts, which does the same. XLA cannot move the reads
  of a program to before the program begins.
- No program remembers what the pool held. It is an argument, never a
  constant, and command buffers record where it lies and not what is in it.
- The source stays as it is: a block is not rewritten before its load has
  landed or failed, and its memory is not unpinned while a copy may run
  (`pinned.RegisteredMemory` waits for the device first).
- Nothing is left behind. `close`, and the end of this object's life, wait for
  the stream: neither the pool's memory nor a slot is given away before.
"""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import jax

from bevy_jax.offload import cuda, pinned, transfer


class _Copy(NamedTuple):
  key: int
  slot: int
  event: cuda.Event | None  # None where it failed to begin
  fault: str


class Direct:
  """Loads that need no launch: a copy each, on a stream of its own.

  What has arrived lies in its slot. See the module for why that is safe.
  """

  def __init__(
    self,
    block: Callable[[int], pinned.Block],
    pool: jax.Array,
    runtime: cuda.Runtime,
  ):
    """Copies blocks into `pool` `[slots, *block shape]`.

    Args:
      block: the block of a key; its bytes must be those of a slot.
      pool: on the runtime's device alone, in row-major order.
      runtime: of that device.
    """
    self._block, self._pool, self._runtime = block, pool, runtime
    slots = pool.shape[0]
    self._nbytes = pool.nbytes // slots
    self._base = pool.unsafe_buffer_pointer()
    self._stream = runtime.stream()
    self._made: list[cuda.Event] = []
    self._spare: list[cuda.Event] = []  # Those of them that nobody awaits.
    self._moving: deque[_Copy] = deque()
    self._end = weakref.finalize(self, _end, runtime, self._stream, self._made)
    self._end.atexit = False  # The process takes all of it along.

  def begin(self, key: int, slot: int) -> None:
    """See `Transfer`; a copy that cannot begin is told by `arrived`."""
    assert not self._pool.is_deleted(), 'somebody donated the pool'
    block = self._block(key)
    assert block.view.nbytes == self._nbytes, 'a block is no slot'
    runtime, stream = self._runtime, self._stream
    try:
      if not self._spare:
        self._made.append(runtime.event())
        self._spare.append(self._made[-1])
      to = self._base + slot * self._nbytes
      runtime.copy(to, block.address, self._nbytes, stream)
      runtime.record(self._spare[-1], stream)
    except cuda.Error as error:
      self._moving.append(_Copy(key, slot, None, _words(key, error)))
    else:
      self._moving.append(_Copy(key, slot, self._spare.pop(), ''))

  def flush(self) -> None:
    """See `Transfer`."""

  def arrived(self) -> list[transfer.Moved]:
    """See `Transfer`."""
    out = []
    while self._moving:
      first = self._moving[0]
      fault = first.fault
      if first.event is not None:
        try:
          if not self._runtime.is_done(first.event):
            break
        except cuda.Error as failed:
          fault = _words(first.key, failed)
        self._spare.append(first.event)
      self._moving.popleft()
      out.append(transfer.Moved(first.key, first.slot, None, fault))
    return out

  def due(self) -> int | None:
    """See `Transfer`."""
    return None

  def pending(self) -> int:
    """See `Transfer`."""
    return len(self._moving)

  def close(self) -> None:
    """See `Transfer`; more loads may begin afterwards."""
    # A device that failed has said so already, to whoever awaited a load.
    with contextlib.suppress(cuda.Error):
      self._runtime.wait(self._stream)
    self._spare += [c.event for c in self._moving if c.event is not None]
    self._moving.clear()


def _words(key: int, error: cuda.Error) -> str:
  return f'expert {key} cannot be copied to the device: {error}'


def _end(
  runtime: cuda.Runtime, stream: cuda.Stream, events: list[cuda.Event]
) -> None:
  with contextlib.suppress(cuda.Error):  # As in `close`.
    runtime.wait(stream)
    for event in events:
      runtime.drop_event(event)
    runtime.drop_stream(stream)
