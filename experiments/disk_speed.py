"""How fast experts come from the disk, against plain direct reads.

python -m bevy_jax.experiments.disk_speed --folder=. --gib=2
"""

import pathlib
import shutil
import statistics
import tempfile
from typing import Any

from absl import flags

from bevy_jax.experiments import (
  ablation,
  disk_reads,
  launcher,
  outcome,
  workdir,
)
from bevy_jax.offload import disk, pinned

BAR = 0.8  # Of the plain reads' speed.
FOLDER = flags.DEFINE_string('folder', None, 'Where; a temporary one if none.')
GIB = flags.DEFINE_float('gib', 1.0, 'Size of the file.')
BLOCK = flags.DEFINE_integer('block', 9 << 20, 'Bytes of an expert.')
READERS = flags.DEFINE_integer('readers', disk.READERS, 'Threads.')
DEPTH = flags.DEFINE_integer('depth', 0, 'Fetches at once; 0: 2 a thread.')
ROUNDS = flags.DEFINE_integer('rounds', 7, 'Rounds, each of all three ways.')


def build_config() -> dict[str, Any]:
  """The file and how it is read."""
  block = -(-BLOCK.value // pinned.PAGE) * pinned.PAGE
  count = int(GIB.value * 2**30) // block
  folder = FOLDER.value or tempfile.gettempdir()
  free = shutil.disk_usage(folder).free
  if count < 16 or count * block > free:
    raise ValueError(
      f'{GIB.value} GiB are {count} blocks; at least 16 are needed, and '
      f'{free / 2**30:.1f} GiB are free in {folder}.'
    )
  return {
    'folder': folder,
    'block': block,
    'count': count,
    'readers': READERS.value,
    'depth': DEPTH.value or 2 * READERS.value,
    'rounds': ROUNDS.value,
  }


def main(asked: dict[str, Any], place: workdir.Workdir) -> outcome.Outcome:
  """A row a round, medians and whether the bar is met."""
  with tempfile.TemporaryDirectory(dir=asked['folder']) as folder:
    path = pathlib.Path(folder) / 'blocks'
    file = disk_reads.make(path, asked['block'], asked['count'])
    how = asked['readers'], asked['depth'], asked['rounds']
    rows = []
    for row in disk_reads.rounds(file, *how):
      rows.append(row)
      place.note(row)
      print(f'round {len(rows)}: ours {row["ours"]:.2f} GB/s', flush=True)
  medians = {way: statistics.median(r[way] for r in rows) for way in rows[0]}
  ratio = statistics.median(row['ours'] / row['plain'] for row in rows)
  met = ratio >= BAR
  report = {'rows': rows, 'ratio': ratio, 'met': met, 'direct': file.direct}
  shown = [
    {'round': name} | {way: f'{rate:.2f}' for way, rate in row.items()}
    for name, row in [*enumerate(rows, 1), ('all', medians)]
  ]
  return outcome.Outcome(
    report,
    (
      f'{asked["count"]} blocks of {file.nbytes:,} bytes, {asked["readers"]} '
      f'threads, {asked["depth"]} fetches at once, direct reads: '
      f'{file.direct}; GB/s',
      ablation.table(shown),
      f'ours / plain {ratio:.2f}, at least {BAR} is asked for: met is {met}',
    ),
    outcome.judged(met),
  )


if __name__ == '__main__':
  launcher.run(main, build_config, device=False)
