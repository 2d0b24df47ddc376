"""`field=value` on frozen records: unknown fields and wrong types fail."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, TypeVar

from bevy_jax import config as config_lib

Record = TypeVar('Record')


def apply(record: Record, assignments: Iterable[str]) -> Record:
  """The record with `field=value` or `engine.field=value` applied.

  Values are JSON where they can be read as such and text otherwise.
  ValueError names the nearest field or the type that is expected.
  """
  for assignment in assignments:
    name, equals, value = assignment.partition('=')
    if not equals:
      raise ValueError(
        f'--set={assignment} has no "="; write --set=field=value.'
      )
    record = _set(record, name.strip().split('.'), value.strip())
  return record


def replace(record: Record, changes: dict[str, Any]) -> Record:
  """`dataclasses.replace` that leaves out the changes that are None."""
  given = {k: v for k, v in changes.items() if v is not None}
  out: Record = dataclasses.replace(record, **given)  # type: ignore[type-var]
  return out


def parse(text: str | None) -> Any:
  """JSON where it is JSON, else the text itself, or None."""
  try:
    return json.loads(text or '')
  except ValueError:
    return text


def _set(record: Record, path: list[str], value: str) -> Record:
  known = [f.name for f in dataclasses.fields(record)]  # type: ignore[arg-type]
  config_lib.choose('field', path[0], known)
  now = getattr(record, path[0])
  if len(path) > 1:
    if not dataclasses.is_dataclass(now):
      raise ValueError(f'field {path[0]!r} has no fields of its own.')
    new = _set(now, path[1:], value)
  else:
    new = _typed(path[0], now, parse(value))
  return replace(record, {path[0]: new})


def _typed(name: str, now: Any, new: Any) -> Any:
  if isinstance(now, tuple) and isinstance(new, str):
    return tuple(new.split(','))
  if name == 'hops':
    return new  # A number or a word, which the engine's config checks.
  numbers = (int, float)
  both = isinstance(now, numbers) and isinstance(new, numbers)
  # bool is an int in Python, but not in an experiment.
  if both and isinstance(now, bool) == isinstance(new, bool):
    if isinstance(now, float) or name == 'cache' or isinstance(new, int):
      return new
  elif isinstance(new, type(now)) and not isinstance(now, numbers):
    return new
  raise ValueError(
    f'{name} is {now!r} and cannot become {new!r}; expected a value of type '
    f'{type(now).__name__}.'
  )
