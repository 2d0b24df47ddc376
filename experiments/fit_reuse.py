"""Fits the weights of the eviction `reuse` on a routing trace.

python -m bevy_jax.experiments.fit_reuse --trace=FILE --requests=16:64

Least squares: does a stream's next token use this expert, told from what
`offload/estimate.py` knows of it. Fit on requests that are not measured.
"""

import numpy as np
import numpy.typing as npt
from absl import app, flags

from bevy_jax import trace as trace_lib
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


def _range(text: str) -> range:
  first, end = text.split(':')
  return range(int(first), int(end))


def main(argv: list[str]) -> None:
  """Prints the weights."""
  if len(argv) > 1:
    raise app.UsageError(f'not a flag: {argv[1:]}')
  try:
    trace = trace_lib.load(TRACE.value)
    requests, tokens = _range(REQUESTS.value), _range(TOKENS.value)
    shortest = int(trace.lengths[requests.start : requests.stop].min())
    if requests.stop > len(trace.lengths) or tokens.stop > shortest:
      raise ValueError(
        f'{TRACE.value} has {len(trace.lengths)} requests, the shortest of '
        f'those asked for {shortest} tokens; ask for less.'
      )
  except ValueError as error:
    raise SystemExit(f'fit_reuse: {error}') from error
  weights = fit(trace, requests, tokens, WARMUP.value)
  names = ('popularity', 'frequency', 'last')
  for name, weight in zip(names, weights, strict=True):
    print(f'{name:>12} {weight:.4f}')


if __name__ == '__main__':
  app.run(main)
