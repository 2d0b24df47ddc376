"""Fits the weights of the eviction `reuse` on a routing trace.

python -m bevy_jax.experiments.fit_reuse --trace=FILE --requests=16:64

Least squares: does a stream's next token use this expert, told from what
`offload/estimate.py` knows of it. Fit on requests that are not measured.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from absl import flags

from bevy_jax import trace as trace_lib
from bevy_jax.experiments import ablation, launcher, outcome, workdir
from bevy_jax.offload import estimate as estimate_lib

TRACE = flags.DEFINE_string('trace', '', 'The routing trace.')
REQUESTS = flags.DEFINE_string('requests', '16:64', 'FIRST:END to fit on.')
TOKENS = flags.DEFINE_string('tokens', '64:160', 'FIRST:END to fit on.')
WARMUP = flags.DEFINE_integer('warmup', 16, 'Tokens that only count as past.')


def fit(
  trace: trace_lib.Trace, requests: range, tokens: range, warmup: int
) -> npt.NDArray[np.float64]:
  """Weights in the order of `estimate.WEIGHTS`."""
  streams = np.arange(len(requests))
  estimate = estimate_lib.Estimate(
    trace.layers, trace.num_experts, len(streams)
  )
  squares, products = np.zeros((3, 3)), np.zeros(3)
  for token in tokens[:-1]:
    now, then = (
      trace.experts[requests.start : requests.stop, t].astype(np.intp)
      for t in (token, token + 1)
    )
    for layer in range(trace.layers):
      told = estimate.features(layer, streams, now[:, layer])
      if token < tokens.start + warmup:
        continue
      shape = told[1].shape
      table = np.stack([np.broadcast_to(x, shape).ravel() for x in told])
      used = np.zeros(shape)
      used[streams[:, None], then[:, layer]] = 1.0
      squares += table @ table.T
      products += table @ used.ravel()
  return np.asarray(np.linalg.solve(squares, products))


def build_config() -> dict[str, Any]:
  """What is fitted on."""
  return {
    'trace': TRACE.value,
    'requests': ablation.span(REQUESTS.value),
    'tokens': ablation.span(TOKENS.value),
    'warmup': WARMUP.value,
  }


def main(asked: dict[str, Any], place: workdir.Workdir) -> outcome.Outcome:
  """Fits the weights."""
  del place
  trace = trace_lib.load(asked['trace'])
  requests, tokens = range(*asked['requests']), range(*asked['tokens'])
  shortest = int(trace.lengths[requests.start : requests.stop].min())
  if requests.stop > len(trace.lengths) or tokens.stop > shortest:
    raise ValueError(
      f'{asked["trace"]} has {len(trace.lengths)} requests, the shortest of '
      f'those asked for {shortest} tokens; ask for less.'
    )
  weights = fit(trace, requests, tokens, asked['warmup'])
  names = ('popularity', 'frequency', 'last')
  report = dict(zip(names, map(float, weights), strict=True))
  lines = (f'{name:>12} {weight:.4f}' for name, weight in report.items())
  return outcome.Outcome(report, tuple(lines))


if __name__ == '__main__':
  launcher.run(main, build_config, device=False)
