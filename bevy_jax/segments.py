"""What a launch goes through behind the experts of a layer.

A segment is whole layers without experts, up to the attention and the router
of the next MoE layer. Where it passes the end of the model it also runs the
head, draws the next token, embeds it and enters the first layers.
"""

import dataclasses
from typing import Any, NamedTuple

from bevy_jax.layers import config as config_lib


@dataclasses.dataclass(frozen=True)
class Segment:
  """Static shape of the layers that a launch goes through after its experts.

  Attributes:
    moe: for each layer whether it has experts; only the last one may.
    windows: sliding window of each layer.
    head: how many of the layers come before the head; None without it.
    gates: how many MoE layers behind the last one are guessed.
  """

  moe: tuple[bool, ...]
  windows: tuple[int, ...]
  head: int | None
  gates: int = 0


class Weights(NamedTuple):
  """Shared weights of a segment.

  Attributes:
    mlp: the layer whose experts are applied; empty where none are.
    layers: the layers after it, one dict each.
    top: embedding, final norm and head where needed, else empty.
    gates: norm and router of the MoE layers that are guessed, in order.
  """

  mlp: dict[str, Any]
  layers: tuple[dict[str, Any], ...]
  top: dict[str, Any]
  gates: tuple[dict[str, Any], ...] = ()


def gates(config: config_lib.ModelConfig, layer: int, depth: int) -> list[int]:
  """MoE layers, `depth` at most, that a stream at an MoE layer comes to next.

  Not those of the next token: the stream knows nothing of it.
  """
  return list(range(layer + 1, min(layer + 1 + depth, len(config.moe_ids))))


def segments(
  config: config_lib.ModelConfig,
) -> list[tuple[Segment, tuple[int, ...]]]:
  """For each MoE layer what follows it, and the layer numbers of that."""
  out = []
  for this in config.moe_ids:
    order = [*range(this + 1, config.num_layers), *range(config.moe_ids[0] + 1)]
    stop = next(i for i, layer in enumerate(order) if config.moe_layers[layer])
    head = config.num_layers - this - 1
    out.append(_segment(config, order[: stop + 1], head))
  return out


def entry_segment(
  config: config_lib.ModelConfig,
) -> tuple[Segment, tuple[int, ...]]:
  """What a new token goes through before the first experts."""
  return _segment(config, list(range(config.moe_ids[0] + 1)), config.num_layers)


def prefill_segments(
  config: config_lib.ModelConfig,
) -> list[tuple[Segment, tuple[int, ...]] | None]:
  """As `segments`, without the head; None where nothing is left to write."""
  out: list[tuple[Segment, tuple[int, ...]] | None] = []
  for this in config.moe_ids:
    order = list(range(this + 1, config.num_layers))
    moe = [i for i, layer in enumerate(order) if config.moe_layers[layer]]
    order = order[: moe[0] + 1] if moe else order
    out.append(_segment(config, order, len(order) + 1) if order else None)
  return out


def _segment(
  config: config_lib.ModelConfig, order: list[int], head: int
) -> tuple[Segment, tuple[int, ...]]:
  moe = tuple(config.moe_layers[layer] for layer in order)
  windows = tuple(config.window(layer) for layer in order)
  return Segment(moe, windows, head if head < len(order) else None), tuple(
    order
  )
