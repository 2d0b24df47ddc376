"""What a simulated machine predicts, beside what the device took."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from bevy_jax import recording
from bevy_jax.experiments import (
  ablation,
  calibration,
  configs,
  run,
  simulation,
)

_MB = 1e6
_NEAR = 0.1  # Of 1 in the ratio of predicted and measured.


class Plan(NamedTuple):
  """What to measure and to predict.

  Attributes:
    platform: see `platforms.find`; calibrated on this machine.
    caches: fractions of all experts.
    variants: scheduler, eviction and prefetcher of each.
    repeats: runs of each on the device, in turn with the other variants;
      their median counts.
  """

  platform: str
  caches: Sequence[float]
  variants: Sequence[tuple[str, str, str]]
  repeats: int = 3


class Asked(NamedTuple):
  """A comparison: the runs on the device, and what predicts them."""

  base: configs.Decode
  plan: Plan


def compare(
  base: configs.Decode, plan: Plan, say: Callable[[str], None]
) -> Iterator[ablation.Row]:
  """Tokens/s of every cache size and variant, a row each.

  The routing that is replayed is the one that the device's median run of the
  variant recorded, on the same link; prompts are not simulated, so both sides
  count behind the warm-up alone. All caches lie in the largest one, so that
  the programs are compiled once, or twice where some are so small that
  experts go in waves.
  """
  bench, roomy = None, False
  for cache in sorted(plan.caches, reverse=True):
    if bench is None or (roomy and not _roomy(bench, cache)):
      engine = dataclasses.replace(base.engine, cache=cache)
      config = dataclasses.replace(base, engine=engine, balance=0, compare=())
      bench = run.Bench(config, say)
    bench.set_cache(cache)
    roomy = _roomy(bench, cache)
    yield from _rows(bench, cache, plan, say)


def _roomy(bench: run.Bench, cache: float) -> bool:
  """Whether a layer fits beside what all others may await: no waves."""
  model = bench.llm.model.config
  awaited = (bench.llm.config.requests - 1) * model.top_k
  pairs = len(model.moe_ids) * model.num_experts
  return int(cache * pairs) >= model.num_experts + awaited


def _rows(
  bench: run.Bench, cache: float, plan: Plan, say: Callable[[str], None]
) -> Iterator[ablation.Row]:
  """Every variant with one cache."""
  runs: dict[tuple[str, str, str], list[run.Run]] = {}
  for number in range(plan.repeats):
    for variant in plan.variants:
      done = bench.run(*variant)
      if done.interrupted:
        raise KeyboardInterrupt
      runs.setdefault(variant, []).append(done)
      rate = done.report['tokens_per_s']
      words = ' / '.join(variant)
      say(f'cache {cache}, run {number + 1}: {words} {rate:.1f} tokens/s')
  for variant, all_of_it in runs.items():
    rates = [r.report['tokens_per_s'] for r in all_of_it]
    measured = statistics.median_low(rates)
    predicted = _predict(
      bench, plan.platform, variant, all_of_it[rates.index(measured)]
    )
    measured = statistics.median(rates)
    yield {
      'cache': cache,
      'scheduler': variant[0],
      'eviction': variant[1],
      'prefetch': variant[2],
      'link': bench.link,
      'measured': round(measured, 2),
      'spread': round((max(rates) - min(rates)) / measured, 3),
      'predicted': round(predicted, 2),
      'ratio': round(predicted / measured, 3),
    }


def verdict(rows: Sequence[ablation.Row]) -> str:
  """How many predictions are near what was measured, and the worst one."""
  off = [round(abs(float(row['ratio']) - 1), 3) for row in rows]
  near = sum(x <= _NEAR for x in off)
  worst = rows[off.index(max(off))]['ratio']
  return (
    f'{near} of {len(rows)} predictions within {_NEAR:.0%} of measured; the '
    f'worst is {worst} of it'
  )


def report(platform: str, rows: Sequence[ablation.Row]) -> dict[str, Any]:
  """The rows, with what a reader must know about them."""
  device = jax.devices()[0]
  return {
    'command': run.command(),
    'device': f'{device.platform}: {device.device_kind}',
    'versions': run.versions(),
    'platform': platform,
    'verdict': verdict(rows),
    'rows': rows,
  }


def _predict(
  bench: run.Bench, platform: str, variant: tuple[str, str, str], done: run.Run
) -> float:
  """Tokens/s of the recorded routing on the simulated machine."""
  model, engine = bench.llm.model, bench.llm.config
  trace = recording.trace(
    done.log,
    layers=len(model.config.moe_ids),
    num_experts=model.config.num_experts,
    meta={'model': bench.config.model},
  )
  layers = jax.tree.leaves(model.params['layers'])
  config = simulation.Replay(
    platform=platform,
    expert_mb=model.experts.block_bytes / _MB,
    layer_mb=sum(x.nbytes for x in layers) / model.config.num_layers / _MB,
    head_mb=calibration.head_bytes(model.params) / _MB,
    requests=engine.requests,
    count=len(trace.lengths),
    cache=bench.llm.slots,
    skip=engine.warmup,
    link=bench.link if bench.link.startswith('throttled') else '',
    link_depth=engine.link_depth,
    bounds=False,
    told=False,
  )
  found = simulation.Simulation(config, trace).run(*variant)
  return float(found.report['tokens_per_s'])
