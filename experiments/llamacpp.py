"""This engine and a llama.cpp of the user's own, turn by turn."""

import dataclasses
import json
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bevy_jax import loading
from bevy_jax import text as text_lib
from bevy_jax.experiments import configs, gguf, pairs, run

_BLOCK = 256  # llama.cpp rounds the context of a sequence up to this.
_NOTES = (
  'The budget is of routed experts; all else, keys and values too, lies on '
  'the device besides, in both.',
  'llama-batched-bench decodes made-up tokens, the same ones in every row in '
  'some versions, and this engine decodes texts: rows that agree use fewer '
  'experts.',
  'llama.cpp is timed from its first token on, this engine once all rows '
  'decode and its cache is warm.',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
  """A comparison.

  Attributes:
    binary: the user's llama-batched-bench.
    file: GGUF of the same model.
    model: 'demo' or a directory, for this engine.
    cache_gib: GiB of the device that routed experts may take, of either.
    requests: rows that decode at once.
    prompt_tokens: of each row.
    new_tokens: of each row.
    pairs: turns of both.
    arguments: more for llama-batched-bench.
    set: `field=value` of the engine's run.
    limit_s: seconds that a turn may take.
  """

  binary: str
  file: str
  model: str
  cache_gib: float
  requests: int = 8
  prompt_tokens: int = 128
  new_tokens: int = 64
  pairs: int = 5
  arguments: tuple[str, ...] = ()
  set: tuple[str, ...] = ()
  limit_s: float = 3600.0

  def __post_init__(self) -> None:
    missing = [
      flag
      for flag, value in (
        ('--llama_batched_bench=PATH', self.binary),
        ('--gguf=FILE', self.file),
        ('--cache_gib=N', self.cache_gib),
      )
      if not value
    ]
    if missing:
      raise ValueError(
        'give --llama_batched_bench=PATH, the program llama-batched-bench of '
        'a llama.cpp that you have built for this machine (nothing is built '
        'or downloaded here), --gguf=FILE of the same model as --model=DIR, '
        'and --cache_gib=N, the GiB of the device that experts may take; '
        f'missing: {", ".join(missing)}.'
      )
    if not pathlib.Path(self.binary).is_file():
      raise ValueError(f'--llama_batched_bench: {self.binary} is no file.')
    for name in ('requests', 'prompt_tokens', 'new_tokens', 'pairs'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} is {getattr(self, name)}; 1 is the least.')


def check(asked: Asked) -> gguf.Model:
  """The GGUF's model; ValueError where it is another one than ours."""
  found = gguf.read(pathlib.Path(asked.file))
  ours = loading.read_config(loading.locate(asked.model))
  other = {
    name: (value, getattr(ours, name))
    for name, value in found.shape.items()
    if value != getattr(ours, name)
  }
  if other:
    said = '; '.join(f'{n} {a!r}, not {b!r}' for n, (a, b) in other.items())
    raise ValueError(
      f'{asked.file} ({found.name}) is another model than {asked.model}: '
      f'{said}. Give the GGUF that was made from the same checkpoint.'
    )
  return found


def on_host(expert_bytes: Mapping[int, int], budget: float) -> int:
  """The least K so that experts behind the first K layers fit the budget."""
  left, first = sum(expert_bytes.values()), 0
  for layer in sorted(expert_bytes):
    if left <= budget:
      break
    left -= expert_bytes[layer]
    first = layer + 1
  return first


def command(asked: Asked, layers: int, gpu: bool) -> list[str]:
  """The call of llama-batched-bench; `layers` have their experts on the host.

  Without a GPU all of it lies in host memory, whatever the budget.
  """
  row = -(-(asked.prompt_tokens + asked.new_tokens) // _BLOCK) * _BLOCK
  place = ['-ngl', '999', '--n-cpu-moe', str(layers)] if gpu else ['-ngl', '0']
  return [
    asked.binary, '-m', asked.file, '-c', str(row * asked.requests),
    '-npp', str(asked.prompt_tokens), '-ntg', str(asked.new_tokens),
    '-npl', str(asked.requests), *place, '--output-format', 'jsonl',
    *asked.arguments,
  ]  # fmt: skip


def speed(text: str, asked: Asked) -> float:
  """Decoded tokens/s of all rows, from what llama-batched-bench prints.

  It prints a JSON object a line, or with older arguments a table:
  `|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s | ...`.

  Raises:
    ValueError: it has no row of what was asked for.
  """
  wanted = (asked.prompt_tokens, asked.new_tokens, asked.requests)
  seen = []
  for pp, tg, rows, found in _rows(text):
    seen.append((pp, tg, rows))
    if seen[-1] == wanted and found > 0:
      return found
  raise ValueError(
    f'{asked.binary} told no speed for {wanted} prompt tokens, new tokens and '
    f'rows; it told of {seen or "nothing"}. Its last words: {_last(text)}'
  )


def _rows(text: str) -> Iterator[tuple[int, int, int, float]]:
  for line in text.splitlines():
    line = line.strip()
    if line.startswith('{'):
      try:
        told = json.loads(line)
        yield (
          int(told['pp']), int(told['tg']), int(told['pl']),
          float(told['speed_tg']),
        )  # fmt: skip
      except (ValueError, KeyError, TypeError):
        continue
    elif line.startswith('|'):
      cells = [cell.strip() for cell in line.strip('|').split('|')]
      if len(cells) == 10 and cells[0].isdigit():
        yield int(cells[0]), int(cells[1]), int(cells[2]), float(cells[7])


def measure(asked: Asked) -> Iterator[dict[str, Any]]:
  """Pairs of one turn each, ours first, as they come.

  Each turn is a process of its own, so that neither leaves memory taken.

  Raises:
    ValueError: another model, or a turn that failed, with its own words.
  """
  found = check(asked)
  budget = asked.cache_gib * 2**30
  layers = on_host(found.expert_bytes, budget)
  with tempfile.TemporaryDirectory() as folder:
    prompts = pathlib.Path(folder) / 'prompts.jsonl'
    texts = _prompts(asked)
    lines = (json.dumps({'prompt': text}) + '\n' for text in texts)
    prompts.write_text(''.join(lines), encoding='utf-8')
    for number in range(1, asked.pairs + 1):
      ours = json.loads(_run(_engine(asked, str(prompts)), asked.limit_s))
      gpu = not ours['device'].startswith('cpu')
      call = command(asked, layers, gpu)
      theirs = speed(_run(call, asked.limit_s), asked)
      yield {
        'pair': number,
        'ours_tokens_per_s': ours['tokens_per_s'],
        'llama_tokens_per_s': theirs,
        'ratio': ours['tokens_per_s'] / theirs,
        'device': ours['device'],
        'experts': ours['config']['experts'],
        'cache_bytes': ours['cache_bytes'],
        'hit_rate': ours['hit_rate'],
        'layers_on_host': layers if gpu else None,
        'llama_command': ' '.join(call),
      }


def report(asked: Asked, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """The pairs, their median ratio and its lower bound, what to know."""
  ratios = [row['ratio'] for row in rows]
  found = gguf.read(pathlib.Path(asked.file))
  budget = asked.cache_gib * 2**30
  notes = list(_NOTES)
  if rows[0]['layers_on_host'] is None:
    notes.append(
      'there is no accelerator: all of llama.cpp lies in host memory, where '
      'the budget does not bind it.'
    )
  held = sum(
    nbytes
    for layer, nbytes in found.expert_bytes.items()
    if layer >= (rows[0]['layers_on_host'] or 0)
  )
  return {
    'command': run.command(),
    'versions': run.versions(),
    'device': rows[0]['device'],
    'model': found.name,
    'budget_bytes': int(budget),
    'ours_expert_bytes_on_device': rows[0]['cache_bytes'],
    'llama_expert_bytes_on_device': held,
    'llama_expert_bytes': sum(found.expert_bytes.values()),
    'ratio': statistics.median(ratios),
    'ratio_lower_95': pairs.lower(ratios),
    'notes': notes,
    'rows': list(rows),
  }


def _engine(asked: Asked, prompts: str) -> list[str]:
  """The call of this engine: a launcher of its own, the report on stdout."""
  return [
    sys.executable, '-m', 'bevy_jax.experiments.decode', '--json', '--quiet',
    f'--model={asked.model}', f'--requests={asked.requests}',
    f'--count={asked.requests}', f'--new_tokens={asked.new_tokens}',
    f'--prompts={prompts}', '--compare=runahead', '--set=ignore_eos=true',
    f'--set=cache_gib={asked.cache_gib}',
    *(f'--set={change}' for change in asked.set),
  ]  # fmt: skip


def _prompts(asked: Asked) -> list[str]:
  """Texts of about as many tokens as llama.cpp gets, another for each row."""
  tokenizer = text_lib.Text(loading.locate(asked.model))
  ids = [
    token for t in configs.plain().texts() for token in tokenizer.encode(t)
  ]
  whole = asked.prompt_tokens
  starts = (n * len(ids) // asked.requests for n in range(asked.requests))
  return [
    tokenizer.decode([ids[(start + n) % len(ids)] for n in range(whole)])
    for start in starts
  ]


def _run(call: Sequence[str], limit_s: float) -> str:
  """What a program prints; ValueError with its last words where it fails."""
  name = pathlib.Path(call[0]).name
  name = f'{call[2]}' if call[0] == sys.executable else name
  try:
    done = subprocess.run(
      call, capture_output=True, text=True, errors='replace', check=False,
      timeout=limit_s,
    )  # fmt: skip
  except subprocess.TimeoutExpired as error:
    raise ValueError(f'{name} took more than {limit_s:g} s.') from error
  if done.returncode == 130:
    raise KeyboardInterrupt
  if done.returncode < 0:
    how = f'was ended by {signal.Signals(-done.returncode).name}'
  else:
    how = f'ended with exit code {done.returncode}'
  if done.returncode:
    raise ValueError(f'{name} {how}. Its last words: {_last(done.stderr)}')
  return done.stdout


def _last(text: str) -> str:
  """The last lines of a text, in one."""
  return ' / '.join(text.split('\n')[-6:]).strip(' /') or 'none.'
