"""What the kernels of decode launches are, captured for graphs of our own."""

import itertools
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
    chains: Mapping[int, graphs.Chain],
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
    chains: Mapping[int, graphs.Chain],
    held: Any,
    ring: int,
    device: jax.Device,
  ) -> graphs.Graphs:
    """See `Capture`."""
    return graphs.Graphs(self._runtime, self.stream, chains, held, ring, device)


class Recorder:
  """Notes kernels as steps of a graph; see `kernel_call.Recorder`.

  Called with abstract arrays it notes what is to be compiled; `compile` does
  that, several at a time. A kernel is known by its name and by the shapes of
  its arrays: all else that it is made of is the same in one executor.

  Attributes:
    steps: what was captured, in order.
  """

  def __init__(self, capture: Capture):
    self._capture = capture
    self.steps: list[cuda_graph.Captured] = []
    self._held: list[Any] = []
    self._programs: dict[tuple[Any, ...], Any] = {}
    self._token = jnp.zeros(_TOKEN.shape, _TOKEN.dtype)

  def call(
    self,
    name: str,
    run: Callable[..., tuple[Any, ...]],
    operands: Sequence[jax.Array],
    aliases: Mapping[int, int],
  ) -> tuple[jax.Array, ...]:
    """See `kernel_call.Recorder`."""
    key = name, tuple((a.shape, a.dtype) for a in operands)
    kept = [operands[i] for i in aliases]
    read = [a for i, a in enumerate(operands) if i not in aliases]
    if isinstance(operands[0], jax.core.Tracer):
      if key not in self._programs:
        given = jax.tree.map(_abstract, (kept, read))
        self._programs[key] = self._program(run, aliases), given
      return run(*operands, jnp.zeros(_TOKEN.shape, _TOKEN.dtype))
    where = [a.unsafe_buffer_pointer() for a in kept]
    rewritten, others, done = self._programs[key](kept, read, self._token)
    jax.block_until_ready(done)
    self.steps.append(self._capture.take())
    if where != [a.unsafe_buffer_pointer() for a in rewritten]:
      raise cuda.Error(f'{name} does not write in place')
    self._held += [read, rewritten, others]
    out = dict(zip(aliases.values(), rewritten, strict=True))
    rest = iter(others)
    count = len(rewritten) + len(others)
    return tuple(out[i] if i in out else next(rest) for i in range(count))

  def compile(self) -> None:
    """Compiles what was noted abstractly."""

    def compiled(found: Any) -> Any:
      program, given = found
      return program.lower(*given, self._token).compile()

    with futures.ThreadPoolExecutor() as threads:
      todo = {k: v for k, v in self._programs.items() if isinstance(v, tuple)}
      done = threads.map(compiled, todo.values())
      self._programs |= dict(zip(todo, done, strict=True))

  def _program(
    self, run: Callable[..., tuple[Any, ...]], aliases: Mapping[int, int]
  ) -> Any:
    captured = self._capture.around(run, aliases)

    def program(
      kept: list[jax.Array], read: list[jax.Array], token: jax.Array
    ) -> Any:
      given, rest = dict(zip(aliases, kept, strict=True)), iter(read)
      count = len(kept) + len(read)
      operands = [given[i] if i in given else next(rest) for i in range(count)]
      *written, done = captured(*operands, token)
      first = [written[j] for j in aliases.values()]
      taken = set(aliases.values())
      # What is given up comes back first, or it would be given to others.
      others = [a for j, a in enumerate(written) if j not in taken]
      return first, others, done

    options = {} if kernel_call.interpreted() else _NO_GRAPHS_OF_XLA
    return jax.jit(
      program,
      donate_argnums=0,
      keep_unused=True,
      compiler_options=options,
    )


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


def record(
  config: config_lib.ModelConfig,
  segment: segments.Segment,
  groups: Sequence[int],
  hops: int,
  given: Given,
  capture: Capture,
) -> tuple[dict[int, graphs.Chain], Given, Any]:
  """Captures launches of some numbers of rows, as long as any may be.

  Args:
    config: the model.
    segment: of all hops, without a head.
    groups: numbers of rows.
    hops: layers of the longest launch.
    given: what all of them are given; caches and state are given up.
    capture: how.

  Returns:
    The chains by rows, `given` again, and what must be kept alive for them.
  """
  recorder = Recorder(capture)
  head = steps.table_start(config, 0, 0)

  def hop_by_hop(group: int, given: Given, control: Any) -> Any:
    return fused.apart(
      config, segment, group, hops, given.weights, given.pool, given.caches,
      given.state, control,
    )  # fmt: skip

  with kernel_call.recorded(recorder):
    for group in groups:
      size = head + group + hops * config.num_experts
      control = jax.ShapeDtypeStruct((size,), jnp.int32)

      def plan(given: Given, control: jax.Array, group: int = group) -> Any:
        # The second hop is as all behind it.
        return list(itertools.islice(hop_by_hop(group, given, control), 2))

      jax.eval_shape(plan, given, control)
    recorder.compile()
    chains = {}
    for group in groups:
      size = head + group + hops * config.num_experts
      there = jnp.zeros((size,), jnp.int32)
      begun, ends, replies = len(recorder.steps), [], []
      for state, caches, reply in hop_by_hop(group, given, there):
        given = given._replace(state=state, caches=caches)
        ends.append(len(recorder.steps) - begun)
        replies.append(reply)
      mine = recorder.steps[begun:]
      chains[group] = graphs.Chain(there, mine, ends, replies)
  return chains, given, recorder


def _abstract(array: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(array.shape, array.dtype)
