"""Hugging Face directories rewritten in the native form."""

import pathlib
from collections.abc import Callable

from bevy_jax import loading
from bevy_jax import storage as storage_lib
from bevy_jax.offload import checkpoint_writer

# What else a model's directory holds and people want beside the weights.
_KEPT = ('.json', '.txt', '.model', '.jinja', '.md')


def convert(
  source: str | pathlib.Path,
  target: str | pathlib.Path,
  progress: Callable[[int, int], None] = lambda done, total: None,
  storage: storage_lib.Storage | None = None,
) -> int | None:
  """Writes the native form of a model; goes on where an earlier run stopped.

  Args:
    source: a Hugging Face directory, or 'demo'.
    target: directory to write; it needs the model's size on disk.
    progress: called with experts done and their total.
    storage: what experts are stored as; as in the source where not given.

  Returns:
    How many experts were found intact from an earlier run; None where the
    target was finished before.

  Raises:
    ValueError: the source is incomplete or cannot be stored so, the target
      holds something else, or the disk is too small.
  """
  directory, goal = loading.locate(source), pathlib.Path(target).expanduser()
  config = loading.read_config(directory)
  with loading.HfSource.open(directory, config) as opened:
    identity = opened.files.identity
    recoded = storage_lib.Recoded(opened, storage or opened.dtype)
    if recoded.storage != opened.dtype:
      identity += f' as {storage_lib.name(recoded.storage)}'
    if recoded.meta is not None:
      identity += f' in order {recoded.meta["order"]}'
    if not checkpoint_writer.can_write(goal, identity):
      return None
    copies = [p for p in sorted(directory.iterdir()) if _is_kept(p)]
    return checkpoint_writer.write(
      goal, recoded, identity, copies, progress, recoded.meta
    )


def _is_kept(path: pathlib.Path) -> bool:
  index = path.name.endswith('.safetensors.index.json')
  return path.is_file() and path.suffix in _KEPT and not index
