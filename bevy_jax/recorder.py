"""What the kernels of decode launches are, captured for graphs of our own."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import buffer_callback

from bevy_jax import fused, graphs, segments, stacked, steps
from bevy_jax.layers import config as config_lib
from bevy_jax.layers import experts, kernel_call, kv_cache
from bevy_jax.offload import cuda, cuda_graph

# A kernel in a graph of XLA's would be captured as a graph.
_NO_GRAPHS_OF_XLA = {'xla_gpu_enable_command_buffer': ''}
_TOKEN = jax.ShapeDtypeStruct((1,), jnp.int32)
_Key = tuple[str, tuple[Any, ...]]


class Capture(Protocol):
  """How kernels become steps of a graph."""

  def around(
    self, run: Callable[..., tuple[Any, ...]], aliases: Mapping[int, int]
  ) -> Callable[..., tuple[Any, ...]]:
    """A kernel's function to be jitted: `take` gives it when it was called.

    Its last operand, a token, comes back behind what it writes; of the others
    `aliases` are overwritten.
    """

  def take(self) -> cuda_graph.Captured:
    """The kernel of the call that was made last; it has not run."""

  def graphs(
    self,
    chains: Mapping[tuple[int, int], graphs.Chain],
    held: Any,
    ring: int,
    device: jax.Device,
  ) -> graphs.Graphs:
    """What was taken, to be launched; see `graphs.Graphs`."""


class StreamCapture:
  """Captures the stream that XLA computes on, between two callbacks.

  Attributes:
    stream: its address, once anything was captured.
  """

  def __init__(self, runtime: cuda_graph.Runtime):
    self._runtime, self.stream = runtime, 0
    self._found: cuda_graph.Captured | None = None

  def around(
    self, run: Callable[..., tuple[Any, ...]], aliases: Mapping[int, int]
  ) -> Callable[..., tuple[Any, ...]]:
    """See `Capture`; the token is what puts the callbacks around it."""

    def begin(context: Any, out: Any, token: Any) -> None:
      self.stream = context.stream
      self._runtime.capture(self.stream)

    def end(context: Any, out: Any, *written: Any) -> None:
      self._found = self._runtime.captured(context.stream)

    def program(*operands: jax.Array) -> tuple[jax.Array, ...]:
      call = buffer_callback.buffer_callback
      token = call(begin, _TOKEN, has_side_effect=True)(operands[-1])
      written = run(*operands[:-1], token)
      done = call(end, _TOKEN, has_side_effect=True)(*written)
      return (*written, done)

    return program

  def take(self) -> cuda_graph.Captured:
    """See `Capture`."""
    found, self._found = self._found, None
    assert found is not None, 'nothing was captured'
    return found

  def graphs(
    self,
    chains: Mapping[tuple[int, int], graphs.Chain],
    held: Any,
    ring: int,
    device: jax.Device,
  ) -> graphs.Graphs:
    """See `Capture`."""
    return graphs.Graphs(self._runtime, self.stream, chains, held, ring, device)


def on(device: jax.Device) -> StreamCapture | None:
  """How kernels are captured on a device, where they can be."""
  if cuda.obstacle(device):
    return None
  return StreamCapture(cuda_graph.Runtime(device))


class Recorder:
  """Notes kernels as steps of a graph; see `kernel_call.Recorder`.

  Called with abstract arrays it notes what is to be compiled; `compile` does
  that, several at a time. A kernel is known by its name and by the shapes of
  its arrays: all else that it is made of is the same in one executor. What it
  writes is used in its own hop and in the next one, so every other hop, of
  all launches, writes to the same arrays.

  Attributes:
    steps: what was captured, in order.
  """

  def __init__(self, capture: Capture):
    self._capture = capture
    self.steps: list[cuda_graph.Step] = []
    self._held: list[Any] = []
    self._programs: dict[_Key, Any] = {}
    self._token = jnp.zeros(_TOKEN.shape, _TOKEN.dtype)
    # Where kernels write, and what lies there now: some write over others'.
    self._written: dict[tuple[_Key, int, int], list[int]] = {}
    self._arrays: dict[int, jax.Array] = {}
    self._hop, self._calls = 0, Counter[_Key]()

  def turn(self, hop: int) -> None:
    """What comes next is a hop's."""
    self._hop, self._calls = hop % 2, Counter()

  def call(
    self,
    name: str,
    run: Callable[..., tuple[Any, ...]],
    operands: Sequence[jax.Array],
    aliases: Mapping[int, int],
    *,
    early: bool,
  ) -> tuple[jax.Array, ...]:
    """See `kernel_call.Recorder`."""
    key = name, tuple((a.shape, a.dtype) for a in operands)
    if any(isinstance(a, jax.core.Tracer) for a in operands):
      return self._plan(key, run, operands, aliases)
    kept = [operands[i] for i in aliases]
    read = [a for i, a in enumerate(operands) if i not in aliases]
    program, fresh = self._programs[key]
    spot = key, self._hop, self._calls[key]
    self._calls[key] += 1
    others = [self._arrays[at] for at in self._written.get(spot, ())]
    others = others or [jnp.zeros(*each) for each in fresh]
    where = [a.unsafe_buffer_pointer() for a in (*kept, *others)]
    kept, others, done = program((kept, others), read, self._token)
    jax.block_until_ready(done)
    self.steps.append(cuda_graph.Step(self._capture.take(), early, name))
    if where != [a.unsafe_buffer_pointer() for a in (*kept, *others)]:
      raise cuda.Error(f'{name} does not write in place')
    self._arrays |= zip(where, (*kept, *others), strict=True)
    self._written[spot] = where[len(kept) :]
    self._held.append(read)
    out = dict(zip(aliases.values(), kept, strict=True))
    rest = iter(others)
    count = len(kept) + len(others)
    return tuple(out[i] if i in out else next(rest) for i in range(count))

  def compile(self) -> None:
    """Compiles what was noted abstractly."""

    def compiled(found: _Planned) -> Any:
      given = (found.kept, found.fresh), found.read, self._token
      fresh = [(a.shape, a.dtype) for a in found.fresh]
      return found.program.lower(*given).compile(), fresh

    todo = {k: v for k, v in self._programs.items() if type(v) is _Planned}
    with futures.ThreadPoolExecutor() as threads:
      done = threads.map(compiled, todo.values())
      self._programs |= dict(zip(todo, done, strict=True))

  def _plan(
    self,
    key: _Key,
    run: Callable[..., tuple[Any, ...]],
    operands: Sequence[jax.Array],
    aliases: Mapping[int, int],
  ) -> tuple[jax.Array, ...]:
    written = run(*operands, jnp.zeros(_TOKEN.shape, _TOKEN.dtype))
    if key not in self._programs:
      taken = set(aliases.values())
      self._programs[key] = _Planned(
        self._program(run, aliases),
        [_abstract(operands[i]) for i in aliases],
        [_abstract(a) for i, a in enumerate(operands) if i not in aliases],
        [_abstract(a) for i, a in enumerate(written) if i not in taken],
      )
    return written

  def _program(
    self, run: Callable[..., tuple[Any, ...]], aliases: Mapping[int, int]
  ) -> Any:
    captured = self._capture.around(run, aliases)

    def program(given_up: Any, read: list[jax.Array], token: jax.Array) -> Any:
      kept, _ = given_up
      given, rest = dict(zip(aliases, kept, strict=True)), iter(read)
      count = len(kept) + len(read)
      operands = [given[i] if i in given else next(rest) for i in range(count)]
      *written, done = captured(*operands, token)
      # In the order of what is given up, so that each gets its own place.
      first = [written[j] for j in aliases.values()]
      taken = set(aliases.values())
      others = [a for j, a in enumerate(written) if j not in taken]
      return first, others, done

    options = {} if kernel_call.interpreted() else _NO_GRAPHS_OF_XLA
    return jax.jit(
      program, donate_argnums=0, keep_unused=True, compiler_options=options
    )


class _Planned(NamedTuple):
  """A kernel to be compiled: its function, and the shapes of its arrays."""

  program: Any
  kept: list[jax.ShapeDtypeStruct]
  read: list[jax.ShapeDtypeStruct]
  fresh: list[jax.ShapeDtypeStruct]


class Given(NamedTuple):
  """What launches are given, and what they leave in its place.

  Attributes:
    weights: of all layers.
    pool: the experts.
    caches: of all layers.
    state: of all rows.
  """

  weights: stacked.Weights
  pool: experts.Pool
  caches: kv_cache.LayerCache
  state: steps.State


class Kinds(NamedTuple):
  """Which launches there are.

  Attributes:
    plain: the segment of a hop that does not pass the head.
    head: of one that does.
    longest: by the place of the head in it, -1 without, how many hops the
      longest launch has.
    tables: hops of the longest one of all.
    groups: numbers of rows.
  """

  plain: segments.Segment
  head: segments.Segment
  longest: Mapping[int, int]
  tables: int
  groups: Sequence[int]

  def hops(self, place: int) -> list[segments.Segment]:
    """Of the longest launch with the head at this place."""
    made = [self.plain] * self.longest[place]
    if place >= 0:
      made[place] = self.head
    return made


def record(
  config: config_lib.ModelConfig, kinds: Kinds, given: Given, capture: Capture
) -> tuple[dict[tuple[int, int], graphs.Chain], Given, Any]:
  """Captures launches of all kinds, as long as any of the kind may be.

  Args:
    config: the model.
    kinds: of launches.
    given: what all of them are given; caches and state are given up.
    capture: how.

  Returns:
    The chains by rows and place of the head, `given` again, and what must be
    kept alive for them.
  """
  recorder = Recorder(capture)
  controls = {
    group: jnp.zeros(
      (steps.table_start(config, group, kinds.tables),), jnp.int32
    )
    for group in kinds.groups
  }

  def begin(
    place: int, group: int, given: Given, control: Any, answers: Any
  ) -> Any:
    return fused.apart(
      config, kinds.hops(place), group, kinds.tables, given.weights,
      given.pool, given.caches, given.state, control, answers,
    )  # fmt: skip

  def empty(group: int) -> jax.Array:
    size = kinds.tables, group, 2 + config.top_k
    return jnp.full(size, -1, jnp.int32)

  chains = {}
  with kernel_call.recorded(recorder):
    for group in kinds.groups:
      # The head and a hop behind it: all kernels that there are.
      for place in sorted(kinds.longest)[:2]:
        plan = functools.partial(_two_hops, begin, place, group)
        jax.eval_shape(plan, given, controls[group], empty(group))
    recorder.compile()
    for group, place in itertools.product(kinds.groups, kinds.longest):
      control, answers, hops = controls[group], empty(group), []
      recorder.turn(0)
      for left in begin(place, group, given, control, answers):
        state, caches, answers = left
        given = given._replace(state=state, caches=caches)
        hops.append(recorder.steps)
        recorder.steps = []
        recorder.turn(len(hops))
      chains[group, place] = graphs.Chain(control, answers, hops)
  return chains, given, recorder


def _two_hops(begin: Callable[..., Any], *arguments: Any) -> list[Any]:
  return list(itertools.islice(begin(*arguments), 2))


def _abstract(array: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(array.shape, array.dtype)
