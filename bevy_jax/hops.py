"""How many layers a launch crosses: few numbers, so that few are compiled."""

import dataclasses
import functools
from typing import Any

from bevy_jax import protocols

_MANY = 8  # Through the GPU kernels, unless one is told otherwise.
_ANYWHERE = 4  # Longer launches end at the head, if they come to it.


def check(asked: int | str) -> None:
  """ValueError where no launch can cross so many layers."""
  whole = isinstance(asked, int) and not isinstance(asked, bool)
  if asked not in ('pass', 'auto') and not (whole and int(asked) >= 1):
    raise ValueError(
      f"hops is {asked!r}; give layers such as 1, 2, 4 or 8, 'pass' for all "
      "layers of the model, or 'auto'."
    )


def resolve(asked: int | str, *, kernels: bool) -> int | str:
  """What is asked for; 'auto' is many layers where GPU kernels serve.

  A launch costs the host far more than a further layer of it costs a GPU that
  leaves what nobody crosses at once. The plain form computes it in full.
  """
  if asked != 'auto':
    return asked
  return _MANY if kernels else 1


def most(asked: int | str, layers: int) -> int:
  """Layers that a launch may cross, of those of a model."""
  return layers if asked == 'pass' else min(int(asked), layers)


def give(
  scheduler: protocols.Scheduler, asked: int | str, layers: int
) -> protocols.Scheduler:
  """The scheduler, to cross so many layers a launch where it ever does."""
  if asked == 1 or not hasattr(scheduler, 'hops'):
    return scheduler
  record: Any = scheduler
  made: protocols.Scheduler
  made = dataclasses.replace(record, hops=most(asked, layers))
  return made


def sizes(most: int) -> tuple[int, ...]:
  """What there are programs for: 1, 2, 4, ... and `most`."""
  found = [1]
  while found[-1] * 2 < most:
    found.append(found[-1] * 2)
  return tuple(found) if most <= 1 else (*found, most)


@functools.cache
def cut(hops: int, layer: int, layers: int, most: int) -> int:
  """The largest size that is not more than asked for, and fits.

  No launch comes to a layer twice. A short one may begin at any layer and go
  on with the next token; a long one that comes to the head ends there, since
  each place of the head in it is a program of its own.

  Args:
    hops: asked for.
    layer: the first that is crossed.
    layers: how many there are.
    most: that any launch can cross.
  """
  bound = min(hops, layers)
  return max(
    size
    for size in sizes(most)
    if size
    <= max(1, bound if size <= _ANYWHERE else min(bound, layers - layer))
  )
