"""Writes the native form of a checkpoint; a killed run is taken up again."""

import contextlib
import json
import math
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import orbax.checkpoint as ocp

from bevy_jax.offload import checkpoint


class Source(Protocol):
  """Where blocks and shared weights come from."""

  @property
  def count(self) -> int:
    """Number of blocks."""

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of every block."""

  @property
  def dtype(self) -> np.dtype[Any]:
    """Dtype of every block."""

  def fill(self, key: int, out: np.ndarray) -> None:
    """Writes one block into `out`."""

  def shared(self) -> Iterator[tuple[str, np.ndarray]]:
    """Path and array of every shared weight."""


def can_write(directory: pathlib.Path, identity: str) -> bool:
  """Whether `write` has something to do; False where it is all there.

  Raises:
    ValueError: the directory holds something else.
  """
  if (directory / checkpoint.MARKER).is_file():
    found = checkpoint.read_json(directory / checkpoint.MARKER).get('identity')
    if found == identity:
      return False
    raise ValueError(
      f'{directory} holds a finished conversion of another model, or one '
      f'stored in another way (identity {found}, not {identity}). Give an '
      'empty directory, or remove it.'
    )
  started = any(directory.glob(checkpoint.JOURNAL + '*'))
  if directory.exists() and any(directory.iterdir()) and not started:
    raise ValueError(
      f'{directory} is not empty and holds no unfinished conversion. Give '
      'an empty directory.'
    )
  return True


def write(
  directory: pathlib.Path,
  source: Source,
  identity: str,
  copies: Sequence[pathlib.Path] = (),
  progress: Callable[[int, int], None] = lambda done, total: None,
  meta: dict[str, Any] | None = None,
) -> int:
  """Writes a checkpoint, or finishes writing it.

  Args:
    directory: one that `can_write` has passed.
    source: where blocks and shared weights come from.
    identity: of the source; an unfinished run of another one, or of other
      blocks, starts again.
    copies: files to copy as they are.
    progress: called with blocks done and their total.
    meta: what a reader must know of the blocks; kept as it is.

  Returns:
    How many blocks were found intact from an earlier run.

  Raises:
    ValueError: the disk is too small.
  """
  directory.mkdir(parents=True, exist_ok=True)
  header = _header(source, identity, meta)
  checksums = _intact(directory, header)
  found = len(checksums)
  _check_disk(directory, source)
  _write_journal(directory, header, checksums)
  for path in copies:
    shutil.copyfile(path, directory / path.name)
  _write_blocks(directory, source, checksums, progress)
  dense = _write_dense(directory, source)
  stride = checkpoint.stride(source.shape, source.dtype)
  blocks = [
    {'offset': key * stride, 'crc32': checksums[key]}
    for key in range(source.count)
  ]
  _replace(
    directory / checkpoint.INDEX, json.dumps(header | {'experts': blocks})
  )
  marker = {
    'version': checkpoint.VERSION,
    'identity': identity,
    'index_crc32': zlib.crc32((directory / checkpoint.INDEX).read_bytes()),
    'dense': dense,
  }
  _replace(directory / checkpoint.MARKER, json.dumps(marker, indent=1))
  (directory / checkpoint.JOURNAL).unlink()
  return found


def _header(
  source: Source, identity: str, meta: dict[str, Any] | None
) -> dict[str, Any]:
  return {
    'version': checkpoint.VERSION,
    'identity': identity,
    'shape': list(source.shape),
    'dtype': source.dtype.name,
    'bytes': math.prod(source.shape) * source.dtype.itemsize,
    'count': source.count,
    'meta': meta,
  }


def _intact(directory: pathlib.Path, header: dict[str, Any]) -> dict[int, int]:
  """Checksums of the blocks of an earlier run that are right on disk."""
  journal, path = directory / checkpoint.JOURNAL, directory / checkpoint.BLOCKS
  if not (journal.is_file() and path.is_file()):
    return {}
  lines = journal.read_text('utf-8').splitlines()
  if not lines or lines[0] != json.dumps(header):
    return {}
  found: dict[int, int] = {}
  block = np.empty(header['shape'], checkpoint.DTYPES[header['dtype']])
  stride = checkpoint.stride(block.shape, block.dtype)
  with path.open('rb', 0) as file:
    for line in lines[1:]:
      # The last line may be torn, and blocks may not have reached the disk.
      with contextlib.suppress(ValueError):
        key, checksum = (int(word) for word in line.split())
        checkpoint.read_at(file, key * stride, block)
        if checkpoint.checksum(block) == checksum:
          found[key] = checksum
  return found


def _check_disk(directory: pathlib.Path, source: Source) -> None:
  path = directory / checkpoint.BLOCKS
  there = path.stat().st_size if path.is_file() else 0
  stride = checkpoint.stride(source.shape, source.dtype)
  needed, free = (
    source.count * stride - there,
    shutil.disk_usage(directory).free,
  )
  if needed > free:
    raise ValueError(
      f'{directory} needs {needed:,} more bytes and its disk has {free:,} '
      'free. Give a directory on a larger disk.'
    )


def _write_journal(
  directory: pathlib.Path, header: dict[str, Any], checksums: dict[int, int]
) -> None:
  lines = [json.dumps(header), *(f'{k} {c}' for k, c in checksums.items())]
  _replace(directory / checkpoint.JOURNAL, '\n'.join(lines) + '\n')


def _write_blocks(
  directory: pathlib.Path,
  source: Source,
  checksums: dict[int, int],
  progress: Callable[[int, int], None],
) -> None:
  """Writes the blocks that have no checksum yet, and adds theirs."""
  stride = checkpoint.stride(source.shape, source.dtype)
  path = directory / checkpoint.BLOCKS
  path.touch()
  block = np.empty(source.shape, source.dtype)
  with (
    path.open('r+b') as file,
    (directory / checkpoint.JOURNAL).open('a', encoding='utf-8') as journal,
  ):
    for key in range(source.count):
      if key not in checksums:
        source.fill(key, block)
        checksums[key] = checkpoint.checksum(block)
        file.seek(key * stride)
        file.write(block.reshape(-1).view(np.uint8).data)
        file.flush()  # the journal must not run ahead of the blocks
        journal.write(f'{key} {checksums[key]}\n')
        journal.flush()
      progress(key + 1, source.count)
    file.truncate(source.count * stride)
    os.fsync(file.fileno())


def _write_dense(
  directory: pathlib.Path, source: Source
) -> dict[str, dict[str, Any]]:
  """Writes the shared weights anew; returns shape, dtype, crc32 of each."""
  for leftover in directory.glob(f'{checkpoint.DENSE}*'):
    shutil.rmtree(leftover)
  leaves = dict(source.shared())
  with ocp.PyTreeCheckpointer() as checkpointer:
    checkpointer.save((directory / checkpoint.DENSE).resolve(), leaves)
  return {
    name: {
      'shape': x.shape,
      'dtype': x.dtype.name,
      'crc32': checkpoint.checksum(x),
    }
    for name, x in leaves.items()
  }


def _replace(path: pathlib.Path, text: str) -> None:
  """Writes a file so that either all of it is there or the old one."""
  partial = path.with_name(path.name + '.partial')
  with partial.open('w', encoding='utf-8') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  partial.replace(path)
