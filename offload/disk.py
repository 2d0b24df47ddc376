"""Blocks of a file, read past the page cache by a few threads."""

import errno
import os
import pathlib
import queue
import threading
import time
import weakref
import zlib
from collections.abc import Sequence

import numpy as np

from bevy_jax.offload import pinned, store

READERS = 4  # Threads: enough that some read while others check.
_SECTOR = 512  # A direct read that ends elsewhere has met the end of the file.
_DIRECT = getattr(os, 'O_DIRECT', 0)


class BlockFile:
  """Equal blocks in a file, each at a multiple of 4 KiB; any thread reads.

  Attributes:
    path: of the file.
    nbytes: of one block.
    direct: whether reads go past the page cache; where the file system
      refuses that, they go through it and are dropped from it.
  """

  def __init__(
    self,
    path: pathlib.Path,
    offsets: Sequence[int],
    checksums: Sequence[int],
    nbytes: int,
  ):
    self.path, self.nbytes = path, nbytes
    self._offsets, self._checksums = offsets, checksums
    self._file, self.direct = _open(path)

  def __len__(self) -> int:
    return len(self._offsets)

  def spare(self) -> np.ndarray:
    """A buffer that `read` needs, one a thread; touched only where it must."""
    whole = -(-self.nbytes // pinned.PAGE) * pinned.PAGE
    return pinned.aligned((whole,), np.dtype(np.uint8))

  def read(self, key: int, out: np.ndarray, spare: np.ndarray) -> None:
    """Reads one block into `out` and checks it.

    Raises:
      ValueError: the file was changed since it was written.
      OSError: the disk failed.
    """
    raw = out.reshape(-1).view(np.uint8)
    # Direct reads want whole pages: what lies behind the last whole one, or
    # all where the block begins elsewhere, takes the way over the spare.
    body = raw.nbytes // pinned.PAGE * pinned.PAGE
    if raw.ctypes.data % pinned.PAGE:
      body = 0
    rest = raw.nbytes - body
    over = spare[: -(-rest // pinned.PAGE) * pinned.PAGE]
    parts = [part.data for part in (raw[:body], over) if part.nbytes]
    self._fill(key, parts)
    raw[body:] = over[:rest]
    if zlib.crc32(raw.data) != self._checksums[key]:
      raise ValueError(
        f'{self.path} was changed since it was written: the checksum of '
        f'expert {key} is not what was written. Convert the model again.'
      )

  def close(self) -> None:
    """Closes the file; safe to repeat, and not while somebody reads."""
    if self._file >= 0:
      os.close(self._file)
      self._file = -1

  def _fill(self, key: int, parts: list[memoryview]) -> None:
    begin = at = self._offsets[key]
    while parts:
      got = os.preadv(self._file, parts, at)
      at += got
      if not got or (self.direct and got % _SECTOR):
        raise ValueError(
          f'{self.path} was changed since it was written: it ends at byte '
          f'{at:,}, in the middle of expert {key}. Convert the model again.'
        )
      while parts and got >= parts[0].nbytes:
        got -= parts.pop(0).nbytes
      if got:
        parts[0] = parts[0][got:]
    if not self.direct:
      os.posix_fadvise(self._file, begin, at - begin, os.POSIX_FADV_DONTNEED)


# A key, and where its block goes; None ends a thread.
_Asked = queue.SimpleQueue[tuple[int, np.ndarray] | None]
_Done = queue.SimpleQueue[store.Fetched]


class Readers:
  """A few threads that read blocks; they end with `close`, or with us."""

  def __init__(self, file: BlockFile, count: int = READERS):
    self._asked: _Asked = queue.SimpleQueue()
    self._done: _Done = queue.SimpleQueue()
    # The threads know the queues and not us, so that nobody who forgets to
    # close leaves them behind.
    threads = [
      threading.Thread(
        target=_serve,
        args=(file, self._asked, self._done),
        name=f'bevy-reader-{n}',
        daemon=True,
      )
      for n in range(count)
    ]
    for thread in threads:
      thread.start()
    self._stop = weakref.finalize(self, _end, file, self._asked, threads)

  def ask(self, key: int, out: np.ndarray) -> None:
    """Has a block read into `out`, which is left alone until it is done."""
    assert self._stop.alive, 'the readers are closed'
    self._asked.put((key, out))

  def done(self) -> list[store.Fetched]:
    """What was read or failed since the last call; never waits."""
    found = []
    while not self._done.empty():
      found.append(self._done.get())
    return found

  def next(self) -> store.Fetched:
    """Waits for one; there must be one to come."""
    return self._done.get()

  def close(self) -> None:
    """Waits for reads that go on, forgets the others, closes the file."""
    self._stop()


def _serve(file: BlockFile, asked: _Asked, done: _Done) -> None:
  spare = file.spare()
  while (task := asked.get()) is not None:
    key, out = task
    begun, fault = time.perf_counter_ns(), ''
    try:
      file.read(key, out, spare)
    except Exception as error:  # Whatever it is, the load must end.
      fault = str(error) or type(error).__name__
      if isinstance(error, OSError):
        fault = f'{file.path} cannot be read at expert {key}: {fault}'
    done.put(store.Fetched(key, fault, (begun, time.perf_counter_ns())))


def _end(
  file: BlockFile, asked: _Asked, threads: Sequence[threading.Thread]
) -> None:
  while not asked.empty():
    try:
      asked.get_nowait()
    except queue.Empty:
      break
  for _ in threads:
    asked.put(None)
  for thread in threads:
    thread.join()
  file.close()


def _open(path: pathlib.Path) -> tuple[int, bool]:
  """The file, and whether it can be read past the page cache."""
  page = pinned.aligned((pinned.PAGE,), np.dtype(np.uint8))
  if _DIRECT:
    file = -1
    try:
      file = os.open(path, os.O_RDONLY | _DIRECT)
      os.preadv(file, [page.data], 0)
      return file, True
    except OSError as error:
      if file >= 0:
        os.close(file)
      if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
        raise
  return os.open(path, os.O_RDONLY), False
