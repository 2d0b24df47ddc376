"""What things take on a simulated machine, in whole nanoseconds."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Measured(NamedTuple):
  """Device time of one launch through one layer, as it was measured.

  Attributes:
    rows: rows of the launch.
    distinct: distinct experts that it read.
    hops: layers that it crossed.
    ns: what it took.
  """

  rows: int
  distinct: int
  hops: int
  ns: float


class Table:
  """Measured launches, and what lies between them.

  For each measured number of rows it is linear in distinct experts, also
  beyond the last two; between numbers of rows it is linear too, and outside
  them the nearest one counts.
  """

  def __init__(self, measured: Iterable[Measured]):
    self._lines: dict[int, dict[int, list[tuple[int, float]]]] = {}
    for m in sorted(measured):
      lines = self._lines.setdefault(m.hops, {})
      lines.setdefault(m.rows, []).append((m.distinct, m.ns))

  def ns(self, rows: int, distinct: int, hops: int = 1) -> float:
    """Of one launch; KeyError where no launch of so many hops was measured."""
    lines = self._lines[hops]
    at = list(lines)
    points = [(n, _line(lines[n], distinct)) for n in at]
    rows = min(max(rows, at[0]), at[-1])
    return _line(points, rows)


def _line(points: Sequence[tuple[int, float]], x: int) -> float:
  """Linear through the two points around x, or the two nearest ones."""
  if len(points) == 1:
    return points[0][1]
  right = next((i for i, p in enumerate(points) if p[0] >= x), len(points) - 1)
  (x0, y0), (x1, y1) = points[max(right, 1) - 1], points[max(right, 1)]
  return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """One machine that runs one model. All in ns.

  Attributes:
    latency: from the issue of a load to its first byte; hidden while earlier
      loads are on the link.
    load: one expert on the link.
    launch: a launch on the device before it does any work.
    shared: reading the shared weights of one layer.
    expert: reading one distinct expert.
    row: one more row in a launch.
    head: what a launch through the last layer takes beside that.
    heads: (rows, ns) ascending, measured: what it takes beside `head` then,
      linear between numbers of rows; empty where nobody has measured it.
    prompt: one prompt token in one layer.
    table: measured launches, which then count instead of launch, shared,
      expert and row; `table_shared` and `table_expert` are added to them for
      a layer's shared weights and for each distinct expert: what this model's
      bytes take more (or less) than those that were measured.
    table_shared: see `table`.
    table_expert: see `table`.
    idle: a layer that a launch may cross and nobody comes to; -1 where it takes
      what any other takes without experts: a program without branches.
    host_launch: host work before a launch is on the device.
    host_answer: host work to read the answer of a launch that has ended.
    host_row: host work for each row of a decode launch.
    host_load: host work to issue a load.
    host_land: host work for a load that has landed, its slot write included.
    host_look: between two looks while both link and device are busy; 0 where
      the host sees everything at once.
    host_wake: what the host oversleeps when it waits for the link alone.
  """

  latency: int = 0
  load: int = 0
  launch: int = 0
  shared: int = 0
  expert: int = 0
  row: int = 0
  head: int = 0
  heads: tuple[tuple[int, float], ...] = ()
  prompt: int = 0
  table: Table | None = None
  table_shared: float = 0.0
  table_expert: float = 0.0
  idle: int = -1
  host_launch: int = 0
  host_answer: int = 0
  host_row: int = 0
  host_load: int = 0
  host_land: int = 0
  host_look: int = 0
  host_wake: int = 0

  def decode(self, rows: int, distinct: int, *, on: bool, last: bool) -> int:
    """Device time of a decode or enter launch.

    Args:
      rows: its rows.
      distinct: distinct experts that it reads, 0 when it enters.
      on: False for a wave, which reads no shared weights.
      last: whether it goes through head and sampling.
    """
    more = self._head(rows) if last else 0
    if self.table is None:
      shared = self.shared if on else 0
      work = shared + self.expert * distinct + self.row * rows
      return self.launch + work + more
    whole = self.table.ns(rows, distinct) + self.table_expert * distinct
    whole += self.table_shared if on else -self.shared
    return max(self.launch, round(whole)) + more

  def hop(self, rows: int, distinct: int, *, last: bool) -> int:
    """Device time of one more layer in a launch that may cross it.

    It takes what a launch of its own would take: presets were fitted to layers
    in the middle of long launches, and their `launch` is what such a layer
    takes at least. What is saved is the host's time. Only experts are read for
    those alone who go on: all else, and the head where it comes by, is for all
    rows of the launch as soon as somebody does. Where nobody does the kernels
    end at once (`idle`); a program without branches computes all the same.

    Args:
      rows: of the launch.
      distinct: experts that those who go on read; 0 where nobody does.
      last: whether it goes through head and sampling.
    """
    if not distinct and self.idle >= 0:
      return self.idle
    return self.decode(rows, distinct, on=True, last=last)

  def _head(self, rows: int) -> int:
    if not self.heads:
      return self.head
    rows = min(max(rows, self.heads[0][0]), self.heads[-1][0])
    return max(0, self.head + round(_line(self.heads, rows)))

  def prefill(self, tokens: int, distinct: int, *, on: bool) -> int:
    """Device time of a prefill launch; see `decode`."""
    shared = self.shared if on else 0
    return self.launch + shared + self.expert * distinct + self.prompt * tokens
