"""Published times of one model's layers, fitted: what a platform's cost is."""

import csv
import pathlib
from typing import NamedTuple

import numpy as np

from bevy_jax import shapes

_MODEL = 'qwen3-30b-a3b'
_MOST = 64  # Rows of the largest decode launch that is fitted.
_TWICE = ('layernorm',)  # Parts that a layer has two of.
_PARTS = (*_TWICE, 'qkv_proj', 'qk_norm', 'rotary_emb', 'o_proj')


class Fit(NamedTuple):
  """Constants in us, and what they leave unexplained.

  Attributes:
    memory_gb_per_s: at which experts are read.
    launch_us: a layer without its shared weights and experts.
    row_us: one more row.
    prefill_us: one more prompt token.
    mean_error: mean of |fitted / measured - 1| over the fitted launches.
    worst_error: the largest of them.
  """

  memory_gb_per_s: float
  launch_us: float
  row_us: float
  prefill_us: float
  mean_error: float
  worst_error: float


def fit(folder: pathlib.Path) -> Fit:
  """Least squares of relative errors over launches of at most 64 rows."""
  shape = shapes.SHAPES[_MODEL]
  dense = _dense(folder / 'dense.csv')
  samples = [
    (int(r['tokens']), int(r['activated_experts']), float(r['time_us']))
    for r in _rows(folder / 'moe.csv')
  ]
  few = [(n, m, us + dense[n]) for n, m, us in samples if n <= _MOST]
  terms = np.array([[1.0, m, n] for n, m, _ in few])
  wanted = np.array([us for _, _, us in few])
  scaled = terms / wanted[:, None]
  base, expert, row = np.linalg.lstsq(scaled, np.ones(len(few)), rcond=None)[0]
  errors = np.abs(terms @ (base, expert, row) / wanted - 1)
  memory = shape.expert_bytes() / expert * 1e-3
  full = [(n, us + dense[n]) for n, m, us in samples if m == shape.experts]
  full = [(n, us) for n, us in full if n >= 256 and n in dense]
  (n0, t0), (n1, t1) = full[0], full[-1]
  return Fit(
    memory_gb_per_s=float(memory),
    launch_us=float(base - shape.layer_bytes / memory * 1e-3),
    row_us=float(row),
    prefill_us=(t1 - t0) / (n1 - n0),
    mean_error=float(errors.mean()),
    worst_error=float(errors.max()),
  )


def _dense(path: pathlib.Path) -> dict[int, float]:
  """Time of a layer's other parts by tokens; attention itself is missing."""
  found: dict[int, float] = {}
  for row in _rows(path):
    if row['layer'] in _PARTS:
      times = 2 if row['layer'] in _TWICE else 1
      tokens = int(row['tokens'])
      found[tokens] = found.get(tokens, 0.0) + times * float(row['time_us'])
  return found


def _rows(path: pathlib.Path) -> list[dict[str, str]]:
  with open(path, encoding='utf-8', newline='') as file:
    return list(csv.DictReader(file))
