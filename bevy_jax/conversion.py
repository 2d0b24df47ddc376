"""Hugging Face directories rewritten in the native form."""

import pathlib
from collections.abc import Callable

from bevy_jax import loading
from bevy_jax.offload import checkpoint_writer

# What else a model's directory holds and people want beside the weights.
_KEPT = ('.json', '.txt', '.model', '.jinja', '.md')


def convert(
  source: str | pathlib.Path,
  target: str | pathlib.Path,
  progress: Callable[[int, int], None] = lambda done, total: None,
) -> int | None:
  """Writes the native form of a model; goes on where an earlier run stopped.

  Args:
    source: a Hugging Face directory, or 'demo'.
    target: directory to write; it needs the model's size on disk.
    progress: called with experts done and their total.

  Returns:
    How many experts were found intact from an earlier run; None where the
    target was finished before.

  Raises:
    ValueError: the source is incomplete, the target holds something else, or
      the disk is too small.
  """
  directory, goal = loading.locate(source), pathlib.Path(target).expanduser()
  config = loading.read_config(directory)
  with loading.HfSource.open(directory, config) as opened:
    identity = opened.files.identity
    if not checkpoint_writer.can_write(goal, identity):
      return None
    copies = [p for p in sorted(directory.iterdir()) if _is_kept(p)]
    return checkpoint_writer.write(goal, opened, identity, copies, progress)


def _is_kept(path: pathlib.Path) -> bool:
  index = path.name.endswith('.safetensors.index.json')
  return path.is_file() and path.suffix in _KEPT and not index
