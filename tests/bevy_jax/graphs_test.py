"""Launches as graphs of our own do what the launches of XLA do.

A GPU is played here: what would be captured are a kernel's arrays by their
addresses, and a graph runs the interpreted kernels on what lies there. Seen to
fail with a control vector copied too short, with an answer of the hop before,
and with graphs that take over the launches that pass the head.
"""

import ctypes
import functools
import types
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from jax.experimental import buffer_callback

from bevy_jax import config as config_lib
from bevy_jax import (
  device,
  engine,
  events,
  graphs,
  hop_table,
  launches,
  programs,
  protocols,
  recorder,
  steps,
)
from bevy_jax import hops as hops_lib
from bevy_jax import request as request_lib
from bevy_jax.layers import config as model_config
from bevy_jax.layers import params
from bevy_jax.offload import cuda, cuda_fake, cuda_graph, host_store

_ROWS, _HOPS = 2, 2


class _Kernel(NamedTuple):
  """A captured kernel: what it computes, and where its arrays lie."""

  run: Any
  given: list[tuple[int, tuple[int, ...], np.dtype]]
  written: list[tuple[int, tuple[int, ...], np.dtype]]

  def replay(self):
    out = self.run(*[_at(*each).copy() for each in self.given])
    for each, new in zip(self.written, out, strict=True):
      _at(*each)[...] = np.asarray(new)

  def moved(self, out, aliases):
    where = [a.unsafe_buffer_pointer() for a in out]
    written = [(w, *e[1:]) for w, e in zip(where, self.written, strict=True)]
    given = [
      written[aliases[i]] if i in aliases else each
      for i, each in enumerate(self.given)
    ]
    return self._replace(given=given, written=written)


def _at(address, shape, dtype):
  count = int(np.prod(shape)) * dtype.itemsize
  raw = (ctypes.c_char * count).from_address(address)
  return np.frombuffer(raw, dtype).reshape(shape)


def _lies(buffer):
  array = np.asarray(buffer)
  return array.ctypes.data, array.shape, array.dtype


class _Recorder(recorder.Recorder):
  """Kernels that are played write where their arrays are in the end: the
  interpreter may write elsewhere, and copy."""

  def call(self, name, run, operands, aliases, *, early):
    out = super().call(name, run, operands, aliases, early=early)
    if not any(isinstance(a, jax.core.Tracer) for a in out):
      last = self.steps[-1]
      self.steps[-1] = last._replace(kernel=last.kernel.moved(out, aliases))
    return out


class _Runtime:
  """Graphs as lists of what they do."""

  def __init__(self):
    self.launched = 0

  def chain(self, steps):
    return list(steps)

  def upload(self, graph, stream):
    pass

  def launch(self, graph, stream):
    self.launched += 1
    for step in graph:
      if isinstance(step, cuda_graph.Copy):
        ctypes.memmove(step.to, step.source, step.nbytes)
      else:
        assert not step.early, 'interpreted kernels do not wait'
        step.kernel.replay()

  def event(self):
    return 0

  def record(self, event, stream):
    pass

  def is_done(self, event):
    return True

  def sleep(self, event):
    pass

  def wait(self, stream):
    pass

  def drop_graph(self, graph):
    pass

  def drop_event(self, event):
    pass


class _Capture:
  """Runs a kernel when it is captured, which does no harm at a start."""

  def __init__(self):
    self.runtime = _Runtime()

  def around(self, run, aliases):
    jitted = jax.jit(lambda *operands: run(*operands, jnp.zeros(1, jnp.int32)))

    def program(*operands):
      written = run(*operands)
      count = len(operands) - 1

      # What is overwritten lies where the output does; to look at it too
      # would make a copy of it.
      over = {i: count + j for i, j in aliases.items()}

      def note(context, out, *lie):
        places = [_lies(each) for each in lie]
        given = [places[over.get(i, i)] for i in range(count)]
        self._found = _Kernel(jitted, given, places[count:])

      shown = [0 if i in over else a for i, a in enumerate(operands[:-1])]
      done = buffer_callback.buffer_callback(
        note,
        jax.ShapeDtypeStruct((1,), jnp.int32),
        has_side_effect=True,
      )(*shown, *written)
      return (*written, done)

    return program

  def take(self):
    return self._found

  def graphs(self, chains, held, ring, device):
    return graphs.Graphs(self.runtime, 0, chains, held, ring, device)


def _launches(config: model_config.ModelConfig) -> launches.Launches:
  made = params.stacked(params.init(config, jax.random.key(0)))
  home = jax.devices()[0]
  found = programs.Programs(
    config, jax.device_put(made, home), _ROWS, True, home, _HOPS, True
  )
  return launches.Launches(
    config, found, home, rows=_ROWS, chunk=1, context=16, room=8, ring=2
  )  # fmt: skip


def _batches(config: model_config.ModelConfig) -> list[protocols.Batch]:
  """Both rows with everything at hand, one that stops, one padding row."""
  e = config.num_experts
  here = np.arange(_HOPS * e, dtype=np.int32).reshape(_HOPS, e)
  gone = here.copy()
  gone[1, ::2] = -1
  return [
    protocols.Batch('decode', 0, 3, rows=[0, 1], tables=here),
    protocols.Batch('decode', 1, 3, rows=[1, 0], tables=gone),
    protocols.Batch('decode', 1, 3, [1, 0], gone, True),
    protocols.Batch('decode', 0, 1, rows=[1], tables=here),
    protocols.Batch('decode', 1, 3, rows=[0, 1], tables=here[:1]),
    # Past the head and on.
    protocols.Batch('decode', 3, 3, rows=[0, 1], tables=here),
  ]


def _kept(of: launches.Launches) -> list[np.ndarray]:
  return [np.array(leaf) for leaf in jax.tree.leaves((of._state, of._caches))]


@pytest.mark.slow
class GraphsTest(absltest.TestCase):
  def test_as_launches_of_xla(self):
    config = model_config.tiny(
      num_layers=4, moe_layers=(True,) * 4, windows=(0, 4, 0, 4)
    )
    ours, theirs = _launches(config), _launches(config)
    pool = params.init_experts(config, jax.random.key(1))
    pool = pool.reshape(-1, *config.expert_shape)[: _HOPS * config.num_experts]
    capture = _Capture()
    self.enterContext(mock.patch.object(recorder, 'Recorder', _Recorder))
    ours.record(pool, capture)
    ours.fill_caches(3)
    ours.check(pool)
    ours.set_choices([[1, 2], [3, 0]])
    x = jax.random.normal(jax.random.key(2), ours._state.x.shape)
    ctypes.memmove(
      ours._state.x.unsafe_buffer_pointer(), np.asarray(x).ctypes.data, x.nbytes
    )
    theirs._state, theirs._caches = jax.tree.map(
      jnp.array, (ours._state, ours._caches)
    )
    for number, batch in enumerate(_batches(config)):
      got, wanted = ours.begin(batch, pool), theirs.begin(batch, pool)
      self.assertEqual(capture.runtime.launched, number + 1)
      self.assertEqual(got.gates, wanted.gates)
      table = np.asarray(got.answer)[: got.rows]
      np.testing.assert_array_equal(
        table, np.asarray(wanted.answer)[: got.rows]
      )
      for one, two in zip(_kept(ours), _kept(theirs), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    ours.check(pool)
    # Who draws passes the head through XLA; waves always do.
    head, wave = _batches(config)[-1], _batches(config)[0]
    ours._draws[1] = True
    self.assertIsNone(ours._graph_of(head))
    self.assertIsNotNone(ours._graph_of(head._replace(rows=[0])))
    self.assertIsNone(ours._graph_of(wave._replace(finish=False)))
    for rows, together, count in (([0, 1], 1, 1), ([0, 1], 0, 0), ([0], 1, 0)):
      kind = wave._replace(rows=rows, together=bool(together))
      names = [getattr(s, 'name', '') for s in ours._graph_of(kind).graph]
      self.assertEqual(names.count('agree'), count)
      self.assertEqual(names.count('choose'), _HOPS)

  def test_the_whole_engine_on_graphs_and_direct_copies(self):
    """The plain form's text, and long answers are told in short."""
    capture = _Capture()
    direct = functools.partial(cuda.Runtime, module=cuda_fake.Runtime(lag=2))
    for where, name, played in (
      (cuda, 'obstacle', lambda device: ''),
      (cuda, 'Runtime', direct),
      (cuda_graph, 'Runtime', lambda device: None),
      (recorder, 'StreamCapture', lambda runtime: capture),
      (recorder, 'Recorder', _Recorder),
      (device, '_LONG', 2),
    ):
      self.enterContext(mock.patch.object(where, name, played))
    ours = _executor(link='cuda', hops=4, kernels='on')
    seen, poll = [], ours.poll

    def watched():
      found = poll()
      seen.extend(found)
      return found

    ours.poll = watched
    self.assertEqual(_tokens(ours, 4), _tokens(_executor(kernels='off'), 1))
    passed = [e.passed for e in seen if isinstance(e, protocols.Ended)]
    self.assertGreater(len(passed) - passed.count(None), 4)
    self.assertGreater(passed.count(None), 4)
    self.assertGreaterEqual(capture.runtime.launched, len(passed))


class StepsTest(absltest.TestCase):
  """Seen to fail with kernels of all launches begun early, with the same graph
  whether rows go together, and with launches of one row that agree."""

  def test_kernels_of_few_rows_alone_are_begun_early(self):
    kernels = [cuda_graph.Step('one', True), cuda_graph.Step('two', False)]
    made = _graphs(kernels, (4, 8))
    for rows, early in ((4, True), (8, False)):
      up, one, two, home = made.take(rows, 1, -1, False).graph
      self.assertEqual((one.early, two.early), (early, False))
      self.assertEqual((up.home, home.home), (False, True))

  def test_only_rows_that_go_together_agree(self):
    kernels = [cuda_graph.Step(n, False, n) for n in ('choose', 'agree')]
    made = _graphs(kernels, (4,))
    for together, wanted in ((False, ['choose']), (True, ['choose', 'agree'])):
      _, *found, _ = made.take(4, 1, -1, together).graph
      self.assertEqual([step.name for step in found], wanted)


def _graphs(kernels: list[cuda_graph.Step], groups: tuple[int, ...]):
  """Of launches of one hop, which are these kernels."""
  config, chains = model_config.tiny(), {}
  for rows in groups:
    size = steps.table_start(config, rows, 1)
    control, answers = jnp.zeros(size, jnp.int32), jnp.zeros((1, rows, 4))
    chains[rows, -1] = graphs.Chain(control, answers, [kernels])
  return graphs.Graphs(_Runtime(), 0, chains, None, 1, jax.devices()[0])


def _executor(**how: Any) -> device.DeviceExecutor:
  """With room for all experts of four layers, and none of them in it."""
  config = model_config.tiny(num_layers=4, moe_layers=(True,) * 4)
  pool = np.asarray(params.init_experts(config, jax.random.key(1)))
  pool = pool.reshape(-1, *config.expert_shape)

  def fill(key, out):
    out[...] = pool[key]

  store = host_store.HostStore.build(
    len(pool), pool.shape[1:], pool.dtype, fill
  )
  asked = config_lib.EngineConfig(cache=1.0, requests=2, strict=True, **how)
  shared = params.init(config, jax.random.key(0))
  return device.DeviceExecutor(config, shared, store, asked, 32)


def _tokens(
  executor: device.DeviceExecutor, hops: int
) -> list[tuple[int, int, int]]:
  """Request, index and token of all that two requests generate.

  As the rule that may stop them hears it, and as the log has it.
  """
  config, heard = executor._model, []

  def hear(p, token):
    heard.append((p.request.number, len(p.generated) - 1, token))

  found = engine.Engine(
    config,
    executor,
    hops_lib.give(config_lib.SCHEDULERS['lockstep'], hops, 4),
    config_lib.EVICTIONS['lru'],
    rows=2,
    slots=executor.slots,
    link_depth=4,
    stop=hear,
  )
  for number in range(2):
    found.submit(
      request_lib.Request(number=number, prompt=(1 + number,), new_tokens=24)
    )
  while found.busy:
    found.step()
  told = [e for e in found.log if isinstance(e, events.Token)]
  assert heard == [(e.request, e.index, e.token) for e in told], heard
  return sorted(heard)


class AnswersTest(absltest.TestCase):
  """Seen to fail: without the copy, with rows of the padding read too."""

  def _end(self, hops: int, stopped: bool) -> protocols.Ended:
    """What the executor makes of two rows and padding of a graph's answer."""
    rng = np.random.default_rng(hops)
    ids = [[rng.permutation(9)[:3] for _ in range(3)] for _ in range(hops)]
    told = np.full((hops, 3, 2), [-1, 1])
    told[:, 2, 1] = -1
    if stopped:
      told[1:, 1, 1] = -1
    self.table = np.concatenate([told, ids], axis=2).astype(np.int32)
    answer = graphs.Answer(self.table.copy(), _Runtime(), 0)
    config = model_config.tiny(num_experts=9, top_k=3)
    executor = types.SimpleNamespace(_model=config, now=lambda: 7)
    begun = launches.Begun(answer, 2, (0,) * hops)
    ended = device.DeviceExecutor._ended(executor, 5, begun)
    answer._table[:] = -5  # The next launch has begun.
    return ended

  def test_the_first_rows_hop_by_hop(self):
    for hops in (1, 9):
      for stopped in (False, True):
        ended = self._end(hops, stopped)
        rows = self.table[:, :2].tolist()
        wanted = hop_table.read(3, rows, (0,) * hops)
        self.assertSequenceEqual(ended.hops, wanted)
        self.assertEqual((ended.time, ended.launch), (7, 5))

  def test_long_answers_are_told_in_short_too_where_all_passed(self):
    for hops, stopped in ((9, True), (7, False)):
      self.assertIsNone(self._end(hops, stopped).passed)
    passed = self._end(9, stopped=False).passed
    self.assertEqual(passed, hop_table.passed(self.table[:, :2], 9))


if __name__ == '__main__':
  absltest.main()
