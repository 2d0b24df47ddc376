"""The notebooks run from top to bottom, and are committed without outputs.

Each runs in a fresh interpreter, all cells but the one tagged `install` in one
namespace, as a person would press "run all".

Seen to fail: a cell with a wrong name, a saved output, a badge of another
notebook, a cell without its tag, a function of six lines.
"""

import ast
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import pytest
from absl.testing import absltest, parameterized

ROOT = pathlib.Path(
  os.environ.get('BEVY_CHECKOUT') or pathlib.Path(__file__).parents[1]
)
FOLDER = ROOT / 'experiments' / 'colab'
NAMES = ('quickstart', 'read_a_schedule', 'ablate_your_idea')
MOST_CELLS, MOST_LINES, MOST_DEF = 24, 90, 5
SECONDS = 180  # Of one notebook, on 2 cores.
# Cells are run as files, so that an error shows the cell and its line; the
# last line of what they print is `done`.
_RUN = """
import json, sys
with open(sys.argv[1], encoding='utf-8') as file:
  cells = json.load(file)
space = sys.modules['__main__'].__dict__
for number, code in cells:
  exec(compile(code, f'cell {number}', 'exec'), space)
print('done')
"""


def _book(name: str) -> dict[str, Any]:
  return json.loads((FOLDER / f'{name}.ipynb').read_text('utf-8'))


def _code(name: str) -> list[tuple[int, str]]:
  """Number and text of each code cell that runs here."""
  return [
    (number, ''.join(cell['source']))
    for number, cell in enumerate(_book(name)['cells'])
    if cell['cell_type'] == 'code' and not _installs(cell)
  ]


def _installs(cell: dict[str, Any]) -> bool:
  return 'install' in cell['metadata'].get('tags', ())


@pytest.mark.slow
class NotebooksTest(parameterized.TestCase):
  def test_all_are_known(self):
    found = sorted(p.stem for p in FOLDER.iterdir() if p.name[0] != '.')
    self.assertEqual(found, sorted(NAMES))

  @parameterized.parameters(*NAMES)
  def test_runs(self, name):
    with tempfile.TemporaryDirectory() as folder:
      cells = pathlib.Path(folder, 'cells.json')
      cells.write_text(json.dumps(_code(name)), 'utf-8')
      env = dict(os.environ, MPLBACKEND='agg', PYTHONPATH=str(ROOT))
      done = subprocess.run(
        [sys.executable, '-W', 'error', '-c', _RUN, str(cells)],
        cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS,
      )  # fmt: skip
    self.assertEqual(done.returncode, 0, done.stderr[-3000:])
    self.assertEndsWith(done.stdout, 'done\n')

  @parameterized.parameters(*NAMES)
  def test_committed_without_outputs(self, name):
    for number, cell in enumerate(_book(name)['cells']):
      if cell['cell_type'] == 'code':
        self.assertEqual(cell['outputs'], [], f'cell {number}')
        self.assertIsNone(cell['execution_count'], f'cell {number}')

  @parameterized.parameters(*NAMES)
  def test_form(self, name):
    cells = _book(name)['cells']
    top = ''.join(cells[0]['source'])
    self.assertStartsWith(top, '# ')
    self.assertIn('colab-badge.svg', top)
    self.assertIn(f'/experiments/colab/{name}.ipynb)', top)
    self.assertEqual([_installs(cell) for cell in cells].count(True), 1)
    self.assertTrue(_installs(cells[1]), 'the second cell installs')
    self.assertIn('import ', ''.join(cells[2]['source']))
    self.assertLessEqual(len(cells), MOST_CELLS)
    code = [text for _, text in _code(name)]
    lines = [x for text in code for x in text.splitlines() if x.strip()]
    self.assertLessEqual(len(lines), MOST_LINES)
    for text in code:
      for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
          length = (node.end_lineno or 0) - node.lineno
          self.assertLessEqual(length, MOST_DEF, f'{name}: {node.name}')

  def test_badges_lead_to_one_place(self):
    owners = set()
    for name in NAMES:
      cells = [''.join(cell['source']) for cell in _book(name)['cells'][:2]]
      badge = cells[0].partition('/github/')[2].partition('/blob/')[0]
      owners |= {badge, cells[1].rpartition('github.com/')[2].strip('"')}
    self.assertLen(owners, 1)


if __name__ == '__main__':
  absltest.main()
