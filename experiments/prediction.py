"""What a simulated machine predicts, beside what the device took."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax

from bevy_jax import recording
from bevy_jax.experiments import ablation, configs, run, simulation

_MB = 1e6


class Plan(NamedTuple):
  """What to measure and to predict.

  Attributes:
    platform: see `platforms.find`; calibrated on this machine.
    caches: fractions of all experts.
    variants: scheduler, eviction and prefetcher of each.
    repeats: runs of each on the device; their median counts.
  """

  platform: str
  caches: Sequence[float]
  variants: Sequence[tuple[str, str, str]]
  repeats: int = 3


def compare(
  base: configs.Decode, plan: Plan, say: Callable[[str], None]
) -> Iterator[ablation.Row]:
  """Tokens/s of every cache size and variant, a row each.

  The routing that is replayed is the one that the device's first run of the
  variant recorded, on the same link; prompts are not simulated, so both sides
  count behind the warm-up alone.
  """
  for cache in plan.caches:
    engine = dataclasses.replace(base.engine, cache=cache)
    config = dataclasses.replace(base, engine=engine, balance=0.0, compare=())
    bench = run.Bench(config, say)
    for variant in plan.variants:
      say(f'{" / ".join(variant)}, cache {cache}')
      runs = [bench.run(*variant) for _ in range(plan.repeats)]
      rates = [r.report['tokens_per_s'] for r in runs]
      measured = statistics.median(rates)
      predicted = _predict(bench, plan.platform, variant, runs[0])
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
  head = model.params['head' if 'head' in model.params else 'embed']
  config = simulation.Replay(
    platform=platform,
    expert_mb=model.experts.block_bytes / _MB,
    layer_mb=sum(x.nbytes for x in layers) / model.config.num_layers / _MB,
    head_mb=head.nbytes / _MB,
    requests=engine.requests,
    count=len(trace.lengths),
    cache=bench.llm.slots,
    skip=engine.warmup,
    link=bench.link if bench.link.startswith('throttled') else '',
    link_depth=engine.link_depth,
    bounds=False,
  )
  found = simulation.Simulation(config, trace).run(*variant)
  return float(found.report['tokens_per_s'])
