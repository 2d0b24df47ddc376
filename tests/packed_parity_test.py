"""Tokens from packed experts equal the reference on the dequantised ones."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax import config as config_lib
from bevy_jax import device, engine, events, storage
from bevy_jax import request as request_lib
from bevy_jax.layers import config as model_config
from bevy_jax.layers import params as params_lib
from bevy_jax.layers import quant, reference
from bevy_jax.offload import host_store

_MODEL = model_config.tiny(num_layers=2, moe_layers=(True, True), expert_dim=32)
_FORMATS = ('int8', 'int4', 'int4:32:zero')
_SCHEDULERS = ('lockstep', 'runahead')
_CONTEXT, _ROWS, _KEYS = 64, 2, 16


class _Packed(NamedTuple):
  params: dict[str, Any]
  experts: jax.Array
  store: host_store.HostStore


@functools.cache
def _model(name: str) -> _Packed:
  key, experts_key = jax.random.split(jax.random.key(0))
  wide = np.asarray(params_lib.init_experts(_MODEL, experts_key) * 2)
  form = quant.parse(name)
  how = quant.layout(form, _MODEL.expert_shape)
  flat = [quant.pack(how, w) for w in wide.reshape(-1, *how.shape)]

  def fill(key: int, out: np.ndarray) -> None:
    out[...] = flat[key]

  store = host_store.HostStore.build(
    len(flat), (how.nbytes,), np.dtype(np.uint8), fill
  )
  blocks = storage.experts(store, form, how.shape)
  return _Packed(
    params_lib.init(_MODEL, key),
    reference.stack(blocks, (2, _MODEL.num_experts)),
    store,
  )


@functools.cache
def _executor(name: str) -> device.DeviceExecutor:
  # One row bucket, so that fewer programs are compiled.
  config = config_lib.EngineConfig(
    cache=1.0, requests=_ROWS, chunk=8, strict=True
  )
  model = _model(name)
  return device.DeviceExecutor(
    _MODEL, model.params, model.store, config, _CONTEXT, quant.parse(name)
  )


@functools.cache
def _requests() -> tuple[request_lib.Request, ...]:
  rng = np.random.default_rng(1)
  wild = request_lib.SamplingParams(temperature=1.2, seed=5)
  return tuple(
    request_lib.Request(
      number=i,
      prompt=tuple(rng.integers(2, 96, length).tolist()),
      new_tokens=12,
      sampling=wild if i % 2 else request_lib.SamplingParams(),
    )
    for i, length in enumerate((1, 5, 20, 9))
  )


@functools.cache
def _expected(name: str) -> dict[int, list[int]]:
  model = _model(name)
  return {
    r.number: reference.generate(
      _MODEL,
      model.params,
      model.experts,
      list(r.prompt),
      r.new_tokens,
      temperature=r.sampling.temperature,
      seed=r.sampling.seed,
      length=_CONTEXT,
    )
    for r in _requests()
  }


class PackedParityTest(parameterized.TestCase):
  @parameterized.product(
    name=_FORMATS, scheduler=_SCHEDULERS, slots=(2, 5, _KEYS)
  )
  def test_tokens(self, name: str, scheduler: str, slots: int):
    executor, store = _executor(name), _model(name).store
    run = engine.Engine(
      _MODEL,
      executor,
      config_lib.SCHEDULERS[scheduler],
      config_lib.EVICTIONS['lru'],
      rows=_ROWS,
      slots=slots,
      link_depth=2,
    )
    for request in _requests():
      run.submit(request)
    while run.busy or any(run.table.loading):
      run.step()
      run.table.check_integrity()
    got: dict[int, list[int]] = {}
    for event in run.log:
      if isinstance(event, events.Token):
        got.setdefault(event.request, []).append(event.token)
    self.assertEqual(got, _expected(name))
    checked = 0
    for key, slot in enumerate(run.table.slot_of):
      if slot >= 0:
        lies = host_store.fingerprint(executor.slot_bytes(slot))
        self.assertEqual(lies, store.fingerprint(key))
        checked += 1
    self.assertGreaterEqual(checked, 2)

  @parameterized.parameters(*_FORMATS)
  def test_the_cache_counts_packed_bytes(self, name: str):
    store = _model(name).store
    self.assertEqual(_executor(name).pool_bytes, _KEYS * store.block_bytes)
    # bfloat16 experts of this size take 6,144 each.
    each = {'int8': 3 * 1024 * 34 // 32}.get(name, 3 * 1024 * 18 // 32)
    each += 48 if name.endswith('zero') else 0
    self.assertEqual(store.block_bytes, each)

  def test_formats_differ(self):
    """Else the tests above would compare a format with itself alone."""
    texts = [str(_expected(name)) for name in _FORMATS]
    self.assertLen(set(texts), len(_FORMATS))


if __name__ == '__main__':
  absltest.main()
