"""The contracts between engine, scheduler, executor and policies.

Who may change what: the engine owns every Progress and the slot table; a
scheduler and an eviction only look; an executor does what it is told and
never chooses. Times are integers in nanoseconds of the executor's clock.
A bitmap is a Python integer whose bit e stands for expert e of one layer;
layers are counted among those that have experts.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from bevy_jax import pace as pace_lib
from bevy_jax import request as request_lib
from bevy_jax.offload import eviction, prefetch

# The policies of the cache are told in offload, which knows no requests.
Eviction = eviction.Eviction
Prefetcher = prefetch.Prefetcher


class Want(NamedTuple):
  """Experts that somebody awaits at a layer; earlier wants come first.

  Attributes:
    layer: the MoE layer.
    experts: bitmap of all that it needs there, resident ones included.
  """

  layer: int
  experts: int


class Launch(NamedTuple):
  """A scheduler's decision: which rows to compute next.

  Attributes:
    layer: the MoE layer at which all of them wait.
    group: the requests' progress, in row order of the launch.
    experts: bitmap of the experts to apply; all of them are resident.
    finish: True to go on to the next layer; False for a wave, whose outputs
      are kept until the last wave of the layer has run.
    hops: layers that it may cross: who misses nothing at the next one either
      goes on there at once, on the device. The engine may cut it.
    together: nobody goes on where not all of them can.
  """

  layer: int
  group: Sequence[request_lib.Progress]
  experts: int
  finish: bool = True
  hops: int = 1
  together: bool = False


@dataclasses.dataclass(slots=True)
class View:
  """What a scheduler may see; the engine keeps it up to date.

  Attributes:
    waiting: requests that wait at a layer, in order of their rows.
    active: how many requests decode, those in flight included.
    floor: least position among the active ones.
    resident: bitmap of resident experts, one a layer.
    loading: bitmap of experts on the link, one a layer.
    slots: size of the cache.
    experts: experts of a layer.
    in_flight: launches that have not ended.
    flying: requests that decode launches in flight carry, in their order.
    pace: how fast link and device have lately been.
    quota: slots that each layer may fill; empty where all share one pool.
  """

  waiting: list[request_lib.Progress]
  active: int
  floor: int
  resident: list[int]
  loading: list[int]
  slots: int
  experts: int = 1
  in_flight: int = 0
  flying: list[request_lib.Progress] = dataclasses.field(default_factory=list)
  pace: pace_lib.Pace = dataclasses.field(default_factory=pace_lib.Pace)
  quota: Sequence[int] = ()

  def room(self, layer: int) -> int:
    """Experts of a layer that can be resident at once, thus in a wave."""
    return self.quota[layer] if self.quota else self.slots

  def missing(self, layer: int) -> int:
    """How many experts are awaited at a layer and not yet on the link."""
    union = 0
    for p in self.waiting:
      if p.layer == layer:
        union |= p.need
    away = ~(self.resident[layer] | self.loading[layer])
    return (union & away).bit_count()


class Scheduler(Protocol):
  """Decides on plain values: no device, no clock, no hidden randomness."""

  @property
  def depth(self) -> int:
    """Launches that it likes to have in flight at once."""

  def wants(self, view: View) -> list[Want]:
    """Everything awaited, most urgent first; changes nothing.

    The engine loads what is missing in this order, ascending ids within a
    want. For a load it gives up experts that nobody wants; only where there
    are none does it rob a later want, the last one first, never an earlier
    one and never the want itself.
    """

  def launch(self, view: View) -> Launch | None:
    """The next launch, or None to wait; changes nothing.

    Every expert of the launch must be resident.
    """


class Entry(NamedTuple):
  """A request that begins to decode: its last prompt token enters a row."""

  row: int
  token: int
  position: int
  sampling: request_lib.SamplingParams


class Chunk(NamedTuple):
  """Prompt tokens that go through the layers together.

  Attributes:
    rows: B request rows.
    tokens: B lists of token ids, none longer than the executor's chunk.
    starts: B positions of their first tokens.
  """

  rows: Sequence[int]
  tokens: Sequence[Sequence[int]]
  starts: Sequence[int]


class Batch(NamedTuple):
  """One launch, spelled out for the executor.

  Attributes:
    kind: 'enter', 'decode' or 'prefill'.
    layer: MoE layer whose experts are applied, -1 where none are.
    experts: bitmap of those of that layer that it applies.
    rows: request rows ('decode').
    tables: int32 `[hops, experts]`, for each layer that the launch may cross
      the slot of each expert, -1 where it may not be read ('decode'). That is
      all that the device is told of the cache: a snapshot, so that what it
      sees is what the host held when the launch began. At the first layer
      only `experts` are in it, and a choice that is not is left as it is; at
      a later one a row goes on where all of its choices are.
    together: nobody goes on where not all rows do ('decode').
    slots: one tuple of slot numbers a token and choice, -1 where the expert
      is not in this launch ('prefill').
    distinct: the slots that it reads ('prefill').
    finish: False for a wave.
    entries: who enters ('enter').
    chunk: the tokens of a first prefill launch, else None.
  """

  kind: str
  layer: int
  experts: int = 0
  rows: Sequence[int] = ()
  tables: npt.NDArray[np.int32] | None = None
  together: bool = False
  slots: Sequence[Sequence[int]] = ()
  distinct: Sequence[int] = ()
  finish: bool = True
  entries: Sequence[Entry] = ()
  chunk: Chunk | None = None


class Landed(NamedTuple):
  """A load has landed: launches from now on may read the slot.

  Loads land in any order.

  Attributes:
    time: when.
    key: what.
    read: when its read from disk began and ended, empty where there was none.
    began: when the link turned to it; -1 where the executor cannot tell.
  """

  time: int
  key: int
  read: Sequence[int] = ()
  began: int = -1


class Failed(NamedTuple):
  """A load has failed for a reason, told in words; its slot is as it was."""

  time: int
  key: int
  reason: str


class Hop(NamedTuple):
  """What a launch answers at one router, of the rows that came to it.

  Attributes:
    tokens: one sampled token a row, -1 where no head was passed.
    sound: one flag a row, False where the router or the head saw a value
      that is not finite.
    choices: expert ids a row at that MoE layer.
    guesses: for each row, for each MoE layer behind that one in turn, the ids
      that it will probably use there; empty where nobody asked, and without
      the layers of the next token.
    places: which rows of the launch these are, ascending; empty where all.
  """

  tokens: Sequence[int]
  sound: Sequence[bool]
  choices: Sequence[tuple[int, ...]]
  guesses: Sequence[Sequence[Sequence[int]]] = ()
  places: Sequence[int] = ()


class Passed(NamedTuple):
  """All rows of a launch have crossed all of its layers, and all was finite.

  Attributes:
    last: what the last router answers; nobody guesses.
    tokens: one sampled token a row, where a head was passed; empty elsewhere.
    read: distinct experts of each layer behind the first one, in all.
  """

  last: Hop
  tokens: Sequence[int]
  read: int


class Ended(NamedTuple):
  """A launch has ended, with what it answers.

  Attributes:
    time: when it was seen to end.
    launch: its number.
    hops: an answer for each router that anybody came to; empty after a wave.
      All rows come to the first one.
    began: when the device turned to it; -1 where the executor cannot tell.
    passed: the same in short, where that is so and the executor says it: then
      `hops` is not looked at before the next launch has begun.
  """

  time: int
  launch: int
  hops: Sequence[Hop]
  began: int = -1
  passed: Passed | None = None


# What an executor tells of what it was told to do.
Happened = Landed | Failed | Ended


class Executor(Protocol):
  """Does what it is told: moves experts, runs launches, keeps the clock."""

  @property
  def chunk(self) -> int:
    """Tokens a row that one prefill launch takes."""

  @property
  def hops(self) -> int:
    """Layers that a launch can cross at most."""

  def load(self, key: int, slot: int) -> None:
    """Begins to move an expert into a slot that nobody reads or fills.

    `poll` will say that it landed or failed.
    """

  def launch(self, number: int, batch: Batch) -> None:
    """Begins a launch; launches end in the order they began."""

  def poll(self) -> list[Happened]:
    """What has happened since the last call, in order; never waits."""

  def wait(self) -> None:
    """Returns when `poll` may have something; needs something in flight."""

  def now(self) -> int:
    """Nanoseconds of the executor's clock."""

  def close(self) -> None:
    """Ends what is in flight and frees what it holds; safe to repeat."""
