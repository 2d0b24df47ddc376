"""The folder of a launcher: what ran there, what came, nothing lost."""

import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_CONFIG, _METRICS, _EARLIER = 'config.json', 'metrics.jsonl', 'earlier'


class Workdir:
  """Where a run writes; without a folder it writes what flags ask for.

  Attributes:
    folder: the folder, None for none.
    goes_on: whether the run goes on with what an earlier one has left.
  """

  def __init__(
    self,
    folder: pathlib.Path | None,
    config: Mapping[str, Any] | None = None,
    goes_on: bool = False,
  ):
    self.folder, self.goes_on = folder, goes_on
    self._config = dict(config or {})
    self._begun, self.noted = time.monotonic(), 0
    self._before = _names(folder)

  def path(self, given: str, name: str) -> str:
    """Where a file goes: where a flag says, else into the folder, else ''."""
    if given or self.folder is None:
      return given
    if name not in self._config['files']:
      self._config['files'].append(name)
      _write(self.folder / _CONFIG, self._config)
    return str(self.folder / name)

  def note(self, row: Mapping[str, Any]) -> None:
    """Adds a line to metrics.jsonl, with the run's number and seconds."""
    self.noted += 1
    if self.folder is None:
      return
    seconds = round(time.monotonic() - self._begun, 3)
    head = {'run': len(self._config['runs']), 'seconds': seconds}
    with (self.folder / _METRICS).open('a', encoding='utf-8') as file:
      file.write(json.dumps(head | dict(row), default=str) + '\n')

  def note_all(self, report: Mapping[str, Any]) -> None:
    """Notes the rows of a report where nothing was noted on the way."""
    if not self.noted:
      for row in report.get('rows') or report.get('runs') or [report]:
        self.note(row if isinstance(row, Mapping) else {'row': row})

  def end(self, code: int) -> None:
    """Writes down how the run ended."""
    if self.folder is not None:
      new = _names(self.folder) - self._before - {_CONFIG, _METRICS}
      self._config['files'] = sorted(new.union(self._config['files']))
      self._config['runs'][-1] |= {'ended': _now(), 'exit_code': code}
      _write(self.folder / _CONFIG, self._config)


@contextlib.contextmanager
def opened(
  path: str,
  config: Mapping[str, Any],
  facts: Mapping[str, Any],
  say: Callable[[str], None],
  *,
  resumable: bool = False,
) -> Iterator[Workdir]:
  """The folder of a run that is told by its config.

  Where an earlier run has left files, a sweep that asks for the same goes on
  with them; else they move to earlier/N, and `say` tells so. metrics.jsonl
  grows in either case.

  Args:
    path: the folder, made where it is missing; empty for none.
    config: what is run, as JSON can hold it; has 'launcher'.
    facts: of this call: command, versions, hardware, seed.
    say: hears what is there.
    resumable: whether the launcher can go on.

  Raises:
    ValueError: another run writes there, or others' files are in the way.
  """
  if not path:
    yield Workdir(None)
    return
  folder = pathlib.Path(path)
  folder.mkdir(parents=True, exist_ok=True)
  with _locked(folder):
    before = _read(folder / _CONFIG)
    same = before is not None and before['config'] == config
    goes_on = resumable and same
    if before is not None and goes_on:
      say(f'{path} holds this run already; it goes on there')
    elif before is not None:
      number = _put_aside(folder, before)
      what = 'the same run' if same else 'another run'
      say(f'{path} holds {what}; its files are now in {_EARLIER}/{number}')
    whole = {
      **facts,
      'config': config,
      'files': before['files'] if before and goes_on else [],
      'runs': before['runs'] if before else [],
    }
    started = {'command': facts.get('command'), 'started': _now()}
    whole['runs'] = [*whole['runs'], started]
    _write(folder / _CONFIG, whole)
    yield Workdir(folder, whole, goes_on)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
  """One run at a time; the system gives the lock back whatever happens."""
  with (folder / '.lock').open('w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      raise ValueError(
        f'another run writes into {folder} just now; wait for its end or name '
        'another --workdir.'
      ) from error
    yield


def _read(path: pathlib.Path) -> dict[str, Any] | None:
  """What an earlier run has left; ValueError where somebody else did."""
  if not path.exists():
    return None
  try:
    found: dict[str, Any] = json.loads(path.read_text('utf-8'))
    found['config']['launcher'], found['files'], found['runs']
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f'{path} was not written by a launcher of this project, and would be '
      'lost; name another --workdir.'
    ) from error
  return found


def _put_aside(folder: pathlib.Path, before: Mapping[str, Any]) -> int:
  """Moves an earlier run's files to the next free number."""
  number = 1
  while (folder / _EARLIER / str(number)).exists():
    number += 1
  target = folder / _EARLIER / str(number)
  target.mkdir(parents=True)
  for name in [*before['files'], _CONFIG]:
    if (folder / name).exists():
      os.replace(folder / name, target / name)
  return number


def _names(folder: pathlib.Path | None) -> set[str]:
  """The files there; folders of checkpoints are their owner's affair."""
  return {p.name for p in folder.iterdir() if p.is_file()} if folder else set()


def _write(path: pathlib.Path, whole: Mapping[str, Any]) -> None:
  new = path.with_name(path.name + '.new')
  new.write_text(json.dumps(whole, indent=1, default=str) + '\n', 'utf-8')
  os.replace(new, path)


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).isoformat('T', 'seconds')
