"""The native form of a checkpoint: dense by orbax, experts in one flat file.

    experts.bin    one packed block an expert, each at a multiple of 4 KiB
    experts.json   dtype and shape of the blocks, and where they are opaque
                   bytes what their maker says of them; offset, CRC-32 of each
    dense/         the shared weights by path, written by orbax
    complete.json  checksums of the rest; written last, nothing loads without
    ...            config.json, tokenizer and the like, as they were

While it is written, experts.journal holds the checksum of each block that is
on disk, so that a run after a crash skips what it finds intact.
"""

import dataclasses
import io
import json
import math
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any, Self

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

VERSION = 1
_ALIGNMENT = 4096  # bytes; what direct reads from disk ask for
BLOCKS, INDEX, JOURNAL = 'experts.bin', 'experts.json', 'experts.journal'
DENSE, MARKER = 'dense', 'complete.json'
DTYPES: dict[str, np.dtype[Any]] = {
  np.dtype(d).name: np.dtype(d)
  for d in (ml_dtypes.bfloat16, np.float16, np.float32, np.uint8)
}


def is_native(directory: pathlib.Path) -> bool:
  """Whether this is a native checkpoint, be it a half-written one."""
  names = (BLOCKS, INDEX, JOURNAL, MARKER)
  return any((directory / name).exists() for name in names)


@dataclasses.dataclass(frozen=True)
class Reader:
  """An open native checkpoint.

  Attributes:
    directory: where it lies.
    shape: of every block.
    dtype: of every block.
    offsets: first byte of each block, by key.
    checksums: CRC-32 of each block, by key.
    dense: path of each shared weight -> its shape, dtype and crc32.
    meta: what the maker of the blocks said of them; None where nothing.
  """

  directory: pathlib.Path
  shape: tuple[int, ...]
  dtype: np.dtype[Any]
  offsets: tuple[int, ...]
  checksums: tuple[int, ...]
  dense: dict[str, dict[str, Any]]
  meta: dict[str, Any] | None
  _file: io.FileIO = dataclasses.field(repr=False)

  @classmethod
  def open(cls, directory: pathlib.Path) -> Self:
    """Checks that it is complete and unchanged in length.

    Raises:
      ValueError: half-written, truncated, changed or of another version.
    """
    if not (directory / MARKER).is_file():
      raise ValueError(
        f'{directory} is half-written: it has no {MARKER}. Run the '
        'conversion again; it goes on where it stopped.'
      )
    marker = read_json(directory / MARKER)
    if marker.get('version') != VERSION:
      raise ValueError(
        f'{directory / MARKER} is of version {marker.get("version")}; '
        f'this program reads version {VERSION}. Convert the model again.'
      )
    raw = _bytes(directory / INDEX)
    if zlib.crc32(raw) != marker['index_crc32']:
      raise _changed(directory / INDEX, 'its checksum')
    index = json.loads(raw)
    shape, dtype = tuple(index['shape']), DTYPES[index['dtype']]
    blocks = index['experts']
    path = directory / BLOCKS
    size = path.stat().st_size if path.is_file() else 0
    wanted = len(blocks) * stride(shape, dtype)
    if size != wanted:
      raise _changed(path, f'its length, {size} instead of {wanted} bytes,')
    return cls(
      directory=directory,
      shape=shape,
      dtype=dtype,
      offsets=tuple(block['offset'] for block in blocks),
      checksums=tuple(block['crc32'] for block in blocks),
      dense=marker['dense'],
      meta=index.get('meta'),
      _file=path.open('rb', 0),
    )

  @property
  def count(self) -> int:
    """Number of blocks."""
    return len(self.offsets)

  @property
  def dense_shapes(self) -> dict[str, tuple[int, ...]]:
    """Path of each shared weight -> its shape."""
    return {name: tuple(x['shape']) for name, x in self.dense.items()}

  @property
  def nbytes(self) -> int:
    """Bytes of all blocks and shared weights, without padding."""
    nbytes = self.count * math.prod(self.shape) * self.dtype.itemsize
    for name, shape in self.dense_shapes.items():
      dtype = DTYPES[self.dense[name]['dtype']]
      nbytes += math.prod(shape) * dtype.itemsize
    return nbytes

  def fill(self, key: int, out: np.ndarray) -> None:
    """Reads one block into `out`; raises ValueError where it was changed."""
    read_at(self._file, self.offsets[key], out)
    if checksum(out) != self.checksums[key]:
      path = self.directory / BLOCKS
      raise _changed(path, f'the checksum of expert {key}')

  def shared(self) -> Iterator[tuple[str, np.ndarray]]:
    """Path and array of every shared weight.

    Raises:
      ValueError: one of them was changed.
    """
    path = self.directory / DENSE
    like = {n: ocp.RestoreArgs(restore_type=np.ndarray) for n in self.dense}
    try:
      with ocp.PyTreeCheckpointer() as checkpointer:
        leaves = checkpointer.restore(path.resolve(), restore_args=like)
    except Exception as error:  # orbax and tensorstore raise many kinds
      raise _changed(path, f'something ({error})') from error
    for name, entry in self.dense.items():
      leaf = leaves.pop(name)
      if checksum(leaf) != entry['crc32'] or leaf.dtype.name != entry['dtype']:
        raise _changed(path, f'the checksum of {name}')
      yield name, leaf

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self._file.close()


def read_at(file: io.FileIO, offset: int, out: np.ndarray) -> None:
  """Fills `out` with the bytes from `offset` on; ValueError where it ends.

  Threads may read from one file at once: its position plays no part.
  """
  view = out.reshape(-1).view(np.uint8).data
  end = offset + out.nbytes
  while view:
    got = os.preadv(file.fileno(), [view], end - view.nbytes)
    if not got:
      raise ValueError(f'{file.name} ends before byte {end}.')
    view = view[got:]


def stride(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
  """Bytes from one block to the next."""
  nbytes = math.prod(shape) * dtype.itemsize
  return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def checksum(x: np.ndarray) -> int:
  """CRC-32 of an array's bytes in row-major order."""
  return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)


def _changed(path: pathlib.Path, what: str) -> ValueError:
  return ValueError(
    f'{path} was changed since it was written: {what} is not what was '
    'written. Remove its directory and convert the model again.'
  )


def _bytes(path: pathlib.Path) -> bytes:
  return path.read_bytes() if path.is_file() else b''


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """One of the small files; ValueError where it is broken."""
  try:
    content: dict[str, Any] = json.loads(path.read_text('utf-8'))
  except ValueError as error:
    raise _changed(path, 'its text') from error
  return content
