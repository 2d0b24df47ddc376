"""How fast experts come from the disk, against plain direct reads.

python -m bevy_jax.experiments.disk_speed --folder=. --gib=2
"""

import pathlib
import random
import shutil
import statistics
import tempfile
from collections.abc import Callable

from absl import app, flags

from bevy_jax.experiments import disk_reads
from bevy_jax.offload import disk, pinned

BAR = 0.8  # Of the plain reads' speed.
FOLDER = flags.DEFINE_string('folder', None, 'Where; a temporary one if none.')
GIB = flags.DEFINE_float('gib', 1.0, 'Size of the file.')
BLOCK = flags.DEFINE_integer('block', 9 << 20, 'Bytes of an expert.')
READERS = flags.DEFINE_integer('readers', disk.READERS, 'Threads.')
DEPTH = flags.DEFINE_integer('depth', 0, 'Fetches at once; 0: 2 a thread.')
ROUNDS = flags.DEFINE_integer('rounds', 7, 'Rounds, each of all three ways.')


def main(argv: list[str]) -> None:
  """Prints a row a round, medians and whether the bar is met."""
  if len(argv) > 1:
    raise app.UsageError(f'not a flag: {argv[1:]}')
  block = -(-BLOCK.value // pinned.PAGE) * pinned.PAGE
  count = int(GIB.value * 2**30) // block
  with tempfile.TemporaryDirectory(dir=FOLDER.value) as folder:
    free = shutil.disk_usage(folder).free
    if count < 16 or count * block > free:
      raise SystemExit(
        f'disk_speed: {GIB.value} GiB are {count} blocks; at least 16 are '
        f'needed, and {free / 2**30:.1f} GiB are free there.'
      )
    file = disk_reads.make(pathlib.Path(folder) / 'blocks', block, count)
    _measure(file, count)


def _measure(file: disk.BlockFile, count: int) -> None:
  depth = DEPTH.value or 2 * READERS.value
  store = disk_reads.store(file, depth, READERS.value)
  print(
    f'{count} blocks of {file.nbytes:,} bytes, {READERS.value} threads, '
    f'{depth} fetches at once, direct reads: {file.direct}; GB/s'
  )
  ways: dict[str, Callable[[list[int]], float]] = {
    'plain': lambda keys: disk_reads.plain(file, keys, READERS.value),
    'ours': lambda keys: disk_reads.ours(store, keys, depth),
    'one by one': lambda keys: disk_reads.plain(file, keys, 1),
  }
  print('round', *(name.rjust(10) for name in ways))
  speeds: dict[str, list[float]] = {name: [] for name in ways}
  keys, gigabytes = list(range(count)), count * file.nbytes * 1e-9
  for number in range(ROUNDS.value + 1):
    random.Random(number).shuffle(keys)
    took = {name: way(keys) for name, way in ways.items()}
    if not number:
      continue  # The first one touches memory for the first time.
    for name, seconds in took.items():
      speeds[name].append(gigabytes / seconds)
    print(f'{number:5}', *(f'{s[-1]:10.2f}' for s in speeds.values()))
  store.close()
  medians = {name: statistics.median(s) for name, s in speeds.items()}
  print('  all', *(f'{s:10.2f}' for s in medians.values()))
  pairs = zip(speeds['ours'], speeds['plain'], strict=True)
  ratio = statistics.median(a / b for a, b in pairs)
  met = ratio >= BAR
  print(f'ours / plain {ratio:.2f}, at least {BAR} is asked for: met is {met}')


if __name__ == '__main__':
  app.run(main)
