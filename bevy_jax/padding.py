"""Launches of nothing but padding: what compiles every program beforehand."""

from collections.abc import Iterator

import numpy as np

from bevy_jax import programs as programs_lib
from bevy_jax import protocols, steps
from bevy_jax import request as request_lib
from bevy_jax.layers import config as model_config


def batches(
  programs: programs_lib.Programs,
  model: model_config.ModelConfig,
  rows: int,
  room: int,
) -> Iterator[protocols.Batch]:
  """One launch a program, of prompts and of decoding.

  Args:
    programs: what is to be compiled.
    model: whose.
    rows: R; the row number of padding.
    room: slots for one layer's experts: with few of them there are waves.
  """
  # Prefill leaves alone what all the other rows may be waiting for.
  awaited = (rows - 1) * model.top_k
  waves = room < model.num_experts + awaited
  for b in programs.prompt_buckets:
    chunk = protocols.Chunk([rows] * b, [[]] * b, [0] * b)
    yield protocols.Batch('prefill', -1, chunk=chunk)
    for layer, stage in enumerate(programs.prefill):
      if stage is not None:
        yield protocols.Batch('prefill', layer)
    if waves:
      yield protocols.Batch('prefill', 0, finish=False)
  yield from decode(programs, model, rows, room)


def decode(
  programs: programs_lib.Programs,
  model: model_config.ModelConfig,
  rows: int,
  room: int,
) -> Iterator[protocols.Batch]:
  """Those of decoding alone; see `batches`."""
  nobody = request_lib.SamplingParams()
  for group in programs.buckets:
    away = [rows] * group
    entry = protocols.Entry(rows, 0, 0, nobody)
    yield protocols.Batch('enter', -1, entries=[entry] * group)
    for layer, hops in programs.distinct():
      tables = np.full((hops, model.num_experts), -1, np.int32)
      yield protocols.Batch('decode', layer, rows=away, tables=tables)
    if room < steps.distinct_limit(model, group):
      yield protocols.Batch(
        'decode', 0, rows=away, tables=tables[:1], finish=False
      )
