"""Hugging Face directories of safetensors, read without knowing the model."""

import dataclasses
import io
import json
import math
import pathlib
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np

from bevy_jax.offload import checkpoint

_SINGLE = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'
_DTYPES: dict[str, np.dtype[Any]] = {
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F16': np.dtype(np.float16),
  'F32': np.dtype(np.float32),
}


class Tensor(NamedTuple):
  """Where one tensor lies.

  Attributes:
    file: its shard.
    kind: dtype as the file spells it.
    shape: its shape.
    offset: first byte, counted from the start of the file.
    nbytes: its length.
  """

  file: pathlib.Path
  kind: str
  shape: tuple[int, ...]
  offset: int
  nbytes: int


@dataclasses.dataclass(frozen=True)
class HfCheckpoint:
  """An open directory: every shard's header read, no tensor read.

  Attributes:
    directory: where it lies.
    listing: the file that says which tensors there are.
    tensors: name -> place of every tensor.
    identity: changes when any shard does; not a checksum of the contents.
  """

  directory: pathlib.Path
  listing: pathlib.Path
  tensors: dict[str, Tensor]
  identity: str
  _files: dict[pathlib.Path, io.FileIO] = dataclasses.field(repr=False)

  @classmethod
  def open(cls, directory: pathlib.Path) -> Self:
    """Reads index and headers, and checks them against the files.

    Raises:
      ValueError: nothing to read, a shard missing or truncated, a broken
        header, or a tensor of the index that its shard does not hold.
    """
    listing, weight_map = _listing(directory)
    shards = sorted(set(weight_map.values())) if weight_map else [_SINGLE]
    missing = [s for s in shards if not (directory / s).is_file()]
    if missing:
      first = next((t for t, s in weight_map.items() if s == missing[0]), '')
      raise ValueError(
        f'{listing} names {len(missing)} shard(s) that are not there, the '
        f'first of them {missing[0]} (which would hold {first}). Download '
        'the missing files again.'
      )
    headers = {s: _header(directory / s) for s in shards}
    tensors = {n: t for header in headers.values() for n, t in header.items()}
    for name, shard in weight_map.items():
      if name not in headers[shard]:
        raise ValueError(
          f'{listing} says that {directory / shard} holds {name}, but it '
          'does not. Index and shard belong to different downloads; fetch '
          'both again.'
        )
      tensors[name] = headers[shard][name]
    files = {directory / s: (directory / s).open('rb', 0) for s in shards}
    return cls(directory, listing, tensors, _identity(tensors), files)

  def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Checks that tensors are there, with these shapes and a usable dtype.

    Raises:
      ValueError: naming file and tensor, at the first that does not hold.
    """
    for name, shape in shapes.items():
      tensor = self.tensors.get(name)
      if tensor is None:
        raise ValueError(
          f'{self.listing} has no tensor {name} (it lists '
          f'{len(self.tensors)} tensors), but config.json asks for it. The '
          'download is incomplete, or config.json is of another model.'
        )
      if tensor.shape != tuple(shape):
        raise ValueError(
          f'{tensor.file}: {name} has shape {list(tensor.shape)}, but '
          f'config.json asks for {list(shape)}. Use the config.json that '
          'came with these weights.'
        )
      if tensor.kind not in _DTYPES:
        raise ValueError(
          f'{tensor.file}: {name} is stored as {tensor.kind}; supported are '
          f'{", ".join(_DTYPES)}. Use a version of the model that is not '
          'quantised.'
        )

  def refuse_unused(
    self, used: Collection[str], ignorable: Callable[[str], bool]
  ) -> None:
    """Checks that every tensor is used, or may be ignored.

    Raises:
      ValueError: naming file and tensor of the first that is neither.
    """
    extra = [n for n in self.tensors if n not in used and not ignorable(n)]
    if extra:
      raise ValueError(
        f'{self.tensors[extra[0]].file}: no part of the model uses '
        f'{extra[0]} ({len(extra)} unused tensors in all), so its answers '
        'would be wrong. Check that config.json belongs to these weights.'
      )

  def dtype(self, name: str) -> np.dtype[Any]:
    """Dtype of a tensor that `require` has passed."""
    return _DTYPES[self.tensors[name].kind]

  def read(self, name: str, start: int, out: np.ndarray) -> None:
    """Fills `out` with the elements of a tensor from `start` on, row-major.

    `out` is contiguous and has the tensor's dtype. Threads may read at once.
    """
    tensor = self.tensors[name]
    assert out.dtype == self.dtype(name), (name, out.dtype)
    assert out.flags.c_contiguous, name
    first = start * out.itemsize
    assert 0 <= first <= first + out.nbytes <= tensor.nbytes, (name, start)
    try:
      checkpoint.read_at(self._files[tensor.file], tensor.offset + first, out)
    except ValueError as error:
      raise ValueError(
        f'{tensor.file} ended inside {name}: the file shrank while it was '
        'read. Download it again.'
      ) from error

  def close(self) -> None:
    """Closes the shards; safe to call twice."""
    for file in self._files.values():
      file.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()


def _listing(directory: pathlib.Path) -> tuple[pathlib.Path, dict[str, str]]:
  """The file that lists the tensors, and its name -> shard (or nothing)."""
  if (directory / _SINGLE).is_file():
    return directory / _SINGLE, {}
  index = directory / _INDEX
  if index.is_file():
    return index, _weight_map(index)
  pickled = sorted([*directory.glob('*.bin'), *directory.glob('*.pt*')])
  if pickled:
    raise ValueError(
      f'{directory} holds pickled weights only ({pickled[0].name}); loading '
      'them would run code from the file. Download the safetensors version '
      'of the model, or write one with save_pretrained of transformers.'
    )
  raise ValueError(
    f'{directory} holds neither {_SINGLE} nor {_INDEX}. Give the directory '
    'of a downloaded Hugging Face model, or of a converted one.'
  )


def _weight_map(index: pathlib.Path) -> dict[str, str]:
  try:
    weight_map = json.loads(index.read_text('utf-8'))['weight_map']
    assert weight_map
    for name, shard in weight_map.items():
      assert isinstance(name, str) and pathlib.Path(shard).name == shard
  except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
    raise ValueError(
      f'{index} is not an index of safetensors: it needs a "weight_map" from '
      'tensor names to file names in the same directory. Download it again.'
    ) from None
  result: dict[str, str] = weight_map
  return result


def _header(path: pathlib.Path) -> dict[str, Tensor]:
  """Places of the tensors of one shard, checked against its length."""
  size = path.stat().st_size
  with path.open('rb') as file:
    length = int.from_bytes(file.read(8), 'little')
    if size < 8 or 8 + length > size:
      raise ValueError(
        f'{path} is truncated or no safetensors file: it has {size} bytes '
        f'and its header would take {8 + length}. Download it again (a file '
        'of about 130 bytes is a Git LFS pointer: run `git lfs pull`).'
      )
    raw = file.read(length)
  try:
    entries = json.loads(raw)
    entries.pop('__metadata__', None)
    found = {n: _tensor(path, 8 + length, e) for n, e in entries.items()}
  except (ValueError, KeyError, TypeError, AttributeError):
    raise ValueError(
      f'{path} has a broken safetensors header. Download it again.'
    ) from None
  for name, tensor in found.items():
    if tensor.offset + tensor.nbytes > size:
      raise ValueError(
        f'{path} is truncated: {name} ends at byte '
        f'{tensor.offset + tensor.nbytes} and the file has {size}. '
        'Download it again.'
      )
    dtype = _DTYPES.get(tensor.kind)
    needed = math.prod(tensor.shape) * dtype.itemsize if dtype else -1
    if dtype and tensor.nbytes != needed:
      raise ValueError(
        f'{path}: {name} of shape {list(tensor.shape)} and dtype '
        f'{tensor.kind} needs {needed} bytes, but its header gives '
        f'{tensor.nbytes}. Download it again.'
      )
  return found


def _tensor(path: pathlib.Path, base: int, entry: dict[str, Any]) -> Tensor:
  first, last = (int(x) for x in entry['data_offsets'])
  if not 0 <= first <= last:
    raise ValueError(entry)
  shape = tuple(int(x) for x in entry['shape'])
  return Tensor(path, str(entry['dtype']), shape, base + first, last - first)


def _identity(tensors: Mapping[str, Tensor]) -> str:
  """A short text from all places, and sizes and times of the files."""
  files = {t.file: t.file.stat() for t in tensors.values()}
  lines = [f'{f.name} {s.st_size} {s.st_mtime_ns}' for f, s in files.items()]
  lines += [f'{n} {t[1:]}' for n, t in tensors.items()]
  text = '\n'.join(sorted(lines))
  return f'{zlib.crc32(text.encode()):08x}'
