"""Host time of choosing a victim, of a whole load, of telling who used what.

python -m bevy_jax.experiments.eviction_cost --layers=48 --experts=128
"""

import statistics
import time

import numpy as np
from absl import app, flags

from bevy_jax import events, loads, protocols
from bevy_jax.offload import eviction, slot_table

LAYERS = flags.DEFINE_integer('layers', 48, 'Layers that have experts.')
EXPERTS = flags.DEFINE_integer('experts', 128, 'Experts of a layer.')
TOP_K = flags.DEFINE_integer('top_k', 8, 'Experts that a token uses.')
ROWS = flags.DEFINE_integer('requests', 8, 'Requests that decode.')
CACHE = flags.DEFINE_float('cache', 0.5, 'Fraction of all experts.')
PASSES = flags.DEFINE_integer('passes', 12, 'Tokens of each request.')


class _Nothing:
  """An executor that moves nothing, so that only bookkeeping is timed."""

  now = staticmethod(time.perf_counter_ns)

  def load(self, key: int, slot: int) -> None:
    """Moves nothing."""


class _Timed:
  """An eviction with a watch.

  Attributes:
    spent: nanoseconds of each choice.
  """

  def __init__(self, rule: eviction.Eviction):
    self.rule, self.estimates, self.spent = rule, rule.estimates, list[int]()

  def victim(self, barred: eviction.Array, uses: eviction.Uses) -> int:
    """See `Eviction`."""
    begun = time.perf_counter_ns()
    found = self.rule.victim(barred, uses)
    self.spent.append(time.perf_counter_ns() - begun)
    return found


def measure(rule: eviction.Eviction) -> tuple[float, float, float]:
  """Median us of a victim, of a load (issued alone, landed), of a reveal."""
  layers, experts, rows = LAYERS.value, EXPERTS.value, ROWS.value
  rng, slots = np.random.default_rng(0), int(CACHE.value * layers * experts)
  table = slot_table.SlotTable(layers, experts, slots)
  watch, log = _Timed(rule), list[events.Event]()
  line = loads.Loads(table, _Nothing(), watch, 4, rows, log.append)  # type: ignore[arg-type]
  load, reveal = [], []
  heat = 1 / np.arange(1, experts + 1) ** 0.5
  for _ in range(PASSES.value):
    for layer in range(layers):
      scores = heat * rng.exponential(size=(rows, experts))
      chosen = np.argsort(-scores, 1)[:, : TOP_K.value].tolist()
      begun = time.perf_counter_ns()
      line.uses.reveal(layer, range(rows), chosen)
      reveal.append(time.perf_counter_ns() - begun)
      wants = [protocols.Want(layer, sum(1 << e for e in c)) for c in chosen]
      union = sorted({e for c in chosen for e in c})
      for expert in union:
        line.uses.touch(layer * experts + expert)
      for expert in union:
        if table.resident[layer] >> expert & 1:
          continue
        full = not table.free
        # One at a time: what all loads of an issue share is paid by each.
        ask = [protocols.Want(layer, 1 << expert), *wants]
        begun = time.perf_counter_ns()
        line.issue(ask, 1, 'demand')
        line.landed(protocols.Landed(begun, layer * experts + expert))
        if full:
          load.append(time.perf_counter_ns() - begun)
  found = watch.spent, load, reveal
  a, b, c = (statistics.median(ns) / 1e3 for ns in found)
  return a, b, c


def main(argv: list[str]) -> None:
  """Prints a row for each eviction."""
  if len(argv) > 1:
    raise app.UsageError(f'not a flag: {argv[1:]}')
  keys = LAYERS.value * EXPERTS.value
  print(f'{keys} experts, {int(CACHE.value * keys)} slots; medians in us')
  print(f'{"eviction":>12} {"victim":>8} {"load":>8} {"reveal":>8}')
  for name, rule in eviction.EVICTIONS.items():
    victim, load, reveal = measure(rule)
    print(f'{name:>12} {victim:8.1f} {load:8.1f} {reveal:8.1f}')


if __name__ == '__main__':
  app.run(main)
