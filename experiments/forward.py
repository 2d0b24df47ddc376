"""The whole model over whole windows, for training: experts run densely."""

import logging
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import norm, rope

Weights = dict[str, Any]


class Output(NamedTuple):
  """What a forward pass over `[B, S]` tokens says.

  Attributes:
    hidden: `[B, S, D]`, after the final norm.
    chosen: bool `[L, B, S, E]`, experts used by each token.
    balance: float32 `[]`, load-balancing loss, 1 when perfectly even.
    z: float32 `[]`, router z-loss.
  """

  hidden: jax.Array
  chosen: jax.Array
  balance: jax.Array
  z: jax.Array


def best_attention(config: config_lib.ModelConfig, window: int) -> str:
  """'cudnn' where it compiles and runs for this shape, otherwise 'xla'."""
  if jax.default_backend() != 'gpu':
    return 'xla'

  def total(q: jax.Array, k: jax.Array) -> jax.Array:
    mixed = jax.nn.dot_product_attention(
      q, k, k, is_causal=True, implementation='cudnn'
    )
    return jnp.sum(mixed.astype(jnp.float32))

  shape = (2, window, config.num_heads, config.head_dim)
  q = jnp.ones(shape, jnp.bfloat16)
  k = jnp.ones((*shape[:2], config.num_kv_heads, shape[3]), jnp.bfloat16)
  try:
    jax.block_until_ready(jax.jit(jax.grad(total, argnums=(0, 1)))(q, k))
  except Exception as error:  # Any failure of a vendor library means: no.
    logging.warning('attention by XLA, since cuDNN said: %s', error)
    return 'xla'
  return 'cudnn'


def run(
  config: config_lib.ModelConfig,
  weights: Weights,
  tokens_BxS: jax.Array,
  *,
  attention: str = 'xla',
  dtype: Any = jnp.bfloat16,
  dropout: float = 0.0,
  key: jax.Array | None = None,
) -> Output:
  """The whole model over whole windows; matmuls in `dtype`.

  The residual stream, norms and the router stay float32. `key` is consumed
  and needed only with dropout.
  """
  shared = weights['shared']
  x = shared['embed'][tokens_BxS]
  chosen, balance, z = [], [], []
  for i, layer in enumerate(shared['layers']):
    keys = [None, None]
    if dropout and key is not None:
      keys = list(jax.random.split(jax.random.fold_in(key, i)))
    with jax.named_scope('attention'):
      h = norm.rms_norm(x, layer['attn_norm'], config.norm_eps).astype(dtype)
      x += _drop(_attend(config, layer, h, attention), dropout, keys[0])
    with jax.named_scope('experts'):
      h = norm.rms_norm(x, layer['mlp_norm'], config.norm_eps)
      gate, mask, sides = _gate(config, layer['router'], h)
      y = _experts(weights['experts'][i], h.astype(dtype), gate)
      x += _drop(y, dropout, keys[1])
    chosen.append(mask)
    balance.append(sides[0])
    z.append(sides[1])
  hidden = norm.rms_norm(x, shared['final_norm'], config.norm_eps)
  return Output(
    hidden.astype(dtype),
    jnp.stack(chosen),
    jnp.mean(jnp.stack(balance)),
    jnp.mean(jnp.stack(z)),
  )


def token_losses(
  weights: Weights, hidden: jax.Array, targets: jax.Array
) -> jax.Array:
  """Float32 negative log likelihood of `targets [B, S]`, in nats."""
  embed = weights['shared']['embed'].astype(hidden.dtype)
  logits = _logits(hidden, embed)
  # A comparison has an elementwise gradient, where a gather's is a scatter.
  hit = targets[..., None] == jnp.arange(logits.shape[-1])[None, None, :]
  picked = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
  return jax.nn.logsumexp(logits, axis=-1) - picked


@jax.custom_vjp
def _logits(hidden: jax.Array, embed: jax.Array) -> jax.Array:
  """Float32 logits of narrow operands."""
  return jnp.einsum(
    'bsd,vd->bsv', hidden, embed, preferred_element_type=jnp.float32
  )


def _logits_fwd(
  hidden: jax.Array, embed: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _logits(hidden, embed), (hidden, embed)


def _logits_bwd(
  saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
  # Left alone, both products would run on wide operands, several times slower.
  hidden, embed = saved
  g = g.astype(hidden.dtype)
  return (
    jnp.einsum('bsv,vd->bsd', g, embed),
    jnp.einsum('bsv,bsd->vd', g, hidden),
  )


_logits.defvjp(_logits_fwd, _logits_bwd)


def _attend(
  config: config_lib.ModelConfig,
  layer: Weights,
  h: jax.Array,
  attention: str,
) -> jax.Array:
  batch, length, _ = h.shape
  q, k, v = (
    (h @ layer[name].astype(h.dtype)).reshape(
      batch, length, -1, config.head_dim
    )
    for name in ('wq', 'wk', 'wv')
  )
  q = norm.rms_norm(q, layer['q_norm'], config.norm_eps)
  k = norm.rms_norm(k, layer['k_norm'], config.norm_eps)
  angles, scale = rope.frequencies(config.rope, config.head_dim)
  positions = jnp.arange(length)[None, :]
  mixed: jax.Array = jax.nn.dot_product_attention(
    rope.rotate(q, positions, angles, scale),
    rope.rotate(k, positions, angles, scale),
    v,
    is_causal=True,
    implementation=cast(Literal['cudnn', 'xla'], attention),
  )
  flat = mixed.reshape(batch, length, -1)
  out: jax.Array = flat @ layer['wo'].astype(h.dtype)
  return out


def _gate(
  config: config_lib.ModelConfig, router: jax.Array, h: jax.Array
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
  """Weight of every expert `[B, S, E]`, 0 for the unchosen; both losses."""
  logits = jnp.matmul(h, router, precision=jax.lax.Precision.HIGHEST)
  probs = jax.nn.softmax(logits, axis=-1)
  # An expert's rank is how many beat it; a tie is won by the lower id.
  mine, other = probs[..., :, None], probs[..., None, :]
  ids = jnp.arange(config.num_experts)
  earlier = (ids[None, :] < ids[:, None]).reshape(
    (1,) * (probs.ndim - 1) + (config.num_experts,) * 2
  )
  beats = (other > mine) | ((other == mine) & earlier)
  mask = jnp.sum(beats, axis=-1) < config.top_k
  gate = jnp.where(mask, probs, 0.0)
  if config.norm_topk:
    gate = gate / jnp.sum(gate, axis=-1, keepdims=True)
  used = jnp.mean(mask / config.top_k, axis=(0, 1))
  wanted = jnp.mean(probs, axis=(0, 1))
  balance = config.num_experts * jnp.sum(used * wanted)
  z = jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)))
  return gate, mask, (balance, z)


def _experts(
  experts: jax.Array, h: jax.Array, gate_BxSxE: jax.Array
) -> jax.Array:
  """All experts `[E, 3, F, D]` as one wide layer, masked by their weights.

  Experts this small are cheaper computed in full than sorted and gathered.
  """
  count, _, width, dim = experts.shape
  wide = experts.astype(h.dtype).swapaxes(0, 1).reshape(3, count * width, dim)
  gated = jax.nn.silu(jnp.einsum('bsd,fd->bsf', h, wide[0]))
  inner = gated * jnp.einsum('bsd,fd->bsf', h, wide[1])
  inner = inner.reshape(*h.shape[:2], count, width)
  inner = inner * gate_BxSxE[..., None].astype(h.dtype)
  return jnp.einsum(
    'bsf,fd->bsd', inner.reshape(*h.shape[:2], count * width), wide[2]
  )


def _drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
  if not rate or key is None:
    return x
  kept = jax.random.bernoulli(key, 1 - rate, x.shape)
  return jnp.where(kept, x / (1 - rate), jnp.zeros((), x.dtype))
