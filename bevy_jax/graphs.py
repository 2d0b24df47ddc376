"""Decode launches as CUDA graphs of our own: their kernels, and nothing else.

A launch through XLA costs the host 130-280 us, one of these graphs 3: all that
a launch is given lies where it always does, so its kernels can be put into a
graph once. XLA compiles the kernels; what it would launch is captured from the
stream that it computes on, kernel by kernel, and chained. That is safe because:

- Every array that a kernel is given, or writes, is held for as long as the
  graphs are. State and caches, which launches of XLA give up and get back, stay
  where they are (`Launches.check`).
- Graphs run on XLA's own stream, so nothing overlaps. What XLA begins from a
  thread of its own may come before or behind a graph: each launch depends on
  what the host has seen the end of, and on nothing else. Kernels of a graph
  that are begun early wait before they look (`kernel_call.call`).
- What the host writes for a launch is rewritten only when the launch has ended
  (`protocols.Executor`), and so are its answers.
"""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bevy_jax import control as control_lib
from bevy_jax import hop_table, protocols, steps
from bevy_jax.layers import kernel_rows
from bevy_jax.offload import cuda, cuda_graph

# Rows of launches whose kernels are begun early: with more there is no gain.
_FEW = 4


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

  def table(self, rows: int) -> np.ndarray:
    """A copy for the first rows, `[hops, rows, 2 + T]`."""
    return self._table[:, :rows].copy()

  def lines(self, rows: int) -> list[list[list[int]]]:
    """The same as lists."""
    found: list[list[list[int]]] = self._table[:, :rows].tolist()
    return found

  def __array__(
    self, dtype: Any = None, copy: bool | None = None
  ) -> np.ndarray:
    """As a launch of XLA answers: `[rows, hops * (2 + T)]`, a copy."""
    return np.concatenate(self._table, axis=1)


class Told(Sequence[protocols.Hop]):
  """What a launch answers, taken apart when somebody looks at it."""

  def __init__(self, k: int, table: np.ndarray):
    """`table` int32 `[hops, rows, 2 + k]`; nobody rewrites it."""
    self._k, self._table = k, table

  @functools.cached_property
  def _hops(self) -> list[protocols.Hop]:
    table = self._table
    return hop_table.read(self._k, table.tolist(), (0,) * len(table))

  def __len__(self) -> int:
    """Up to the last one that anybody took."""
    return len(self._hops)

  def __getitem__(self, number: Any) -> Any:
    """See `Sequence`."""
    return self._hops[number]

  def __iter__(self) -> Iterator[protocols.Hop]:
    """Faster than by numbers."""
    return iter(self._hops)


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
  """The hops of launches of one kind, as far as the longest goes.

  Attributes:
    control: the control vector on the device.
    answers: int32 `[hops, rows, 2 + T]`, what they answer, on the device.
    hops: the kernels of each; a shorter launch leaves out the last ones.
  """

  control: jax.Array
  answers: jax.Array
  hops: list[list[cuda_graph.Step]]


class Graphs:
  """Graphs by rows and hops, each several times: one a launch in flight."""

  def __init__(
    self,
    runtime: Any,
    stream: int,
    chains: Mapping[tuple[int, int], Chain],
    held: Any,
    ring: int,
    device: jax.Device,
  ):
    """Makes none yet.

    Args:
      runtime: a `cuda_graph.Runtime`.
      stream: that they run on.
      chains: by rows and place of the head.
      held: what must stay where it is, and alive.
      ring: more than there are ever launches in flight.
      device: that they run on.
    """
    self._runtime, self._stream, self._held = runtime, stream, held
    self._chains, self._ring, self._device = chains, ring, device
    self._slots: dict[tuple[int, int, int, bool], Iterator[Slot]] = {}
    self._tables = max(len(chain.hops) for chain in chains.values())
    self._pinned: list[jax.Array] = []  # They own the memory of the slots.
    self._made: list[Slot] = []
    self._end = weakref.finalize(self, _end, runtime, stream, self._made)
    self._end.atexit = False  # The process takes all of it along.

  def take(self, rows: int, hops: int, head: int, together: bool) -> Slot:
    """The next one of a kind, to fill in; see `recorder.Kinds`.

    The launch that it was before must have ended. Only graphs of rows that go
    `together` let them agree between layers.
    """
    kind = rows, hops, head, together
    found = self._slots.get(kind)
    if found is None:
      made = [self._slot(*kind) for _ in range(self._ring)]
      found = self._slots[kind] = itertools.cycle(made)
    return next(found)

  def launch(self, slot: Slot) -> Answer:
    """Begins it."""
    self._runtime.launch(slot.graph, self._stream)
    self._runtime.record(slot.event, self._stream)
    return slot.answer

  def _slot(self, rows: int, count: int, head: int, together: bool) -> Slot:
    runtime = self._runtime
    control, answers, hops = self._chains[rows, head]
    # There is room for more tables on the device than a short launch sends.
    experts = (control.size - steps.ROWS_START - rows) // self._tables
    parts = [(1,), (1,), (rows,), (count, experts)]
    (given, asked), (told, answer) = (
      control_lib.ControlRing(shape, 1, self._device).take()
      for shape in (parts, [(count, *answers.shape[1:])])
    )
    to, source, home, told_by = (
      a.unsafe_buffer_pointer() for a in (control, asked, answer, answers)
    )
    kernels = [
      kernel._replace(early=kernel.early and rows <= _FEW)
      for kernel in itertools.chain.from_iterable(hops[:count])
      if together or kernel.name != kernel_rows.AGREE
    ]
    graph = runtime.chain(
      [
        cuda_graph.Copy(to, source, asked.nbytes, False),
        *kernels,
        cuda_graph.Copy(home, told_by, answer.nbytes, True),
      ]
    )
    runtime.upload(graph, self._stream)
    event = runtime.event()
    self._pinned += [asked, answer]
    slot = Slot(given, graph, event, Answer(told[0], runtime, event))
    self._made.append(slot)
    return slot


def _end(runtime: Any, stream: int, slots: list[Slot]) -> None:
  with contextlib.suppress(cuda.Error):  # A device that failed has said so.
    runtime.wait(stream)
    for slot in slots:
      runtime.drop_graph(slot.graph)
      runtime.drop_event(slot.event)
