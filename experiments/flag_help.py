"""A launcher's flags for people: help by topic, the nearest of a typo."""

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from absl import flags

_WIDTH, _COLUMN = 79, 26
# A flag means the same wherever it is, so it stands under the same topic.
TOPICS = {
  'What runs': 'config source trace model llama_batched_bench gguf '
  'llama_args only demo model_shape shape layers experts top_k forms cells '
  'schedulers scheduler evictions eviction prefetchers prefetch compare '
  'variants routing axes hops kernels set',
  'Memory and link': 'cache caches cache_gib host_gib capacity capacities '
  'requests context link platform expert_mb layer_mb head_mb '
  'priority share block readers depth group zero_point',
  'Prompts and tokens': 'corpus prompts count new_tokens prompt_tokens '
  'temperature top_p seed first skip tokens warmup samples tokenizer limit '
  'ahead',
  'How much, and who does it': 'quick scope pairs rounds repeats passes rows '
  'gib steps plan_minutes stretch_minutes limit_s redo executor jobs address '
  'bounds',
  'Where it goes': 'workdir report csv out target folder record events '
  'timeline begin_ms length_ms',
  'How it is told': 'quiet json debug',
}
_OTHER = 'Else'


def text(words: str, own: Iterable[flags.Flag[Any]]) -> str:
  """A launcher's help: what it says of itself, then its flags by topic."""
  by_name = {str(flag.name): flag for flag in own}
  parts = [words.strip()]
  for topic, names in (TOPICS | {_OTHER: ' '.join(unknown(by_name))}).items():
    found = [by_name[name] for name in names.split() if name in by_name]
    if found:
      parts.append('\n'.join([f'{topic}:', *map(_line, found)]))
  parts.append(
    'Exit codes: 0 done, 1 failed or below its bar, 2 asked wrongly, 70 a '
    'fault of\nthis program, 130 interrupted. --helpfull shows every flag.'
  )
  return '\n\n'.join(parts)


def unknown(names: Iterable[str]) -> list[str]:
  """Flags that no topic has."""
  known = set(' '.join(TOPICS.values()).split())
  return [name for name in names if name not in known]


def nearest(name: str, names: Iterable[str]) -> str:
  """The name most like a mistyped one, '' where none is."""
  known = sorted(names)
  near = [n for n in known if name and n.startswith(name)]
  near += difflib.get_close_matches(name, known, n=1, cutoff=0.4)
  return near[0] if near else ''


def explain(error: flags.Error, own: Iterable[flags.Flag[Any]]) -> str:
  """What was wrong with the flags, in a paragraph with the nearest name."""
  by_name = {str(flag.name): flag for flag in own}
  if isinstance(error, flags.UnrecognizedFlagError):
    return (
      f'--{error.flagname} is no flag{_hint("--", error.flagname, by_name)}'
    )
  said = re.match(r'flag --(\w+)=(.*?): value should be one of', str(error))
  flag = by_name.get(said[1]) if said else None
  if said and flag is not None:
    values = getattr(flag.parser, 'enum_values', [])
    hint = _hint('', said[2], values)
    return (
      f'--{said[1]} cannot be {said[2]!r}{hint} Known: {", ".join(values)}.'
    )
  needed = re.findall(r'flag --(\w+)=None: Flag --\1 must have', str(error))
  if needed:
    return f'not given, but needed: {", ".join(f"--{n}=" for n in needed)}.'
  return str(error).strip().rstrip('.') + '.'


def not_flags(words: list[str], own: Iterable[flags.Flag[Any]]) -> str:
  """What to say of words that are no flags, such as `cache=0.5`."""
  names = [str(flag.name) for flag in own]
  hint = _hint('--', words[0].split('=')[0], names)
  return f'{" ".join(words)!r} is no flag{hint} Flags are --name=value.'


def _hint(dashes: str, name: str, names: Iterable[str]) -> str:
  near = nearest(name, names)
  return f'; did you mean {dashes}{near}?' if near else '; --help lists them.'


def _line(flag: flags.Flag[Any]) -> str:
  head = f'  --[no]{flag.name}' if flag.boolean else f'  --{flag.name}='
  if not flag.boolean:
    head += _default(flag)
  words = ' '.join((flag.help or '').split())
  # absl puts the values before the words, and what it says of lists behind.
  words = re.sub(r'^<[^>]*>: ', '', words).partition('; repeat this option')[0]
  if isinstance(flag, flags.MultiFlag):
    words += ' May be given more than once.'
  values = getattr(flag.parser, 'enum_values', None)
  if values:
    words += f' One of: {", ".join(v for v in values if v)}.'
  if flag.boolean and flag.default:
    words += ' On unless told otherwise.'
  return '\n'.join(_columns(head, words))


def _default(flag: flags.Flag[Any]) -> str:
  value = flag.default
  if isinstance(value, list):
    return ','.join(map(str, value))
  return '' if value is None else str(value)


def _columns(head: str, words: str) -> Iterator[str]:
  """The flag on the left, its words beside it or below where it is long."""
  lines = textwrap.wrap(words, _WIDTH - _COLUMN)
  if len(head) >= _COLUMN:
    yield from textwrap.wrap(
      head, _WIDTH, subsequent_indent=' ' * 6, break_on_hyphens=False
    )
  elif lines:
    yield head.ljust(_COLUMN) + lines.pop(0)
  else:
    yield head
  yield from (' ' * _COLUMN + line for line in lines)
