"""Settings that every test runs under."""

import os

# Before jax is imported, so that processes started by tests inherit them.
os.environ['JAX_PLATFORMS'] = os.environ.get('BEVY_TEST_PLATFORM', 'cpu')
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'
# A GPU multiplies float32 in tf32 unless told; programs of ours tell it
# themselves, tests that call layers directly must not depend on it.
os.environ['JAX_DEFAULT_MATMUL_PRECISION'] = 'highest'

import jax

# Once more by name: a plugin of pytest may have imported jax already.
jax.config.update('jax_platforms', os.environ['JAX_PLATFORMS'])
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_default_matmul_precision', 'highest')
