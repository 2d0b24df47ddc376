"""One training step: dense masked experts, losses, AdamW, cosine schedule."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bevy_jax.experiments import forward
from bevy_jax.layers import config as config_lib

# Length of a schedule that is not fixed yet.
UNKNOWN = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """What a run is made of; hashable, so jit takes it as static.

  Attributes:
    batch: windows a step.
    python_share: fraction of a batch's windows that are Python.
    window: tokens of one window.
    peak_lr: learning rate after warm-up.
    floor: last learning rate as a fraction of the peak.
    warmup: steps of linear warm-up.
    decay: weight decay on matrices.
    balance: weight of the load-balancing loss.
    z: weight of the router's z-loss.
    dropout: fraction of each residual branch that is dropped.
    attention: 'cudnn' or 'xla', jax's attention implementation.
    seed: of weights, dropout and data order.
  """

  batch: int = 128
  python_share: float = 0.2
  window: int = 1024
  peak_lr: float = 2.5e-3
  floor: float = 0.03
  warmup: int = 300
  decay: float = 0.1
  balance: float = 0.01
  z: float = 1e-3
  dropout: float = 0.15
  attention: str = 'xla'
  seed: int = 0

  @property
  def rows(self) -> tuple[int, int]:
    """Windows of a batch from each domain, books first."""
    python = round(self.batch * self.python_share)
    return (self.batch - python, python)


class State(NamedTuple):
  """All that a resumed run needs.

  Attributes:
    step: int32 `[]`, steps done.
    total: int32 `[]`, steps of the whole schedule.
    seen: int32 `[2]`, windows taken from each domain: the data position.
    weights: float32 `{'shared', 'experts'}`.
    moments: optax state.
  """

  step: jax.Array
  total: jax.Array
  seen: jax.Array
  weights: forward.Weights
  moments: optax.OptState


def optimiser(train: TrainConfig) -> optax.GradientTransformation:
  """Clipped AdamW without its learning rate, decay on matrices only."""
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-9),
    optax.add_decayed_weights(
      train.decay, mask=lambda t: jax.tree.map(lambda x: x.ndim > 1, t)
    ),
  )


def learning_rate(
  train: TrainConfig, step: jax.Array, total: jax.Array
) -> jax.Array:
  """Linear warm-up, then a cosine to `floor`; `total` may be an array."""
  warm = (step + 1) / train.warmup
  done = (step - train.warmup) / jnp.maximum(total - train.warmup, 1)
  cosine = 0.5 * (1 + jnp.cos(math.pi * jnp.clip(done, 0.0, 1.0)))
  decayed = train.floor + (1 - train.floor) * cosine
  return train.peak_lr * jnp.minimum(warm, decayed)


def start(train: TrainConfig, weights: forward.Weights) -> State:
  """Step 0 of a run whose length is not yet known."""
  unknown = jnp.asarray(UNKNOWN, jnp.int32)
  moments = optimiser(train).init(weights)
  seen = jnp.zeros(2, jnp.int32)
  return State(jnp.zeros((), jnp.int32), unknown, seen, weights, moments)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def step(
  config: config_lib.ModelConfig,
  train: TrainConfig,
  state: State,
  stream: jax.Array,
  starts: jax.Array,
) -> tuple[State, dict[str, jax.Array]]:
  """One update on the windows `starts [B]` of uint16 `stream [N]`."""
  columns = jnp.arange(train.window + 1)[None, :]
  rows = stream[starts[:, None] + columns].astype(jnp.int32)
  key = jax.random.key(train.seed, impl='rbg')
  key = jax.random.fold_in(key, state.step)

  def loss(weights: forward.Weights) -> tuple[jax.Array, dict[str, jax.Array]]:
    out = forward.run(
      config,
      weights,
      rows[:, :-1],
      attention=train.attention,
      dropout=train.dropout,
      key=key,
    )
    nats = jnp.mean(forward.token_losses(weights, out.hidden, rows[:, 1:]))
    total = nats + train.balance * out.balance + train.z * out.z
    return total, {'loss': nats, 'balance': out.balance, 'z': out.z}

  grads, said = jax.grad(loss, has_aux=True)(state.weights)
  lr = learning_rate(train, state.step, state.total)
  updates, moments = optimiser(train).update(
    grads, state.moments, state.weights
  )
  weights = jax.tree.map(lambda w, u: w - lr * u, state.weights, updates)
  said |= {'lr': lr, 'grad_norm': optax.tree.norm(grads)}
  seen = state.seen + jnp.asarray(train.rows, jnp.int32)
  return State(state.step + 1, state.total, seen, weights, moments), said
