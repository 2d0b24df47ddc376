"""Bevy: decode Mixture-of-Experts models whose experts do not fit."""

import importlib
import os
import pathlib
from typing import TYPE_CHECKING

_here = pathlib.Path(__file__).resolve().parent
if (_here.parent / 'WORKSPACE.md').is_file():
  # An uninstalled checkout: layers/, offload/ and experiments/ lie beside us.
  __path__.append(str(_here.parent))
# Before any module that may have been compiled is imported.
importlib.import_module(f'{__name__}.compiled').use(__path__)

# JAX pins 64 GiB of host memory at most unless this says otherwise before its
# GPU client starts, and experts may take all there is. Whoever has set it
# keeps it. Direct copies take memory that JAX does not know, without a limit.
_LIMIT = 'XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB'


def _raise_pinned_limit() -> None:
  try:
    nbytes = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  except (AttributeError, OSError, ValueError):  # No such system: JAX's own.
    return
  if nbytes > 64 * 2**30:
    os.environ.setdefault(_LIMIT, str(nbytes // 2**30))


_raise_pinned_limit()

if TYPE_CHECKING:
  from bevy_jax.config import EngineConfig
  from bevy_jax.lagging import SchedulerBase
  from bevy_jax.llm import LLM, Output, Piece
  from bevy_jax.offload.eviction import EvictionBase
  from bevy_jax.offload.prefetch import Guess, PrefetcherBase
  from bevy_jax.protocols import Launch, View, Want
  from bevy_jax.request import SamplingParams

__all__ = [
  'LLM',
  'EngineConfig',
  'EvictionBase',
  'Guess',
  'Launch',
  'Output',
  'Piece',
  'PrefetcherBase',
  'SamplingParams',
  'SchedulerBase',
  'View',
  'Want',
]

_HOMES = {
  'LLM': 'llm.LLM',
  'Output': 'llm.Output',
  'Piece': 'llm.Piece',
  'EngineConfig': 'config.EngineConfig',
  'SamplingParams': 'request.SamplingParams',
  # Of policies of one's own: each is its base and one method.
  'SchedulerBase': 'lagging.SchedulerBase',
  'EvictionBase': 'offload.eviction.EvictionBase',
  'PrefetcherBase': 'offload.prefetch.PrefetcherBase',
  'View': 'protocols.View',
  'Want': 'protocols.Want',
  'Launch': 'protocols.Launch',
  'Guess': 'offload.prefetch.Guess',
}


def __getattr__(name: str) -> object:
  """Public names are loaded when used: layers and offload stay light."""
  if name not in _HOMES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  home, _, attribute = _HOMES[name].rpartition('.')
  return getattr(importlib.import_module(f'{__name__}.{home}'), attribute)
