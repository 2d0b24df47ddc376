"""A routing trace in lockstep order through the slot table alone."""

from collections.abc import Sequence

from bevy_jax import bounds
from bevy_jax import trace as trace_lib
from bevy_jax.offload import eviction as eviction_lib


def path(
  trace: trace_lib.Trace, requests: Sequence[int], tokens: range
) -> list[bounds.Step]:
  """The steps of some requests that decode the same tokens together.

  Args:
    trace: the routing.
    requests: who takes part; row n has the n-th of them.
    tokens: which tokens; ValueError where a request is shorter.
  """
  for request in requests:
    if not 0 <= request < len(trace.lengths):
      raise ValueError(
        f'request {request} is not in the trace, which has '
        f'{len(trace.lengths)}.'
      )
    if not 0 <= tokens.start < tokens.stop <= trace.lengths[request]:
      raise ValueError(
        f'tokens {tokens.start} to {tokens.stop} of request {request} are '
        f'asked for, but it has {trace.lengths[request]}.'
      )
  found = []
  for token in tokens:
    chosen = trace.experts[list(requests), token].tolist()
    for layer in range(trace.layers):
      uses: dict[int, int] = {}
      routed = []
      for row, layers in enumerate(chosen):
        experts = layers[layer]
        routed.append((row, token == tokens.start, tuple(experts)))
        for expert in experts:
          key = layer * trace.num_experts + expert
          uses[key] = uses.get(key, 0) + 1
      found.append(
        bounds.Step(layer, (uses,), len(requests), routed=tuple(routed))
      )
  return found


def misses(
  trace: trace_lib.Trace,
  requests: Sequence[int],
  tokens: range,
  slots: int,
  eviction: eviction_lib.Eviction | None,
  quota: Sequence[int] = (),
) -> list[int]:
  """Misses of each step, layers within tokens, from a cold cache.

  A step's experts are loaded in ascending order and none of them is a victim
  in that step.

  Args:
    trace: the routing.
    requests: who decodes.
    tokens: which tokens.
    slots: size of the cache.
    eviction: the rule; None for Belady's, which knows the future.
    quota: slots that each layer may fill; empty for one pool.
  """
  steps = path(trace, requests, tokens)
  if eviction is None:
    return bounds.belady_misses(steps, slots, quota)
  return bounds.lockstep_misses(
    steps,
    layers=trace.layers,
    experts=trace.num_experts,
    slots=slots,
    rows=len(requests),
    eviction=eviction,
    quota=quota,
  )
