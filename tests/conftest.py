"""Settings that every test runs under."""

import os

# Before jax is imported, so that processes started by tests inherit them.
os.environ['JAX_PLATFORMS'] = os.environ.get('BEVY_TEST_PLATFORM', 'cpu')
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'

import jax

# Once more by name: a plugin of pytest may have imported jax already.
jax.config.update('jax_platforms', os.environ['JAX_PLATFORMS'])
jax.config.update('jax_numpy_rank_promotion', 'raise')
