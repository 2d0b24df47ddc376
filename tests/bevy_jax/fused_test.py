"""Launches through the kernels are programs that a GPU can be given.

They are lowered for CUDA, which needs no GPU: what Pallas cannot lower is
told here, and nowhere else on a CPU, where kernels are interpreted. Seen to
fail with axes that are not padded to powers of two, with a kernel that does not
wait for the one in front of it, and with one that reads its rows before it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized

from bevy_jax import fused, segments, stacked, steps
from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kernel_call, kv_cache, params, quant

_ROWS, _SLOTS = 4, 32


def _shape(*size: int, kind: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(size, kind)


def _params(config: config_lib.ModelConfig, replayed: bool) -> params.Params:
  made = params.init(config, jax.random.key(0))
  made = jax.tree.map(lambda a: a.astype(jnp.bfloat16), made)
  if replayed:
    table = jnp.zeros((2, 8, config.num_layers, config.top_k), jnp.int16)
    layers = [p | {'forced': table[:, :, 0]} for p in made['layers']]
    made = made | {'layers': layers}
  return params.stacked(made)


def _pool(config: config_lib.ModelConfig, form: str):
  if not form:
    return _shape(_SLOTS, *config.expert_shape)
  how = quant.layout(quant.parse(form), config.expert_shape)
  return quant.Packed(_shape(_SLOTS, how.nbytes, kind=jnp.uint8), how)


def _given(
  config: config_lib.ModelConfig, form: str, hops: list[int], replayed: bool
):
  """What a launch that crosses some layers is given."""
  made = jax.eval_shape(functools.partial(_params, config, replayed))
  state = steps.State(
    x=_shape(_ROWS, config.model_dim),
    ids=_shape(_ROWS, 2, kind=jnp.int32),
    weights=_shape(_ROWS, 2, kind=jnp.float32),
    partial=_shape(_ROWS, 2, config.model_dim, kind=jnp.float32),
    registers=_shape(_ROWS, steps.REGISTERS, kind=jnp.int32),
  )
  size = config.num_layers, _ROWS, config.num_kv_heads, 64, config.head_dim
  caches = kv_cache.LayerCache(*[_shape(*size)] * 2)
  top = {k: made[k] for k in ('embed', 'final_norm')}
  weights = stacked.Weights(made['layers'], top)
  control = _shape(2 + _ROWS + len(hops) * 8, kind=jnp.int32)
  return weights, _pool(config, form), caches, state, control


def _segments(config: config_lib.ModelConfig, hops: list[int]):
  every = segments.segments(config)
  return tuple(
    dataclasses.replace(every[layer][0], drawn=False) for layer in hops
  )


@pytest.mark.slow
class LowerTest(parameterized.TestCase):
  @parameterized.parameters(
    ('', {}, False),
    ('int8', {'qk_norm': None, 'qkv_bias': True, 'out_bias': True}, False),
    ('int4', {'qk_norm': 'full', 'windows': (0, 8, 0, 8)}, True),
    ('int4:32:zero', {'head_dim': 24, 'num_heads': 8, 'num_kv_heads': 2}, True),
  )
  def test_for_cuda(self, form, changes, replayed):
    config = config_lib.tiny(model_dim=128, expert_dim=64, **changes)
    last = config.num_layers - 1
    for hops in ([0], [last], [last, 0]):
      arguments = _given(config, form, hops, replayed)
      for chained in (False, True):
        told = {'interpreted': False, 'chained': chained}
        told = {k: mock.Mock(return_value=v) for k, v in told.items()}
        with mock.patch.multiple(kernel_call, **told):
          run = jax.jit(
            functools.partial(
              fused.decode, config, _segments(config, hops), _ROWS
            )
          )
          jax.clear_caches()  # Of functions within that were traced before.
          lowered = run.trace(*arguments).lower(lowering_platforms=('cuda',))
        # One takes the rows, seven do a layer, one stands between two; two more
        # do the head.
        text, count = lowered.as_text(), len(hops)
        found = text.count('__gpu$xla.gpu.triton')
        self.assertEqual(found, 8 * count + 2 * (last in hops))
        # Those of packed experts are not begun early.
        early = 8 * count - 1 - (2 * count if form else 0)
        waits = text.count('griddepcontrol.wait')
        self.assertEqual(waits, early if chained else 0)


class _Looked:
  """A ref, or what stands for one, that tells when it is looked at."""

  def __init__(self, ref: Any, tell: Callable[[], None]):
    self._ref, self._tell = ref, tell
    self.shape, self.dtype = ref.shape, ref.dtype

  @property
  def at(self) -> Any:
    self._tell()
    return self._ref.at

  def __getitem__(self, index: Any) -> Any:
    self._tell()
    return self._ref[index]


@pytest.mark.slow
class EarlyTest(parameterized.TestCase):
  """What a graph may begin early reads nothing early that kernels write."""

  @parameterized.parameters('', 'int4')
  def test_only_what_nobody_writes(self, form):
    seen: list[tuple[str, Any]] = []
    written: list[Any] = []
    call = kernel_call.call

    def watched(kernel, name, grid, out, operands, **how):
      arrays = [getattr(o, 'array', o) for o in operands]
      early = how.pop('early', None)

      def look(*refs):
        outs = [None] * (len(refs) - len(arrays))
        tells = [
          functools.partial(seen.append, (name, a)) for a in arrays + outs
        ]
        return early(*map(_Looked, refs, tells))

      made = call(
        kernel, name, grid, out, operands, **how, early=early and look
      )
      written.extend(made if isinstance(made, tuple) else [made])
      written.extend(arrays[i] for i in how.get('aliases') or ())
      return made

    config = config_lib.tiny(model_dim=128, expert_dim=64)
    hops = [config.num_layers - 1, 0]

    def run(*arguments):
      steps = _segments(config, hops), _ROWS, len(hops)
      return list(fused.apart(config, *steps, *arguments))

    answers = _shape(len(hops), _ROWS, 2 + config.top_k, kind=jnp.int32)
    with mock.patch.object(kernel_call, 'call', watched):
      jax.eval_shape(run, *_given(config, form, hops, False), answers)
    names = {name for name, _ in seen}
    self.assertEqual(
      names, {'combine', 'project', 'attend', 'output', 'choose'}
    )
    self.assertGreater(len(written), 20)
    for name, array in seen:
      self.assertIsNotNone(array, f'{name} looks at what it writes')
      same = [array is other for other in written]
      self.assertFalse(any(same), f'{name} reads early what is written')


if __name__ == '__main__':
  absltest.main()
