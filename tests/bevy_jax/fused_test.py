"""Launches through the kernels are programs that a GPU can be given.

They are lowered for CUDA, which needs no GPU: what Pallas cannot lower is
told here, and nowhere else on a CPU, where kernels are interpreted. Seen to
fail with axes that are not padded to powers of two.
"""

import dataclasses
import functools
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
    last = config.num_layers - 1
    for hops in ([0], [last], [last, 0]):
      shapes = [
        dataclasses.replace(segments.segments(config)[layer][0], drawn=False)
        for layer in hops
      ]
      top = {k: made[k] for k in ('embed', 'final_norm')}
      weights = stacked.Weights(made['layers'], top)
      control = _shape(2 + _ROWS + len(hops) * 8, kind=jnp.int32)
      run = jax.jit(
        functools.partial(fused.decode, config, tuple(shapes), _ROWS)
      )
      arguments = (
        weights, _pool(config, form), caches, state, control,
      )  # fmt: skip
      with mock.patch.object(kernel_call, 'interpreted', lambda: False):
        lowered = run.trace(*arguments).lower(lowering_platforms=('cuda',))
      # One takes the rows, seven do a layer, one stands between two; two more
      # do the head.
      found = lowered.as_text().count('__gpu$xla.gpu.triton')
      self.assertEqual(found, 8 * len(hops) + 2 * (last in hops))


if __name__ == '__main__':
  absltest.main()
