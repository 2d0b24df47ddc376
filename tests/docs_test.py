"""Every block of code of README.md and docs/ runs as it is printed.

Blocks of one page run in their order in one namespace and one empty folder.
A comment before a block may say how it is run here:

  <!-- not run: REASON -->       it cannot; how many may not is capped
  <!-- cheap: OLD => NEW -->     with NEW for OLD, to be quick
  <!-- file: NAME.py -->         it is saved too, and imported from there

Seen to fail: a wrong name in a Python block and a wrong flag in a shell one,
`cheap` with an OLD that the block lacks, a fence of no language, an API page
whose name is gone (make docs).
"""

import contextlib
import importlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from absl.testing import absltest, parameterized

ROOT = pathlib.Path(
  os.environ.get('BEVY_CHECKOUT') or pathlib.Path(__file__).parents[1]
)
PAGES = ('README.md', *sorted(f'docs/{p.name}' for p in ROOT.glob('docs/*.md')))
SHELL = ('sh', 'bash')
SHOWN = ('text', 'json')  # Not code of ours: nothing to run.
MOST_LEFT_OUT = 4
_MARK = re.compile(r'<!-- (not run|cheap|file): (.*) -->')
_FENCE = re.compile(r'(`{3,})(.*)')


class Block(NamedTuple):
  """One block of code.

  Attributes:
    page: where it stands.
    line: of its first line.
    language: as the fence says.
    code: what runs.
    reason: why it does not run; empty where it does.
    file: what it is saved as; empty for no file.
  """

  page: str
  line: int
  language: str
  code: str
  reason: str = ''
  file: str = ''


def blocks(page: str, text: str) -> Iterator[Block]:
  """The blocks of a page, ready to run; ValueError for a bad mark."""
  marks: list[tuple[str, str]] = []
  lines = iter(enumerate(text.splitlines(), 1))
  for number, line in lines:
    if mark := _MARK.fullmatch(line.strip()):
      marks.append((mark[1], mark[2]))
    elif fence := _FENCE.fullmatch(line):
      inside = []
      for _, body in lines:
        if body == fence[1]:
          break
        inside.append(body)
      if not fence[2].startswith('{'):  # That is a directive.
        code = '\n'.join(inside) + '\n'
        yield _marked(Block(page, number + 1, fence[2], code), marks)
      marks = []
    elif line.strip() and marks:
      raise ValueError(f'{page}, line {number}: marks stand before no block.')


def _marked(block: Block, marks: list[tuple[str, str]]) -> Block:
  for kind, value in marks:
    if kind == 'cheap':
      old, _, new = value.partition(' => ')
      if old not in block.code:
        where = f'{block.page}, line {block.line}'
        raise ValueError(f'{where}: the block has no {old!r} to make cheap.')
      block = block._replace(code=block.code.replace(old, new))
    elif kind == 'file':
      block = block._replace(file=value)
    else:
      block = block._replace(reason=value)
  return block


def _read(page: str) -> list[Block]:
  return list(blocks(page, (ROOT / page).read_text('utf-8')))


def _run_shell(block: Block, folder: str) -> None:
  env = dict(os.environ)
  bin_ = pathlib.Path(sys.executable).parent
  env['PATH'] = f'{bin_}{os.pathsep}{env["PATH"]}'
  if not os.environ.get('BEVY_EXPECT_WHEEL'):
    env['PYTHONPATH'] = str(ROOT)
  done = subprocess.run(
    ['bash', '-euo', 'pipefail', '-c', block.code],
    cwd=folder, env=env, capture_output=True, text=True,
  )  # fmt: skip
  if done.returncode:
    raise AssertionError(
      f'{block.page}, line {block.line}: status {done.returncode}\n'
      f'{block.code}{done.stdout[-2000:]}{done.stderr[-2000:]}'
    )


def _run_python(block: Block, folder: str, page: types.ModuleType) -> None:
  if block.file:
    pathlib.Path(folder, block.file).write_text(block.code, 'utf-8')
    importlib.invalidate_caches()
    found = importlib.import_module(block.file.removesuffix('.py'))
    vars(page).update({k: v for k, v in vars(found).items() if k[0] != '_'})
    return
  # Errors show the page and its line.
  code = '\n' * (block.line - 1) + block.code
  exec(compile(code, block.page, 'exec'), vars(page))


def run(found: list[Block], folder: str) -> None:
  """Runs the blocks of a page that can run, in a folder."""
  page = types.ModuleType('the_page')
  sys.modules['the_page'] = page  # Where its dataclasses look for themselves.
  sys.path.insert(0, folder)
  try:
    with contextlib.chdir(folder):
      for block in found:
        if block.reason or block.language in SHOWN:
          continue
        if block.language in SHELL:
          _run_shell(block, folder)
        else:
          _run_python(block, folder, page)
  finally:
    sys.path.remove(folder)
    sys.modules.pop('the_page')
    for block in found:
      sys.modules.pop(block.file.removesuffix('.py'), None)


@pytest.mark.slow
class DocsTest(parameterized.TestCase):
  @parameterized.parameters(*PAGES)
  def test_page(self, page):
    with tempfile.TemporaryDirectory() as folder:
      run(_read(page), folder)

  def test_few_are_left_out(self):
    every = [block for page in PAGES for block in _read(page)]
    left = [f'{b.page}:{b.line}: {b.reason}' for b in every if b.reason]
    print(f'{len(every)} blocks, not run:', *left, sep='\n  ')
    self.assertLessEqual(len(left), MOST_LEFT_OUT, left)

  def test_every_block_says_what_it_is(self):
    known = ('python', *SHELL, *SHOWN)
    for page in PAGES:
      for block in _read(page):
        self.assertIn(block.language, known, f'{page}, line {block.line}')


class ReadTest(absltest.TestCase):
  """The helpers above, on pages that break the rules."""

  def test_marks(self):
    page = (
      'a\n<!-- cheap: 9 => 1 -->\n<!-- file: m.py -->\n```python\nx = 9\n```\n'
      'b\n```{toctree}\nc\n```\n<!-- not run: why -->\n```sh\nrm\n```\n'
    )
    one, two = blocks('p', page)
    self.assertEqual(one, Block('p', 5, 'python', 'x = 1\n', '', 'm.py'))
    self.assertEqual(two, Block('p', 13, 'sh', 'rm\n', 'why'))

  def test_bad_marks(self):
    with self.assertRaisesRegex(ValueError, "line 3: .* no '7'"):
      list(blocks('p', '<!-- cheap: 7 => 1 -->\n```python\nx = 9\n```\n'))
    with self.assertRaisesRegex(ValueError, 'line 2: marks stand'):
      list(blocks('p', '<!-- not run: no -->\nwords\n```sh\nls\n```\n'))

  def test_what_is_wrong_fails(self):
    with tempfile.TemporaryDirectory() as folder:
      with self.assertRaisesRegex(AssertionError, 'line 4: status 3'):
        run([Block('p', 4, 'sh', 'exit 3\n')], folder)
      with self.assertRaises(NameError):
        run([Block('p', 4, 'python', 'x = nothing\n')], folder)


if __name__ == '__main__':
  absltest.main()
