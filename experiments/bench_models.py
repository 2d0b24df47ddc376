"""Models of published shapes with random weights, made where they are used."""

import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bevy_jax import config as config_lib
from bevy_jax import loading, shapes, storage
from bevy_jax.layers import config as model_config
from bevy_jax.layers import params as params_lib
from bevy_jax.layers import quant
from bevy_jax.offload import host_store

_SAMPLE = 2**22  # Random numbers that templates are made of, at most.
_TEMPLATES = 4
_STEP = 512  # Elements that offsets of a rotation are multiples of.


def _published(
  shape: str, heads: tuple[int, int, int], **changes: Any
) -> model_config.ModelConfig:
  """A model of `shapes.SHAPES`; heads of queries, of keys, their width."""
  s = shapes.SHAPES[shape]
  layers = changes.pop('num_layers', s.layers)
  base: dict[str, Any] = {
    'family': 'mixtral',
    'vocab_size': s.vocab,
    'num_layers': layers,
    'model_dim': s.dim,
    'num_heads': heads[0],
    'num_kv_heads': heads[1],
    'head_dim': heads[2],
    'num_experts': s.experts,
    'top_k': s.top_k,
    'expert_dim': s.expert_dim,
    'moe_layers': (True,) * layers,
    'norm_topk': True,
    'rope': model_config.RopeConfig(theta=1e6),
  }
  return model_config.ModelConfig(**(base | changes))


_QWEN3: dict[str, Any] = {'family': 'qwen3_moe', 'qk_norm': 'head'}
MODELS: dict[str, model_config.ModelConfig] = {
  'qwen3-30b-a3b': _published('qwen3-30b-a3b', (32, 4, 128), **_QWEN3),
  # GPT-OSS-20B's sizes: no sinks, biases or windows, plain SwiGLU.
  'gpt-oss-20b-shape': _published('gpt-oss-20b', (64, 8, 64)),
  'olmoe-1b-7b': _published(
    'olmoe-1b-7b', (16, 16, 128),
    family='olmoe', qk_norm='full', norm_topk=False,
  ),
  # The first 8 of 32 layers: 22.5 GB of experts in bf16.
  'mixtral-8x7b': _published('mixtral-8x7b', (32, 8, 128), num_layers=8),
  # Qwen3-30B-A3B's layer with as many layers and experts as GPT-OSS-20B has,
  # so that its recorded routing fits.
  'facts': _published(
    'qwen3-30b-a3b', (32, 4, 128),
    num_layers=24, num_experts=32, top_k=4, **_QWEN3,
  ),
  'tiny': model_config.tiny(
    model_dim=64, expert_dim=64, num_layers=4, moe_layers=(True,) * 4
  ),
}  # fmt: skip
_LAYERS = {'mixtral-8x7b': 'the first 8 of 32 layers'}


class Made(NamedTuple):
  """A model and what making it took.

  Attributes:
    model: ready to run; its directory is nowhere, it has no tokenizer.
    seconds: to fill and pin all experts.
    gb_per_s: of that.
    note: what a reader must know of the shape; empty where nothing.
  """

  model: loading.Loaded
  seconds: float
  gb_per_s: float
  note: str


def make(
  name: str,
  form: str,
  link: str,
  *,
  dtype: str | None = None,
  seed: int = 0,
  threads: int = 0,
  progress: Callable[[int, int], None] = lambda done, whole: None,
) -> Made:
  """Random weights of a shape; experts straight into host memory, once.

  Args:
    name: of `MODELS`.
    form: what `storage.parse` reads: 'bf16', 'int8', 'int4:32'.
    link: see `EngineConfig`; it decides whose memory experts lie in.
    dtype: of the shared weights; bfloat16 where not given.
    seed: of all of it.
    threads: that fill; 0 for as many as there are processors, 16 at most.
    progress: called with bytes filled so far and in all.

  Raises:
    ValueError: unknown names, or experts that do not fit the host.
  """
  config_lib.choose('model shape', name, MODELS)
  config, stored = MODELS[name], storage.parse(form)
  how, kind = None, np.dtype(np.uint8)
  if isinstance(stored, quant.Format):
    how = quant.layout(stored, config.expert_shape)
  else:
    kind = stored
  shape = (how.nbytes,) if how else config.expert_shape
  count = len(config.moe_ids) * config.num_experts
  whole = count * math.prod(shape) * kind.itemsize
  params = shared(config, seed, dtype or 'bfloat16')
  pool = kind if how else params['embed'].dtype
  memory = loading.memory(link, count, shape, kind, pool)
  fill = Fill(config, how, kind, seed)
  filled = 0

  def done(nbytes: int) -> None:
    nonlocal filled
    filled += nbytes
    progress(filled, whole)

  begun = time.perf_counter()
  experts = host_store.HostStore.build(
    count, shape, kind, fill, memory=memory,
    threads=threads or min(os.cpu_count() or 1, 16), done=done,
  )  # fmt: skip
  seconds = time.perf_counter() - begun
  model = loading.Loaded(
    config, params, experts, pathlib.Path(), how.format if how else None
  )
  return Made(model, seconds, whole / seconds * 1e-9, _LAYERS.get(name, ''))


def shared(
  config: model_config.ModelConfig, seed: int, dtype: str
) -> params_lib.Params:
  """Random shared weights on the device; activations stay near 1."""

  def leaf(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    x = jax.random.normal(key, shape)
    if len(shape) == 1:
      x = 1 + 0.1 * x
    elif shape[0] != config.vocab_size:  # Embeddings are of size 1.
      x = x / math.sqrt(shape[-2])
    return x.astype(dtype)

  draw = jax.jit(leaf, static_argnums=1)
  tree = params_lib.shapes(config)
  leaves, form = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, tuple))
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  made = [draw(k, s) for k, s in zip(keys, leaves, strict=True)]
  out: params_lib.Params = jax.tree.unflatten(form, made)
  return out


class Fill:
  """Writes random experts: templates, each part turned by a way of its own.

  Copying is as fast as memory; drawing tens of GB of numbers is not. Weights
  are normal with standard deviation `1 / sqrt(fan in)`, packed ones uniform
  with the same; scales vary by a quarter.
  """

  def __init__(
    self,
    config: model_config.ModelConfig,
    how: quant.Layout | None,
    dtype: np.dtype[Any],
    seed: int,
  ):
    _, f, d = config.expert_shape
    self._rng = np.random.default_rng(seed)
    self._dtype = dtype
    # Gate and up, then down: each [begin, end) keeps its own distribution.
    cut, end = 2 * f * d, 3 * f * d
    if how is None:
      self._parts: tuple[tuple[int, int], ...] = ((0, cut), (cut, end))
      size = end
    else:
      self._parts, size = _packed_parts(how), how.nbytes
    self._templates = [self._template(how, f, d, size) for _ in _each(size)]

  def __call__(self, key: int, out: np.ndarray) -> None:
    """One expert into a block."""
    flat = out.reshape(-1)
    source = self._templates[key % len(self._templates)]
    turn = key // len(self._templates) + 1
    for begin, end in self._parts:
      length = end - begin
      # A prime's multiples: experts of a template differ as long as may be.
      at = turn * 7919 * _STEP % length // _STEP * _STEP
      flat[begin : end - at] = source[begin + at : end]
      flat[end - at : end] = source[begin : begin + at]

  def _template(
    self, how: quant.Layout | None, f: int, d: int, size: int
  ) -> np.ndarray:
    out = np.empty(size, self._dtype)
    if how is None:
      normal = self._rng.standard_normal(min(size, _SAMPLE), np.float32)
      for (begin, end), fan in zip(self._parts, (d, f), strict=True):
        scaled = (normal / math.sqrt(fan)).astype(self._dtype)
        out[begin:end] = np.resize(scaled, end - begin)
      return out
    bits = 8 if how.format.kind == 'int8' else 4
    raw = np.frombuffer(self._rng.bytes(min(size, _SAMPLE)), np.uint8)
    out[: how.values.end] = np.resize(raw, how.values.end)
    wide = self._rng.uniform(0.75, 1.25, how.scales.shape[0])
    # Integers spread evenly over 2**bits have this standard deviation.
    wide /= 2**bits / math.sqrt(12)
    share = 2 * len(wide) // 3
    wide[:share] /= math.sqrt(d)
    wide[share:] /= math.sqrt(f)
    scales = wide.astype(np.dtype(jnp.bfloat16))
    out[how.scales.offset : how.scales.end] = scales.view(np.uint8)
    if how.zeros is not None:
      out[how.zeros.offset :] = 0x88  # The middle of both halves.
    return out


def _packed_parts(how: quant.Layout) -> tuple[tuple[int, int], ...]:
  """Values and scales, each of gate and up, then of down."""
  parts = []
  for part in (how.values, how.scales):
    cut = part.offset + (part.end - part.offset) // 3 * 2
    parts += [(part.offset, cut), (cut, part.end)]
  if how.zeros is not None:
    parts.append((how.zeros.offset, how.zeros.end))
  return tuple(parts)


def _each(size: int) -> range:
  """One template for huge experts, a few for others."""
  return range(max(1, min(_TEMPLATES, 2**28 // size)))
