"""Policies of one's own as text: module.Class(field=value), both ways."""

import ast
import dataclasses
import difflib
import importlib
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

_PATH = re.compile(r'[A-Za-z_]\w*(\.[A-Za-z_]\w*)+')


def is_path(text: str) -> bool:
  """Whether it names a class by its module; names of ours have no dots."""
  return '.' in re.split('[:(]', text, maxsplit=1)[0]


def make(what: str, text: str) -> object:
  """What `module.Class` or `module.Class(field=value, ...)` stands for.

  Args:
    what: 'scheduler' or the like, for the words of an error.
    text: values of fields are Python literals.

  Raises:
    ValueError: no such module, class or field; names the nearest.
  """
  dotted, values = _parse(what, text)
  module, _, name = dotted.rpartition('.')
  try:
    found = importlib.import_module(module)
  except Exception as error:
    here = [path.stem for path in pathlib.Path().glob('*.py')]
    raise ValueError(
      f'{what} {text!r}: importing {module!r} failed with '
      f'{type(error).__name__}: {error}. Its file must lie in the folder that '
      'the command runs in, or in one that PYTHONPATH names'
      f'{_near(module, here)}'
    ) from error
  made = getattr(found, name, None)
  if not isinstance(made, type) or not dataclasses.is_dataclass(made):
    classes = [
      n
      for n, v in vars(found).items()
      if dataclasses.is_dataclass(v) and v.__module__ == module
    ]
    has = 'has no' if made is None else 'has, but not as a dataclass,'
    raise ValueError(
      f'{what} {text!r}: module {module!r} {has} {name!r}{_near(name, classes)}'
    )
  known = [f.name for f in dataclasses.fields(made) if f.init]
  for field in values:
    if field not in known:
      raise ValueError(
        f'{what} {text!r}: {name} has no field {field!r}{_near(field, known)}'
      )
  try:
    return made(**values)
  except TypeError as error:
    raise ValueError(
      f'{what} {text!r}: {error}; give it as {name}(field=value).'
    ) from error


def spell(policy: object) -> str:
  """A policy as `make` reads it; text stays as it is.

  Fields that have their default are left out. A field that is no literal, an
  array for instance, can be shown but not read again.
  """
  if isinstance(policy, str):
    return policy
  kind, record = type(policy), policy
  assert dataclasses.is_dataclass(record), f'{policy!r} is no policy'
  given = [
    f'{field.name}={getattr(record, field.name)!r}'
    for field in dataclasses.fields(record)
    if getattr(record, field.name) is not field.default
  ]
  brackets = f'({", ".join(given)})' if given else ''
  return f'{kind.__module__}.{kind.__qualname__}{brackets}'


def spell_all(
  scheduler: object, eviction: object, prefetch: object
) -> tuple[str, str, str]:
  """`spell` of the three policies of a run."""
  return spell(scheduler), spell(eviction), spell(prefetch)


def split(text: str, most: int = 3) -> list[str]:
  """Parts between colons, but not inside brackets; the last keeps its own."""
  parts, depth = [''], 0
  for letter in text:
    depth += (letter in '([{') - (letter in ')]}')
    if letter == ':' and not depth and len(parts) < most:
      parts.append('')
    else:
      parts[-1] += letter
  return parts


def whole(items: Iterable[str]) -> tuple[str, ...]:
  """A list that was cut at commas, whole again inside brackets."""
  found: list[str] = []
  for item in items:
    if found and found[-1].count('(') > found[-1].count(')'):
      found[-1] += f',{item}'
    else:
      found.append(item)
  return tuple(found)


def _parse(what: str, text: str) -> tuple[str, dict[str, Any]]:
  form = f'{what} is {text!r}; write module.Class or module.Class(field=value)'
  path, bracket, _ = text.partition('(')
  if not _PATH.fullmatch(path):
    raise ValueError(f'{form}.')
  if not bracket:
    return path, {}
  try:
    call = ast.parse(text, mode='eval').body
    if not isinstance(call, ast.Call) or call.args:
      raise ValueError('fields are given by name')
    values = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
  except (SyntaxError, ValueError) as error:
    raise ValueError(f'{form}, values as Python literals ({error}).') from error
  return path, values


def _near(name: str, known: Sequence[str]) -> str:
  near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
  hint = f'; did you mean {near[0]!r}?' if near else '.'
  return f'{hint} Known: {list(known)}.'
