"""Python's garbage collector, kept from walking through a log that grows."""

import contextlib
import gc
from collections.abc import Iterator

# Objects between two looks at the youngest ones, and looks between two walks
# through everything. A launch leaves about 25 in the log.
_RARE = 10_000, 10, 1_000


@contextlib.contextmanager
def rare() -> Iterator[None]:
  """Lets it look seldom for as long as this is open; it still looks.

  What an engine leaves behind is its log, which stays: each walk through it,
  and through all that JAX has made, frees nothing and stops the run. Nobody's
  garbage is kept for ever, as `gc.freeze` would. Whoever has set it rarer, or
  off, is left alone.
  """
  before = gc.get_threshold()
  if not 0 < before[0] < _RARE[0]:
    yield
    return
  gc.set_threshold(*_RARE)
  try:
    yield
  finally:
    gc.set_threshold(*before)
