"""Decode launches as CUDA graphs of our own: their kernels, and nothing else.

A launch through XLA costs the host 130-280 us, one of these graphs 3: all that
a launch is given lies where it always does, so its kernels can be put into a
graph once. XLA compiles the kernels; what it would launch is captured from the
stream that it computes on, kernel by kernel, and chained. That is safe because:

- Every array that a kernel is given, or writes, is held for as long as the
  graphs are. State and caches, which launches of XLA give up and get back, stay
  where they are (`Graphs.check`).
- Graphs run on XLA's own stream, so nothing overlaps. What XLA begins from a
  thread of its own may come before or behind a graph: each launch depends on
  what the host has seen the end of, and on nothing else.
- What the host writes for a launch is rewritten only when the launch has ended
  (`protocols.Executor`), and so are its answers.
"""

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from bevy_jax import control as control_lib
from bevy_jax.offload import cuda, cuda_graph


class Answer:
  """What a graph will answer; as `jax.Array`, as far as executors ask."""

  def __init__(self, table: np.ndarray, runtime: Any, event: Any):
    """`table` int32 `[hops, rows, 2 + T]` is what the graph copies to."""
    self._table, self._runtime, self._event = table, runtime, event

  def is_ready(self) -> bool:
    """Whether the launch has ended."""
    ready: bool = self._runtime.is_done(self._event)
    return ready

  def block_until_ready(self) -> 'Answer':
    """Waits for its end."""
    self._runtime.sleep(self._event)
    return self

  def __array__(
    self, dtype: Any = None, copy: bool | None = None
  ) -> np.ndarray:
    """As a launch of XLA answers: `[rows, hops * (2 + T)]`, a copy."""
    rows = self._table.shape[1]
    return np.concatenate(self._table, axis=1).reshape(rows, -1)


class Slot(NamedTuple):
  """A graph with its own control vector and answer.

  Attributes:
    parts: of the control vector, see `steps.control_parts`.
    graph: what to launch.
    event: that is recorded behind it.
    answer: of the launch that is next.
  """

  parts: list[np.ndarray]
  graph: cuda_graph.Graph
  event: cuda.Event
  answer: Answer


class Chain(NamedTuple):
  """The kernels of one number of rows, as far as any launch goes.

  Attributes:
    control: the control vector on the device.
    steps: all of them.
    ends: how many of them make the first hop, the first two, ...
    replies: what each hop answers, int32 `[rows, 2 + T]`.
  """

  control: jax.Array
  steps: list[cuda_graph.Captured]
  ends: list[int]
  replies: list[jax.Array]


class Graphs:
  """Graphs by rows and hops, each several times: one a launch in flight."""

  def __init__(
    self,
    runtime: Any,
    stream: int,
    chains: Mapping[int, Chain],
    held: Any,
    ring: int,
    device: jax.Device,
  ):
    """Makes none yet.

    Args:
      runtime: a `cuda_graph.Runtime`.
      stream: that they run on.
      chains: by rows.
      held: what must stay where it is, and alive.
      ring: more than there are ever launches in flight.
      device: that they run on.
    """
    self._runtime, self._stream, self._held = runtime, stream, held
    self._chains, self._ring, self._device = chains, ring, device
    self._slots: dict[tuple[int, int], Iterator[Slot]] = {}
    self._made: list[Slot] = []
    self._end = weakref.finalize(self, _end, runtime, stream, self._made)
    self._end.atexit = False  # The process takes all of it along.

  def serves(self, rows: int, hops: int) -> bool:
    """Whether there is a graph that crosses so many layers."""
    chain = self._chains.get(rows)
    return chain is not None and hops <= len(chain.ends)

  def take(self, rows: int, hops: int) -> Slot:
    """The next one, to fill in; the launch before the last few has ended."""
    found = self._slots.get((rows, hops))
    if found is None:
      made = [self._slot(rows, hops) for _ in range(self._ring)]
      found = self._slots[rows, hops] = itertools.cycle(made)
    return next(found)

  def launch(self, slot: Slot) -> Answer:
    """Begins it."""
    self._runtime.launch(slot.graph, self._stream)
    self._runtime.record(slot.event, self._stream)
    return slot.answer

  def _slot(self, rows: int, hops: int) -> Slot:
    runtime, chain = self._runtime, self._chains[rows]
    width = chain.replies[0].shape[1]
    experts = (chain.control.size - _HEAD - rows) // len(chain.ends)
    parts = [(1,), (1,), (rows,), (hops, experts)]
    (given, asked), (told, answer) = (
      control_lib.ControlRing(shape, 1, self._device).take()
      for shape in (parts, [(hops, rows, width)])
    )
    copy = cuda_graph.Copy
    to, source = (a.unsafe_buffer_pointer() for a in (chain.control, asked))
    home, size = answer.unsafe_buffer_pointer(), told[0][0].nbytes
    graph = runtime.chain(
      [
        copy(to, source, asked.nbytes, False),
        *chain.steps[: chain.ends[hops - 1]],
        *(
          copy(home + hop * size, reply.unsafe_buffer_pointer(), size, True)
          for hop, reply in enumerate(chain.replies[:hops])
        ),
      ]
    )
    runtime.upload(graph, self._stream)
    event = runtime.event()
    # The arrays own the pinned memory.
    self._held = self._held, asked, answer
    slot = Slot(given, graph, event, Answer(told[0], runtime, event))
    self._made.append(slot)
    return slot


_HEAD = 2  # `together` and the first layer; see `steps.control_parts`.


def _end(runtime: Any, stream: int, slots: list[Slot]) -> None:
  with contextlib.suppress(cuda.Error):  # A device that failed has said so.
    runtime.wait(stream)
    for slot in slots:
      runtime.drop_graph(slot.graph)
      runtime.drop_event(slot.event)
