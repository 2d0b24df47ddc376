"""The rules of the house: arrows, sizes, words, and what the wheel holds.

They read the sources as text and trees, and import nothing of ours. Two
variables are set when the tests run on the wheel: BEVY_EXPECT_WHEEL is the
environment that it was installed into, BEVY_CHECKOUT the repository.
"""

import ast
import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterator

import pytest
from absl.testing import absltest, parameterized

ROOT = pathlib.Path(
  os.environ.get('BEVY_CHECKOUT') or pathlib.Path(__file__).parents[1]
)
WHEEL = os.environ.get('BEVY_EXPECT_WHEEL')

# Folder -> the folders that it may import. Arrows never run upward.
ARROWS = {
  'layers': {'layers'},
  'offload': {'offload'},
  'bevy_jax': {'bevy_jax', 'layers', 'offload'},
  'experiments': {'experiments', 'bevy_jax', 'layers', 'offload'},
}
# Modules that decide with plain values: no device, no clock, no dice.
PURE = (
  'bevy_jax/baselines.py',
  'bevy_jax/engine.py',
  'bevy_jax/request.py',
  'bevy_jax/runahead.py',
  'bevy_jax/scheduler.py',
  'bevy_jax/virtual.py',
  'offload/eviction.py',
  'offload/prefetch.py',
  'offload/slot_table.py',
)
IMPURE = {'datetime', 'jax', 'jaxlib', 'random', 'time'}
# Import name -> name of the project that brings it, where they differ.
PROJECTS = {
  'absl': 'absl-py',
  'cuda': 'cuda-bindings',
  'ml_dtypes': 'jaxlib',  # which always brings it
  'orbax': 'orbax-checkpoint',
}
# What all launchers share; no other file but a launcher sees a flag.
ALL_LAUNCHERS = (
  'experiments/launcher.py',
  'experiments/flag_help.py',
  'experiments/sweep_flags.py',
)
MAX_FILE = 400
MAX_LAUNCHER = 89
MAX_FUNCTION = 60
DATA = (
  'bevy_jax/py.typed',
  'bevy_jax/demo/*',
  'bevy_jax/traces/*',
  'experiments/*.jsonl',
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _sources() -> list[str]:
  paths = [p for folder in ARROWS for p in (ROOT / folder).rglob('*.py')]
  return sorted(p.relative_to(ROOT).as_posix() for p in paths)


def _tests() -> list[str]:
  paths = (ROOT / 'tests').rglob('*.py')
  return sorted(p.relative_to(ROOT).as_posix() for p in paths)


def _text(path: str) -> str:
  return (ROOT / path).read_text(encoding='utf-8')


@functools.cache
def _tree(path: str) -> ast.Module:
  return ast.parse(_text(path), path)


def _folder(path: str) -> str:
  return path.split('/')[0]


def _names(node: ast.stmt) -> list[str]:
  """Every module that an import may load, dotted."""
  if isinstance(node, ast.Import):
    return [alias.name for alias in node.names]
  if isinstance(node, ast.ImportFrom):
    module = '.' * node.level + (node.module or '')
    return [f'{module}.{alias.name}' for alias in node.names]
  return []


def _imports(path: str) -> list[str]:
  """All imports of a file, those inside functions too."""
  nodes = [n for n in ast.walk(_tree(path)) if isinstance(n, ast.stmt)]
  return [name for node in nodes for name in _names(node)]


def _top_imports(path: str) -> list[str]:
  """Imports that run when the file is imported; not `if TYPE_CHECKING`."""
  return [name for node in _tree(path).body for name in _names(node)]


def _target(name: str) -> str | None:
  """The folder of ours that an import reaches, if any."""
  parts = name.split('.')
  if parts[0] != 'bevy_jax':
    return None
  if len(parts) > 1 and parts[1] in ARROWS:
    return parts[1]
  return 'bevy_jax'


def _functions(path: str) -> Iterator[Function]:
  for node in ast.walk(_tree(path)):
    if isinstance(node, Function):
      yield node


def _public(body: list[ast.stmt]) -> Iterator[tuple[Function, bool]]:
  """Public functions and methods, with whether each is a method."""
  for node in body:
    if isinstance(node, Function):
      if not node.name.startswith('_') or node.name == '__init__':
        yield node, False
    elif isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
      for function, _ in _public(node.body):
        yield function, True


def _static(function: Function) -> bool:
  marks = [d.id for d in function.decorator_list if isinstance(d, ast.Name)]
  return 'staticmethod' in marks


def _unhinted(function: Function, method: bool) -> list[str]:
  """Names of arguments without a type, and 'return'."""
  a = function.args
  args = a.posonlyargs + a.args
  if method and not _static(function):
    args = args[1:]
  args = args + a.kwonlyargs + [x for x in (a.vararg, a.kwarg) if x]
  bare = [x.arg for x in args if x.annotation is None]
  if function.returns is None and function.name != '__init__':
    bare.append('return')
  return bare


def _calls(path: str, attribute: str) -> bool:
  """Whether the file calls a function of a module, such as 'launcher.run'."""
  owner, name = attribute.split('.')
  return any(
    isinstance(n, ast.Call)
    and isinstance(n.func, ast.Attribute)
    and n.func.attr == name
    and isinstance(n.func.value, ast.Name)
    and n.func.value.id == owner
    for n in ast.walk(_tree(path))
  )


def _each(paths: list[str]) -> list[tuple[str, str]]:
  return [(re.sub(r'\W', '_', path), path) for path in paths]


def _project() -> dict[str, dict[str, object]]:
  return tomllib.loads(_text('pyproject.toml'))


def _requirement(line: str) -> str:
  return re.split(r'[\[<>=!~; ]', line, maxsplit=1)[0].lower()


@pytest.mark.slow
class SourceTest(parameterized.TestCase):
  """One case a file."""

  @parameterized.named_parameters(*_each(_sources()))
  def test_arrows(self, path):
    allowed = ARROWS[_folder(path)]
    reached = {name: _target(name) for name in _imports(path)}
    wrong = [n for n, t in reached.items() if t and t not in allowed]
    self.assertEmpty(
      wrong, f'{path} may import {sorted(allowed)} alone, not {wrong}.'
    )

  @parameterized.named_parameters(*_each(_sources() + _tests()))
  def test_imports_are_spelled_in_full(self, path):
    bare = {*ARROWS, 'tests'} - {'bevy_jax'}
    wrong = [n for n in _imports(path) if n.split('.')[0] in bare]
    self.assertEmpty(wrong, f'{path}: spell {wrong} with bevy_jax in front.')
    dots = [n for n in _imports(path) if n.startswith('.')]
    self.assertEmpty(dots, f'{path}: no relative imports.')
    second = [
      n for n in ('tests', 'bevy_jax') if f'bevy_jax.{n}.' in _text(path)
    ]
    self.assertEmpty(second, f'{path} spells bevy_jax.{second}.')

  @parameterized.named_parameters(*_each(_sources() + _tests()))
  def test_no_pickle(self, path):
    wrong = [n for n in _imports(path) if 'pickle' in n]
    self.assertEmpty(wrong, f'{path} imports {wrong}: files may be hostile.')

  @parameterized.named_parameters(*_each(_sources()))
  def test_third_parties_are_declared(self, path):
    project = _project()['project']
    needed = {_requirement(line) for line in project['dependencies']}
    extras = project['optional-dependencies'].values()
    known = needed | {_requirement(x) for lines in extras for x in lines}
    for names, declared in (
      (_imports(path), known),
      (_top_imports(path), needed if _folder(path) != 'experiments' else known),
    ):
      roots = {n.split('.')[0] for n in names}
      roots -= {*sys.stdlib_module_names, *ARROWS, 'tests', ''}
      wrong = {r for r in roots if PROJECTS.get(r, r) not in declared}
      self.assertEmpty(
        wrong,
        f'{path} imports {sorted(wrong)}: declare it in pyproject.toml, or '
        'import it inside the function that needs the extra.',
      )

  @parameterized.named_parameters(*_each(_sources()))
  def test_flags_only_in_launchers(self, path):
    flags = [n for n in _imports(path) if n in ('absl.flags', 'absl.app')]
    launcher = _calls(path, 'launcher.run')
    if flags and not launcher and path not in ALL_LAUNCHERS:
      self.fail(f'{path} is no launcher (launcher.run) and imports {flags}.')
    if flags:
      self.assertEqual(_folder(path), 'experiments', f'{path}: {flags}')
    if launcher:
      self.assertNotIn('absl.app', flags, f'{path}: leave it to launcher.run')

  @parameterized.named_parameters(*_each(_sources()))
  def test_sizes(self, path):
    lines = len(_text(path).splitlines())
    limit = MAX_LAUNCHER if _calls(path, 'launcher.run') else MAX_FILE
    self.assertLessEqual(lines, limit, f'{path} is too long: split it.')
    for f in _functions(path):
      length = (f.end_lineno or f.lineno) - f.lineno + 1
      where = f'{path}:{f.lineno} {f.name}'
      self.assertLessEqual(length, MAX_FUNCTION, f'{where} is too long.')

  @parameterized.named_parameters(*_each(_sources()))
  def test_words_and_hints(self, path):
    self.assertIsNotNone(
      ast.get_docstring(_tree(path)), f'{path} has no module docstring.'
    )
    for function, method in _public(_tree(path).body):
      bare = _unhinted(function, method)
      where = f'{path}:{function.lineno} {function.name}'
      self.assertEmpty(bare, f'{where}: no type hints for {bare}.')
    todo = re.search(r'\b(TODO|FIXME|XXX)\b(?!\(#\d+\))', _text(path))
    self.assertIsNone(todo, f'{path}: {todo}: write TODO(#issue) or none.')


class TreeTest(absltest.TestCase):
  """The house as a whole."""

  def test_no_subfolders_with_python(self):
    deep = [path for path in _sources() if path.count('/') > 1]
    self.assertEmpty(deep, f'{deep} would be left out of the wheel.')

  def test_every_folder_is_packed(self):
    settings = _project()['tool']['setuptools']
    names = {'bevy_jax': 'bevy_jax'} | {
      f'bevy_jax.{folder}': folder for folder in ARROWS if folder != 'bevy_jax'
    }
    self.assertEqual(settings['package-dir'], names)
    self.assertCountEqual(settings['packages'], names)

  def test_pure_modules_stay_pure(self):
    for path in PURE:
      if (ROOT / path).exists():
        roots = {n.split('.')[0] for n in _imports(path)}
        self.assertEmpty(roots & IMPURE, f'{path}: plain values decide.')

  def test_every_test_is_collected(self):
    strays = [
      path
      for path in _tests()
      if not path.endswith('_test.py')
      and not path.startswith('tests/golden/')
      and path != 'tests/conftest.py'
    ]
    self.assertEmpty(strays, f'{strays}: name them *_test.py.')

  def test_workspace_names_every_module(self):
    text = _text('WORKSPACE.md')
    modules = [p for p in _sources() if not p.endswith('__init__.py')]
    missing = [path for path in modules if path not in text]
    self.assertEmpty(missing, f'WORKSPACE.md says nothing of {missing}.')

  def test_workspace_names_no_module_that_is_gone(self):
    spelled = re.findall(
      rf'\b(?:{"|".join(ARROWS)})/\w+\.py\b', _text('WORKSPACE.md')
    )
    # The one example of how a path and an import name belong together.
    gone = set(spelled) - set(_sources()) - {'layers/x.py'}
    self.assertEmpty(gone, f'WORKSPACE.md names {sorted(gone)}.')

  def test_changelog_is_open(self):
    text = _text('CHANGELOG.md')
    self.assertRegex(text, r'(?m)^## \[Unreleased\]$')
    self.assertIn('\n### ', text)


class RulesSeeTest(parameterized.TestCase):
  """The helpers above, on sources that break the rules."""

  @parameterized.parameters(
    ('import bevy_jax.layers.rope', 'layers'),
    ('from bevy_jax.layers import rope', 'layers'),
    ('from bevy_jax import offload', 'offload'),
    ('from bevy_jax import engine', 'bevy_jax'),
    ('def f():\n  from bevy_jax.experiments import run', 'experiments'),
  )
  def test_targets(self, code, folder):
    nodes = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.stmt)]
    names = [name for node in nodes for name in _names(node)]
    self.assertEqual([_target(name) for name in names], [folder])

  @parameterized.parameters(
    ('from . import x', ['..x']),
    ('from layers import x', ['layers.x']),
    ('import layers.x as y', ['layers.x']),
  )
  def test_names(self, code, names):
    self.assertEqual(_names(ast.parse(code).body[0]), names)

  @parameterized.parameters(
    ('def f(a, b: int) -> int: ...', [['a']]),
    ('def f(*a, **b): ...', [['a', 'b', 'return']]),
    ('class A:\n  def f(self, a) -> int: ...', [['a']]),
    ('class A:\n  @staticmethod\n  def f(a) -> int: ...', [['a']]),
    ('class A:\n  def __init__(self, a): ...', [['a']]),
    ('def _f(a): ...', []),
  )
  def test_hints(self, code, bare):
    found = _public(ast.parse(code).body)
    self.assertEqual([_unhinted(f, method) for f, method in found], bare)


@pytest.mark.skipif(not WHEEL, reason='runs on the wheel: make test')
class WheelTest(absltest.TestCase):
  """What was installed, against the tree that it was built from."""

  def test_imports_come_from_the_wheel(self):
    for path in _sources():
      name = 'bevy_jax.' + path.removesuffix('.py').replace('/', '.')
      name = name.replace('bevy_jax.bevy_jax', 'bevy_jax')
      spec = importlib.util.find_spec(name.removesuffix('.__init__'))
      self.assertIsNotNone(spec, f'{name} is not in the wheel.')
      self.assertStartsWith(spec.origin, WHEEL)

  def test_contents_equal_the_tree(self):
    data = [p for pattern in DATA for p in ROOT.glob(pattern) if p.is_file()]
    tree = {p.relative_to(ROOT).as_posix() for p in data} | set(_sources())
    wanted = {p if p.startswith('bevy_jax/') else f'bevy_jax/{p}' for p in tree}
    files = importlib.metadata.files('bevy-jax') or []
    names = {f.as_posix() for f in files if f.suffix != '.pyc'}
    packed = {n for n in names if '.dist-info/' not in n}
    self.assertEqual(packed, wanted)
    self.assertTrue(any(n.endswith('licenses/LICENSE') for n in names), names)

  def test_nothing_leaks(self):
    for name in ('layers', 'offload', 'experiments'):
      self.assertIsNone(importlib.util.find_spec(name), name)

  def test_version(self):
    self.assertEqual(
      importlib.metadata.version('bevy-jax'),
      _project()['project']['version'],
    )


if __name__ == '__main__':
  absltest.main()
