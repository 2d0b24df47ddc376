"""The engine's own modules as C, where somebody has compiled them.

Beside a GPU it is the engine's Python that holds a run up. The modules below
are typed throughout and know neither JAX nor a clock, so mypyc compiles them as
they are (`python -m bevy_jax.experiments.compile_engine`). What it makes lies
in a folder that is named after their text and this Python, and is imported in
their place by whoever has the same text: who changes a module has Python again
until it is compiled anew. Decisions are the same, event for event.

`BEVY_COMPILED=0` turns it off; any other value is the folder of all of them.
"""

import hashlib
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
from collections.abc import Sequence
from types import ModuleType

# Policies and costs: others may inherit from their classes.
OPEN = (
  'baselines',
  'costs',
  'lagging',
  'runahead',
  'offload.eviction',
  'offload.prefetch',
)
MODULES = (
  *OPEN,
  'answers',
  'engine',
  'events',
  'failures',
  'flights',
  'guesses',
  'holding',
  'hop_table',
  'loads',
  'pace',
  'prefill',
  'protocols',
  'request',
  'virtual',
  'offload.estimate',
  'offload.patterns',
  'offload.slot_table',
  'offload.uses',
)
_PACKAGE = 'bevy_jax'
_NAMES = frozenset(f'{_PACKAGE}.{name}' for name in MODULES)
_VARIABLE = 'BEVY_COMPILED'
_SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


def home(paths: Sequence[str]) -> pathlib.Path | None:
  """Where compiled modules lie, a folder for each text; None: not wanted.

  Args:
    paths: where the package's modules lie: a checkout's are two folders.
  """
  asked = os.environ.get(_VARIABLE, '')
  if asked == '0':
    return None
  if asked:
    return pathlib.Path(asked).absolute()
  if len(paths) > 1:
    return pathlib.Path(paths[1]) / 'build' / 'compiled'
  cache = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(cache) / _PACKAGE / 'compiled'


def source(paths: Sequence[str], name: str) -> pathlib.Path:
  """The text of a module, by its name below the package."""
  place = pathlib.PurePath(*name.split('.')).with_suffix('.py')
  found = (pathlib.Path(path) / place for path in paths)
  return next(file for file in found if file.is_file())


def tag(paths: Sequence[str]) -> str:
  """Of this Python and of the text of all of them, and of this one."""
  text = hashlib.sha256()
  for name in ('compiled', *MODULES):
    text.update(source(paths, name).read_bytes())
  return f'{sys.implementation.cache_tag}-{text.hexdigest()[:16]}'


def use(paths: Sequence[str]) -> None:
  """Compiled modules are imported from now on, where there are any."""
  folder = home(paths)
  if folder is None or not folder.is_dir():
    return
  folder /= tag(paths)
  if folder.is_dir() and importlib.util.find_spec('mypy_extensions'):
    sys.meta_path.insert(0, Finder(folder))


def used() -> bool:
  """Whether this process runs compiled modules."""
  return any(isinstance(finder, Finder) for finder in sys.meta_path)


class Finder:
  """Finds the modules of one folder, and what they share, for `sys.meta_path`.

  Its base in `importlib.abc` would cost every import of ours 10 ms.
  """

  def __init__(self, folder: pathlib.Path):
    self._folder = folder

  def find_spec(
    self,
    fullname: str,
    path: Sequence[str] | None,
    target: ModuleType | None = None,
  ) -> importlib.machinery.ModuleSpec | None:
    """The module of such a name, None where it is none of them."""
    if fullname not in _NAMES and not fullname.endswith('__mypyc'):
      return None
    place = pathlib.PurePath(*fullname.split('.'))
    file = self._folder / place.with_name(place.name + _SUFFIX)
    if not file.is_file():
      return None
    return importlib.util.spec_from_file_location(fullname, file)
