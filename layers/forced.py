"""Expert ids from a recording instead of the router's own; all else computed.

A recording lies among a layer's shared weights as `p['forced']`, int16
`[requests, positions, T]`: what request r uses there at each position. It
stands in for a model whose weights nobody has: the router is computed, and
weighs the experts that it is told to use.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import norm, router


def ids(
  p: dict[str, Any], seeds_N: jax.Array, positions_N: jax.Array
) -> jax.Array | None:
  """What rows use at a layer, int32 `[N, T]`; None where nothing is recorded.

  Row i replays recording `seeds[i]` at `positions[i]`, both modulo what the
  recording has.
  """
  if 'forced' not in p:
    return None
  with jax.named_scope('forced'):
    requests, positions, _ = p['forced'].shape
    found: jax.Array = p['forced'][seeds_N % requests, positions_N % positions]
    return found.astype(jnp.int32)


def apply(
  config: config_lib.ModelConfig,
  p: dict[str, Any],
  x_NxD: jax.Array,
  routing: router.Routing,
  seeds_N: jax.Array,
  positions_N: jax.Array,
) -> router.Routing:
  """The recorded ids, weighed by this router; `routing` where none are.

  Soundness stays the router's. Its product is written twice but made once:
  the compiler sees that both are the same.
  """
  given = ids(p, seeds_N, positions_N)
  if given is None:
    return routing
  with jax.named_scope('forced'):
    h = norm.rms_norm(x_NxD, p['mlp_norm'], config.norm_eps)
    logits = router.logits(p['router'], h)
    weights = router.weigh(config, logits, given)
  return routing._replace(ids=given, weights=weights)


def attach(
  config: config_lib.ModelConfig,
  params: dict[str, Any],
  tables: npt.NDArray[np.int16],
) -> dict[str, Any]:
  """Shared weights whose MoE layers replay `tables`.

  Args:
    config: the model.
    params: its shared weights; not changed.
    tables: int16 `[requests, positions, MoE layers, T]`.

  Raises:
    ValueError: the recording is none of this model.
  """
  moe, k = len(config.moe_ids), config.top_k
  if tables.ndim != 4 or tables.shape[2:] != (moe, k):
    raise ValueError(
      f'the recording is {list(tables.shape)}, but the model needs '
      f'[requests, positions, {moe} layers, {k} experts a token].'
    )
  if tables.min() < 0 or tables.max() >= config.num_experts:
    raise ValueError(
      f'the recording names experts {tables.min()} to {tables.max()}, but a '
      f'layer has 0 to {config.num_experts - 1}.'
    )
  layers = list(params['layers'])
  for i, layer in enumerate(config.moe_ids):
    own = jnp.asarray(np.ascontiguousarray(tables[:, :, i]))
    layers[layer] = layers[layer] | {'forced': own}
  return params | {'layers': layers}
