"""Results as one HTML file that needs nothing beside itself."""

import base64
import html
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from bevy_jax.experiments import study

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; color: #222;
  max-width: 1240px; padding: 0 1em; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5em; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 12px; }
th, td { border: 1px solid #ddd; padding: 2px 6px; text-align: right; }
th { background: #f4f4f4; position: sticky; top: 0; }
.wide { overflow-x: auto; max-height: 480px; overflow-y: auto; }
.about, .facts { color: #555; } code { font-size: 13px; }
"""


def make(
  title: str,
  facts: Mapping[str, Any],
  parts: Sequence[tuple[study.Study, Sequence[study.Row], list[study.Shown]]],
  folder: pathlib.Path,
) -> str:
  """The report of experiments that have been written to their folders.

  Args:
    title: its heading.
    facts: what ran where, shown beneath the heading.
    parts: each experiment, its rows and what it showed.
    folder: that holds a folder an experiment with the figures' SVG files.

  Returns:
    The text; figures and style are in it, and it links nowhere.
  """
  body = [f'<h1>{html.escape(title)}</h1>', _facts(facts)]
  for made, rows, shown in parts:
    body.append(f'<h2 id="{made.name}">{html.escape(made.title)}</h2>')
    body.append(f'<p class="about">{html.escape(made.about.strip())}</p>')
    for each in shown:
      path = folder / made.name / f'{each.name}.svg'
      body.append(_picture(path, each.name))
      body.append(_sentences(each.said))
    body.append(_table(made.columns, rows))
  whole = '\n'.join(body)
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    f'<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n'
    f'<body>\n{whole}\n</body></html>\n'
  )


def _facts(facts: Mapping[str, Any]) -> str:
  lines = [
    f'<li>{html.escape(str(name))}: <code>{html.escape(str(value))}</code></li>'
    for name, value in facts.items()
  ]
  return f'<ul class="facts">{"".join(lines)}</ul>'


def _picture(path: pathlib.Path, name: str) -> str:
  """As data: two SVGs in one page would share the names of their parts."""
  data = base64.b64encode(path.read_bytes()).decode('ascii')
  source = f'data:image/svg+xml;base64,{data}'
  return f'<p><img alt="{html.escape(name)}" src="{source}"></p>'


def _sentences(said: Sequence[str]) -> str:
  lines = ''.join(f'<li>{html.escape(text)}</li>' for text in said)
  return f'<ul>{lines}</ul>'


def _table(columns: Sequence[str], rows: Sequence[study.Row]) -> str:
  head = ''.join(f'<th>{html.escape(name)}</th>' for name in columns)
  lines = [
    '<tr>'
    + ''.join(f'<td>{html.escape(_cell(row.get(n, "")))}</td>' for n in columns)
    + '</tr>'
    for row in rows
  ]
  return (
    f'<details><summary>All {len(rows)} rows</summary><div class="wide">'
    f'<table><tr>{head}</tr>{"".join(lines)}</table></div></details>'
  )


def _cell(value: Any) -> str:
  return f'{value:.4g}' if isinstance(value, float) else str(value)
