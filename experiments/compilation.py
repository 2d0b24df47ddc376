"""Compiles the engine's modules with mypyc; see `bevy_jax.compiled`."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import bevy_jax
from bevy_jax import compiled

# Everything that the modules import of ours; mypy follows it.
_PACKAGES = ('', 'layers', 'offload')
_SETUP = """
import setuptools
from mypyc.build import mypycify

setuptools.setup(
  name='compiled',
  packages=[],
  ext_modules=mypycify(['--config-file=mypy.ini', *{files!r}], opt_level='2'),
)
"""
_MYPY = """
[mypy]
follow_imports = silent
ignore_missing_imports = true
[mypy-jax.*]
follow_imports = skip
"""
# What others may inherit from says so; nothing else differs from the text.
_OPEN = '@mypy_extensions.mypyc_attr(allow_interpreted_subclasses=True)\n'
_CLASS = re.compile(r'^@dataclasses\.dataclass\(.*\)\n(?=class )', re.MULTILINE)
_IMPORTS = (
  'import dataclasses\n',
  'import dataclasses\nimport mypy_extensions\n',
)
_SAID = 2000  # Characters of what a compiler says that an error repeats.


def build() -> pathlib.Path:
  """Compiles them for this Python, and gives the folder.

  Raises:
    ValueError: BEVY_COMPILED=0, mypy is not installed, or it cannot be
      compiled; with what the compiler says.
  """
  paths = list(bevy_jax.__path__)
  home = compiled.home(paths)
  if home is None:
    raise ValueError(
      'BEVY_COMPILED=0 says that compiled modules are not wanted; unset it, or '
      'name the folder that they are to lie in.'
    )
  if importlib.util.find_spec('mypyc') is None:
    raise ValueError(
      'The compiler is a part of mypy, which is not installed: pip install '
      "'bevy-jax[compile]'. It also takes a C compiler and Python's headers."
    )
  home.mkdir(parents=True, exist_ok=True)
  tag = compiled.tag(paths)
  with tempfile.TemporaryDirectory(dir=home, prefix='making-') as made:
    folder = pathlib.Path(made)
    _stage(paths, folder / 'text')
    _compile(folder / 'text', folder / 'out')
    found = home / tag
    python = f'{sys.implementation.cache_tag}-*'
    for old in home.glob(python):
      shutil.rmtree(old)
    os.replace(folder / 'out', found)
  return found


def _stage(paths: Sequence[str], to: pathlib.Path) -> None:
  """The text as a wheel has it, for checkouts too."""
  for package in _PACKAGES:
    here = compiled.source(paths, f'{package}.__init__'.lstrip('.')).parent
    there = to / 'bevy_jax' / package
    there.mkdir(parents=True)
    for file in here.glob('*.py'):
      shutil.copyfile(file, there / file.name)
    # That of the package imports what nothing here needs.
    (there / '__init__.py').write_text('', encoding='utf-8')
  for name in compiled.OPEN:
    file = compiled.source([str(to / 'bevy_jax')], name)
    text = file.read_text(encoding='utf-8')
    text = _CLASS.sub(lambda found: _OPEN + found.group(), text)
    text = text.replace(*_IMPORTS, 1)
    file.write_text(text, encoding='utf-8')


def _compile(text: pathlib.Path, out: pathlib.Path) -> None:
  places = [name.replace('.', '/') for name in compiled.MODULES]
  files = [f'bevy_jax/{place}.py' for place in places]
  (text / 'setup.py').write_text(_SETUP.format(files=files), encoding='utf-8')
  (text / 'mypy.ini').write_text(_MYPY, encoding='utf-8')
  command = [sys.executable, 'setup.py', '-q', 'build_ext', '-b', str(out)]
  # Types come from what is staged.
  kept = {k: v for k, v in os.environ.items() if k != 'MYPYPATH'}
  done = subprocess.run(
    command, cwd=text, env=kept, capture_output=True, text=True, check=False
  )
  if done.returncode:
    said = (done.stdout + done.stderr).strip()[-_SAID:]
    version = f'{sys.version_info.major}.{sys.version_info.minor}'
    raise ValueError(
      "The engine's modules could not be compiled; a C compiler and the "
      f'headers of Python {version} are needed. The compiler said:\n{said}'
    )
