"""Settings that every test runs under."""

import os
import pathlib
import signal

# Programs compiled once serve every process of the tests and the next run:
# two thirds of all time went into compiling. They are found by what they
# compute and by the versions that compiled them; `make test` forgets them
# first. What counts compilations counts the calls, not the work.
os.environ['JAX_COMPILATION_CACHE_DIR'] = os.environ.get(
  'JAX_COMPILATION_CACHE_DIR'
) or os.path.join(
  os.environ.get('BEVY_CHECKOUT') or pathlib.Path(__file__).parents[1],
  'build/programs',
)
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'

# A shell that runs the tests behind itself has told them to ignore Ctrl-C, and
# they would tell the processes that they start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

# What is tested is the text, unless somebody asks for what was compiled of it.
os.environ.setdefault('BEVY_COMPILED', '0')

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
jax.config.update(
  'jax_compilation_cache_dir', os.environ['JAX_COMPILATION_CACHE_DIR']
)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
