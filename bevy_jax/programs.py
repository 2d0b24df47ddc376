"""Every compiled program of an executor, made and warmed up in one place."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bevy_jax import fused, prompt_steps, segments, stacked, steps
from bevy_jax import hops as hops_lib
from bevy_jax.layers import config as model_config

_DONATED = {
  'enter': (1, 2),
  'decode': (2, 3),
  'wave': (2,),
  'prefill_begin': (1,),
  'prefill': (2, 3),
  'prefill_wave': (2,),
}


class Stage(NamedTuple):
  """One launch's segment with the weights that it takes.

  Attributes:
    segment: its static shape.
    order: the layer numbers behind its experts; their caches are written.
    weights: what it multiplies with; of all layers where they are stacked.
  """

  segment: segments.Segment
  order: tuple[int, ...]
  weights: segments.Weights | stacked.Weights


class Launcher(NamedTuple):
  """What a decode launch of one kind runs, put together once.

  Attributes:
    program: the jitted `steps.decode` of its hops.
    weights: of each hop, or of all layers, as a flat tuple: taking dicts
      apart at every call costs the host as much as the rest of it.
    order: the layer numbers whose caches are written, hop by hop.
    gates: how many MoE layers each hop guesses.
  """

  program: Callable[..., tuple[Any, Any, jax.Array]]
  weights: tuple[jax.Array, ...]
  order: tuple[int, ...]
  gates: tuple[int, ...]


class Programs:
  """The jitted functions of a model for some numbers of rows.

  Attributes:
    entry: what a prompt goes through before its first experts.
    enter: likewise for a token that begins to decode, with guesses.
    decode: for each MoE layer its experts and what follows.
    most: layers that a launch can cross.
    prefill: as `decode` without a head; None where nothing is left to write.
    dtype: of the shared weights.
    kernels: whether launches go through the GPU kernels; then rows that draw
      have programs of their own.
    buckets: numbers of rows that a decode launch is padded to, ascending.
    prompt_buckets: numbers of prompts that a prefill launch is padded to.
  """

  def __init__(
    self,
    model: model_config.ModelConfig,
    params: dict[str, Any],
    rows: int,
    strict: bool,
    device: jax.Device,
    most: int = 1,
    kernels: bool = False,
  ):
    """Nothing is compiled before it runs.

    Args:
      model: whose.
      params: its shared weights, `stacked` where `kernels` are on.
      rows: R.
      strict: one bucket.
      device: where.
      most: see above.
      kernels: whether decode launches go through the GPU kernels. On a GPU a
        branch makes the host wait, so that there are two programs of each
        launch that passes the head: for rows that draw, and for the others.
    """
    self._model, self._params, self.most = model, params, most
    self.kernels = kernels
    self._home = jax.sharding.SingleDeviceSharding(device)
    self._host = jax.sharding.SingleDeviceSharding(
      device, memory_kind='pinned_host'
    )
    self.dtype = params['embed'].dtype
    wide = self.dtype == jnp.float32
    self._precision = 'highest' if wide else 'default'
    self._jitted: dict[tuple[Any, ...], Any] = {}
    self.buckets = (rows,) if strict else _powers(rows)
    self.prompt_buckets = (rows,) if strict else tuple(sorted({1, rows}))
    self.entry = self._stage(-1, segments.entry_segment(model))
    self.set_gates(0)
    self.prefill = [
      None if found is None else self._stage(i, found)
      for i, found in enumerate(segments.prefill_segments(model))
    ]

  def set_gates(self, depth: int) -> None:
    """Lets decode launches guess for so many MoE layers ahead; 0 for none."""
    model = self._model
    self.enter = self._stage(-1, segments.entry_segment(model), depth)
    self.decode = [
      self._stage(i, found, depth)
      for i, found in enumerate(segments.segments(model))
    ]
    if self.kernels:
      # They differ in their windows alone, and kernels look these up.
      self.decode = [
        stage._replace(segment=dataclasses.replace(stage.segment, windows=()))
        for stage in self.decode
      ]
    self._launchers: dict[tuple[int, int, int, bool], Launcher] = {}

  def launcher(
    self, layer: int, hops: int, group: int, drawn: bool = True
  ) -> Launcher:
    """What crosses so many layers from this one on, with a group's rows.

    `drawn` says whether any of them draws its tokens.
    """
    key = layer, hops, group, drawn
    found = self._launchers.get(key)
    if found is None:
      found = self._launchers[key] = self._launcher(*key)
    return found

  def _launcher(
    self, layer: int, hops: int, group: int, drawn: bool
  ) -> Launcher:
    stages = [self.decode[i] for i in self._crossed(layer, hops)]
    shapes = tuple(
      dataclasses.replace(
        stage.segment,
        drawn=drawn or not self.kernels or stage.segment.head is None,
      )
      for stage in stages
    )
    given: Any = tuple(stage.weights for stage in stages)
    if self.kernels:
      # Of the hops that need more than the layers, all need the same.
      given = max(given, key=lambda weights: len(weights.top))
    weights, tree = jax.tree.flatten(given)
    return Launcher(
      self.get('decode', shapes, group, tree),
      tuple(weights),
      tuple(i for stage in stages for i in stage.order),
      tuple(shape.gates for shape in shapes),
    )

  def _crossed(self, layer: int, hops: int) -> list[int]:
    layers = len(self._model.moe_ids)
    return [(layer + i) % layers for i in range(hops)]

  def mlp(self, layer: int) -> dict[str, Any]:
    """The feed-forward half's shared weights of an MoE layer, or of all."""
    if self.kernels:
      return {'mlp_norm': self._params['layers']['mlp_norm']}
    p = self._params['layers'][self._model.moe_ids[layer]]
    return {k: p[k] for k in p if k == 'mlp_norm' or k.startswith('shared')}

  def get(
    self, kind: str, *static: Any
  ) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """The jitted `steps` function of this name with these static values."""
    program: Callable[..., tuple[Any, Any, jax.Array]]
    program = self._find(kind, static)
    return program

  def wave(
    self, kind: str, *static: Any
  ) -> Callable[..., tuple[Any, jax.Array]]:
    """Likewise for the two kinds of waves, which leave the caches alone."""
    program: Callable[..., tuple[Any, jax.Array]] = self._find(kind, static)
    return program

  def _find(self, kind: str, static: tuple[Any, ...]) -> Any:
    found = self._jitted.get((kind, *static))
    if found is None:
      found = self._jitted[kind, *static] = self._jit(kind, static)
    return found

  def compilations(self) -> int:
    """How many programs have been compiled so far."""
    return sum(map(compiled, self._jitted.values()))

  def sizes(self) -> Iterator[tuple[int, int]]:
    """First layer and hops of every decode launch that there may be."""
    layers = len(self.decode)
    for hops in hops_lib.sizes(self.most):
      for layer in range(layers):
        if hops_lib.cut(hops, layer, layers, self.most) == hops:
          yield layer, hops

  def distinct(self) -> Iterator[tuple[int, int]]:
    """Of these the first of each kind, which compiles on its own."""
    seen = set()
    for layer, hops in self.sizes():
      shapes = tuple(self.decode[i].segment for i in self._crossed(layer, hops))
      if shapes not in seen:
        seen.add(shapes)
        yield layer, hops

  def _stage(
    self,
    layer: int,
    found: tuple[segments.Segment, tuple[int, ...]],
    depth: int = 0,
  ) -> Stage:
    segment, order = found
    model, layers = self._model, self._params['layers']
    there = (layer + 1) % len(model.moe_ids)
    gates = segments.gates(model, there, depth)
    segment = dataclasses.replace(segment, gates=len(gates))
    names: tuple[str, ...] = ('embed', 'final_norm', 'head')
    if layer < 0:
      names = ('embed',)
    elif segment.head is None:
      names = ()
    top = {k: self._params[k] for k in names if k in self._params}
    if self.kernels:
      return Stage(segment, order, stacked.Weights(layers, top))
    weights = segments.Weights(
      mlp=self.mlp(layer) if layer >= 0 else {},
      layers=tuple(layers[i] for i in order),
      top=top,
      gates=tuple(
        {k: layers[model.moe_ids[i]][k] for k in ('mlp_norm', 'router')}
        for i in gates
      ),
    )
    return Stage(segment, order, weights)

  def _jit(self, kind: str, static: tuple[Any, ...]) -> Any:
    module: Any = prompt_steps if kind.startswith('prefill') else steps
    if self.kernels:
      module = fused if kind in ('decode', 'wave') else stacked
    function = getattr(module, kind)

    @functools.wraps(function)
    def program(*arguments: Any) -> Any:
      if kind == 'decode':
        *fixed, tree = static
        weights = jax.tree.unflatten(tree, arguments[0])
        arguments = (*fixed, weights, *arguments[1:])
      else:
        arguments = (*static, *arguments)
      with jax.default_matmul_precision(self._precision):
        return function(self._model, *arguments)

    # The answer comes last and goes to the host by itself.
    outputs = 2 if kind.endswith('wave') else 3
    shardings = (*(self._home,) * (outputs - 1), self._host)
    return jax.jit(
      program, donate_argnums=_DONATED[kind], out_shardings=shardings
    )


def compiled(program: Any) -> int:
  """How many variants of a jitted function have been compiled."""
  return int(program._cache_size())


def _powers(rows: int) -> tuple[int, ...]:
  """1, 2, 4, ... up to `rows`, which is always the last."""
  out = [1]
  while out[-1] * 2 < rows:
    out.append(out[-1] * 2)
  return tuple(out) if out[-1] == rows else (*out, rows)
