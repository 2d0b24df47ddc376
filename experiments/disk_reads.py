"""Reads of a file of blocks, through the store and as plain as can be."""

import collections
import itertools
import os
import pathlib
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bevy_jax.offload import disk, disk_store, eviction, pinned

_NAP = 30e-6  # Seconds between looks, as an executor takes them.


def make(path: pathlib.Path, block_bytes: int, count: int) -> disk.BlockFile:
  """Writes random blocks, whole pages each, and opens the file."""
  rng = np.random.default_rng(0)
  noise = rng.integers(0, 2**63, block_bytes // 8, np.int64)
  checksums = []
  with path.open('wb') as file:
    for key in range(count):
      block = noise ^ key
      checksums.append(zlib.crc32(block.data))
      file.write(block.data)
    file.flush()
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
  offsets = range(0, count * block_bytes, block_bytes)
  return disk.BlockFile(path, offsets, checksums, block_bytes)


def store(
  file: disk.BlockFile, blocks: int, readers: int
) -> disk_store.DiskStore:
  """A store of these blocks as bytes, with room for some of them."""
  return disk_store.DiskStore(
    file,
    (file.nbytes,),
    np.dtype(np.uint8),
    layers=1,
    blocks=blocks,
    policy=eviction.Lru(),
    readers=readers,
  )


def ours(found: disk_store.DiskStore, keys: Sequence[int], depth: int) -> float:
  """Seconds to fetch and release keys, `depth` at a time, from cold."""
  found.clear()
  left, waiting, done = collections.deque(keys), 0, 0
  begun = time.perf_counter()
  while done < len(keys):
    while left and waiting < depth:
      found.fetch(left.popleft())
      waiting += 1
    come = found.fetched()
    for fetched in come:
      if fetched.fault:
        raise ValueError(fetched.fault)
      found.release(fetched.key)
    waiting, done = waiting - len(come), done + len(come)
    if not come:
      time.sleep(_NAP)
  return time.perf_counter() - begun


def plain(file: disk.BlockFile, keys: Sequence[int], threads: int) -> float:
  """Seconds that as many threads take that read directly and nothing else."""
  flags = os.O_RDONLY | (os.O_DIRECT if file.direct else 0)
  handle = os.open(file.path, flags)
  following = itertools.count()  # One call of it is not interrupted.
  short: list[int] = []

  def read(buffer: np.ndarray) -> None:
    while (n := next(following)) < len(keys):
      at = keys[n] * file.nbytes
      if os.preadv(handle, [buffer.data], at) != file.nbytes:
        short.append(keys[n])

  page = np.dtype(np.uint8)
  workers = [
    threading.Thread(target=read, args=(pinned.aligned((file.nbytes,), page),))
    for _ in range(threads)
  ]
  begun = time.perf_counter()
  for worker in workers:
    worker.start()
  for worker in workers:
    worker.join()
  took = time.perf_counter() - begun
  os.close(handle)
  if short:
    raise ValueError(f'{file.path}: blocks {short[:3]} came in pieces')
  return took


def rounds(
  file: disk.BlockFile,
  readers: int,
  depth: int,
  count: int,
) -> Iterator[dict[str, float]]:
  """GB/s of plain reads, ours and reads one by one, round by round."""
  shelf = store(file, depth, readers)
  ways: dict[str, Callable[[list[int]], float]] = {
    'plain': lambda keys: plain(file, keys, readers),
    'ours': lambda keys: ours(shelf, keys, depth),
    'one by one': lambda keys: plain(file, keys, 1),
  }
  keys = list(range(len(file)))
  gigabytes = len(file) * file.nbytes * 1e-9
  for number in range(count + 1):
    random.Random(number).shuffle(keys)
    took = {name: way(keys) for name, way in ways.items()}
    if number:  # The first one touches memory for the first time.
      yield {name: gigabytes / s for name, s in took.items()}
  shelf.close()
