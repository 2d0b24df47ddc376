"""The header of a GGUF file: its model, and how large the experts are."""

import pathlib
import re
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

_SCALARS = {
  0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', 6: 'f', 7: '?', 10: 'Q',
  11: 'q', 12: 'd',
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MOST = 1 << 24  # Of anything that a header counts; more is no header.
_EXPERTS = re.compile(r'blk\.(\d+)\.ffn_(up|down|gate|gate_up)_(ch)?exps\.')
_SHARD = re.compile(r'-(\d{5})-of-(\d{5})\.gguf$')


class Model(NamedTuple):
  """What a GGUF file says of its model.

  Attributes:
    name: in its own words.
    shape: by the names of `ModelConfig`: family, num_layers, num_experts,
      top_k, model_dim, expert_dim.
    expert_bytes: of all routed experts of each layer that has some.
    bytes: of all tensors.
  """

  name: str
  shape: Mapping[str, Any]
  expert_bytes: Mapping[int, int]
  bytes: int


class Header(NamedTuple):
  """A header as it is.

  Attributes:
    fields: metadata; of arrays the length alone.
    tensors: name -> bytes, padding included.
  """

  fields: Mapping[str, Any]
  tensors: Mapping[str, int]


def read(path: pathlib.Path) -> Model:
  """The model of a file, or of all files of which it is the first.

  Raises:
    ValueError: it is no GGUF file, it is cut off, or it has no experts.
  """
  first = header(path)
  tensors = dict(first.tensors)
  for other in _shards(path, first):
    tensors |= header(other).tensors
  experts: dict[int, int] = {}
  for name, nbytes in tensors.items():
    found = _EXPERTS.match(name)
    if found:
      layer = int(found[1])
      experts[layer] = experts.get(layer, 0) + nbytes
  kind = str(first.fields.get('general.architecture', ''))

  def field(name: str, other: str = '') -> Any:
    value = first.fields.get(f'{kind}.{name}')
    return first.fields.get(f'{kind}.{other}') if value is None else value

  if not experts or not field('expert_count'):
    raise ValueError(
      f'{path} holds {kind or "a model"} without routed experts; give the '
      'GGUF of a Mixture-of-Experts model.'
    )
  shape = {
    'family': _FAMILIES.get(kind, kind),
    'num_layers': field('block_count'),
    'num_experts': field('expert_count'),
    'top_k': field('expert_used_count'),
    'model_dim': field('embedding_length'),
    'expert_dim': field('expert_feed_forward_length', 'feed_forward_length'),
  }
  name = str(first.fields.get('general.name', path.name))
  return Model(name, shape, experts, sum(tensors.values()))


# Names of GGUF -> those of `ModelConfig`, where they differ.
_FAMILIES = {
  'llama': 'mixtral', 'qwen3moe': 'qwen3_moe', 'qwen2moe': 'qwen2_moe',
}  # fmt: skip


def header(path: pathlib.Path) -> Header:
  """The header of one file; ValueError where it is none or is cut off."""
  if not path.is_file():
    raise ValueError(f'{path} does not exist; give a GGUF file.')
  with path.open('rb') as file:
    try:
      return _header(file, path.stat().st_size)
    except (struct.error, EOFError, UnicodeDecodeError, _Bad) as error:
      raise ValueError(
        f'{path} is no whole GGUF file of version 2 or 3: {error}.'
      ) from error


class _Bad(Exception):
  """What is wrong with a header, in words."""


def _header(file: BinaryIO, size: int) -> Header:
  if file.read(4) != b'GGUF':
    raise _Bad('it does not begin with GGUF')
  version = _take(file, 'I')
  if version not in (2, 3):
    raise _Bad(f'its version is {version}')
  tensors, count = _count(file), _count(file)
  fields = {}
  for _ in range(count):
    name = _string(file)
    fields[name] = _value(file, _take(file, 'I'))
  starts = {}
  for _ in range(tensors):
    name = _string(file)
    for _ in range(_take(file, 'I')):
      _take(file, 'Q')
    _take(file, 'I')  # Its type; its bytes are told by where the next begins.
    starts[name] = _take(file, 'Q')
  alignment = int(fields.get('general.alignment', 32)) or 1
  data = -(-file.tell() // alignment) * alignment
  order = sorted(starts, key=lambda name: starts[name])
  ends = [*(starts[name] for name in order[1:]), size - data]
  sizes = {n: e - starts[n] for n, e in zip(order, ends, strict=True)}
  if any(nbytes <= 0 for nbytes in sizes.values()):
    raise _Bad('it ends before its tensors do')
  return Header(fields, sizes)


def _shards(path: pathlib.Path, first: Header) -> list[pathlib.Path]:
  """The other files of a model in several; ValueError where one is missing."""
  count = int(first.fields.get('split.count', 1) or 1)
  if count == 1:
    return []
  found = _SHARD.search(path.name)
  if not found or int(found[1]) != 1 or int(found[2]) != count:
    raise ValueError(
      f'{path} is one of {count} files; give the first, whose name ends in '
      f'-00001-of-{count:05}.gguf.'
    )
  stem = path.name[: found.start()]
  return [
    path.with_name(f'{stem}-{number:05}-of-{count:05}.gguf')
    for number in range(2, count + 1)
  ]


def _value(file: BinaryIO, kind: int) -> Any:
  if kind == _STRING:
    return _string(file)
  if kind == _ARRAY:
    inner, count = _take(file, 'I'), _count(file)
    if inner in _SCALARS:
      _bytes(file, count * struct.calcsize('<' + _SCALARS[inner]))
    else:
      for _ in range(count):
        _value(file, inner)
    return count
  if kind not in _SCALARS:
    raise _Bad(f'a field has the unknown type {kind}')
  return _take(file, _SCALARS[kind])


def _string(file: BinaryIO) -> str:
  return _bytes(file, _count(file)).decode()


def _count(file: BinaryIO) -> int:
  count = int(_take(file, 'Q'))
  if count > _MOST:
    raise _Bad(f'it counts {count} of something')
  return count


def _take(file: BinaryIO, form: str) -> Any:
  return struct.unpack('<' + form, _bytes(file, struct.calcsize('<' + form)))[0]


def _bytes(file: BinaryIO, count: int) -> bytes:
  found = file.read(count)
  if len(found) < count:
    raise _Bad('it is cut off')
  return found
