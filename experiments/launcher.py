"""What every launcher does alike: flags, config first, errors, the result.

A launcher has `build_config`, which makes a record of the flags, and `main`,
which runs that and returns an `Outcome`; `run(main, build_config)` is the rest.
"""

import contextlib
import dataclasses
import io
import json
import logging
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TextIO, TypeVar

import rich.console
from absl import app, flags

from bevy_jax.experiments import flag_help, outcome, workdir
from bevy_jax.experiments import run as run_lib

WORKDIR = flags.DEFINE_string(
  'workdir', '', 'Folder for config.json, metrics.jsonl, report.json and what '
  'else is written; a rerun loses nothing.',
)  # fmt: skip
REPORT = flags.DEFINE_string('report', '', 'Where to write the report, JSON.')
QUIET = flags.DEFINE_bool('quiet', False, 'Only the result.')
JSON = flags.DEFINE_bool('json', False, 'The report alone, as JSON, on stdout.')
DEBUG = flags.DEFINE_bool('debug', False, 'Show the traceback of an error.')

_WIDTH = 300  # Of what is no terminal: a file breaks no lines.
Config = TypeVar('Config')
Ask = Callable[[Config], bool] | bool


def run(
  main: Callable[[Config, workdir.Workdir], outcome.Outcome],
  build: Callable[[], Config],
  *,
  resumable: Ask[Config] = False,
  device: Ask[Config] = True,
) -> NoReturn:
  """Runs a launcher and ends the process.

  Whatever `main` prints is talk: on stdout, with --json on stderr, with
  --quiet nowhere. Only the outcome is always on stdout.

  Args:
    main: runs a config; all that it writes goes where the folder says.
    build: the flags as a config. Its ValueError is the asker's, one of `main`
      is a failure.
    resumable: whether `main` goes on with its own files of an earlier run, or
      a function that tells it of a config.
    device: the same of whether this process may take the accelerator, to tell
      its name.
  """

  def start(argv: list[str]) -> int:
    del argv
    return _guarded(main, build, resumable, device)

  app.run(start, flags_parser=_parse)
  raise AssertionError('app.run does not return')


def console(file: TextIO | None = None) -> rich.console.Console:
  """Where a person looks: colours and lines as a terminal has them, or none."""
  made = rich.console.Console(file=file, highlight=False)
  if not made.is_terminal:
    made = rich.console.Console(file=file, highlight=False, width=_WIDTH)
  return made


def program() -> str:
  """The launcher's name."""
  return pathlib.Path(sys.argv[0]).stem


def _parse(argv: list[str]) -> list[str]:
  asked = set(argv[1 : argv.index('--') if '--' in argv else None])
  if asked & {'--help', '-help', '-h', '-?', '--helpshort', '-helpshort'}:
    words = sys.modules['__main__'].__doc__ or ''
    print(flag_help.text(words, _own()))
    raise SystemExit(outcome.OK)
  if asked & {'--helpfull', '-helpfull'}:
    app.usage(writeto_stdout=True)
    raise SystemExit(outcome.OK)
  try:
    left = flags.FLAGS(argv)
  except flags.Error as error:
    _complain(flag_help.explain(error, _own()))
    raise SystemExit(outcome.USAGE) from None
  if left[1:]:
    _complain(flag_help.not_flags(left[1:], _own()))
    raise SystemExit(outcome.USAGE)
  return left


def _own() -> list[flags.Flag[Any]]:
  """The launcher's flags and those of all launchers, not absl's."""
  found = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
  return found + flags.FLAGS.get_flags_for_module(__name__)


def _guarded(
  main: Callable[[Config, workdir.Workdir], outcome.Outcome],
  build: Callable[[], Config],
  resumable: Ask[Config],
  device: Ask[Config],
) -> int:
  """The exit code; whatever goes wrong is said in a paragraph."""
  code, more = outcome.USAGE, ''
  if not DEBUG.value:  # It tells of every kind of device that is not there.
    logging.getLogger('jax').setLevel(logging.WARNING)
  try:
    asked = build()
    goes_on = _answer(resumable, asked)
    more = '; the same command goes on where this ended' if goes_on else ''
    config = {'launcher': program(), **_plain(asked)}
    _check_folder(REPORT.value)
    with contextlib.ExitStack() as stack:
      stack.enter_context(contextlib.redirect_stdout(_talk(stack)))
      print(json.dumps(config | {'versions': run_lib.versions()}, default=str))
      facts = _facts(config, _answer(device, asked))
      folder = workdir.opened(
        WORKDIR.value, _stable(config), facts, print, resumable=goes_on
      )
      place = stack.enter_context(folder)
      code = outcome.FAILED
      found = main(asked, place)
      _keep(found, place)
    _show(found)
    return found.code
  except KeyboardInterrupt:
    return _complain(f'interrupted{more}.', outcome.INTERRUPTED)
  except (ValueError, OSError) as error:
    return _complain(str(error), code)
  except Exception as error:
    return _complain(
      f'a fault of this program: {error!r}; --debug shows where.', outcome.FAULT
    )


def _complain(words: str, code: int = outcome.USAGE) -> int:
  """One paragraph on stderr, behind the traceback where it is asked for."""
  if flags.FLAGS.is_parsed() and DEBUG.value and sys.exc_info()[0]:
    traceback.print_exc()
  print(f'{program()}: {" ".join(words.split())}', file=sys.stderr)
  return code


def _talk(stack: contextlib.ExitStack) -> TextIO:
  """Where what is said on the way goes, line by line into pipes too."""
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(line_buffering=True)
  if QUIET.value:
    return stack.enter_context(open(os.devnull, 'w', encoding='utf-8'))
  return sys.stderr if JSON.value else sys.stdout


def _plain(value: Any) -> Any:
  """A record as a dictionary, records that it holds too."""
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
  elif hasattr(value, '_asdict'):
    value = value._asdict()
  if isinstance(value, Mapping):
    return {name: _plain(inner) for name, inner in value.items()}
  return value


def _stable(config: dict[str, Any]) -> dict[str, Any]:
  """As JSON would give it back, to compare with an earlier run's."""
  found: dict[str, Any] = json.loads(json.dumps(config, default=str))
  return found


def _facts(config: Mapping[str, Any], device: bool) -> dict[str, Any]:
  if not WORKDIR.value:
    return {}
  return {
    'command': run_lib.command(),
    'versions': run_lib.versions(),
    'hardware': run_lib.device() if device else run_lib.host(),
    'seed': _seed(config),
  }


def _answer(ask: Ask[Config], config: Config) -> bool:
  return ask if isinstance(ask, bool) else ask(config)


def _seed(config: Mapping[str, Any]) -> Any:
  """The first seed that a config has, however deep."""
  if 'seed' in config:
    return config['seed']
  inner = (_seed(v) for v in config.values() if isinstance(v, Mapping))
  return next((seed for seed in inner if seed is not None), None)


def _check_folder(path: str) -> None:
  folder = pathlib.Path(path or '.').resolve().parent
  if not folder.is_dir():
    raise ValueError(
      f'{path} cannot be written: {folder} does not exist; make it first.'
    )


def _keep(found: outcome.Outcome, place: workdir.Workdir) -> None:
  """Writes the report; a run that has found nothing leaves none."""
  text = json.dumps(found.report, indent=1, allow_nan=False, default=str)
  paths = {REPORT.value, place.path('', 'report.json')} - {''}
  for path in sorted(paths if found.report else []):
    pathlib.Path(path).write_text(text + '\n', encoding='utf-8')
    print(f'report: {path}')
  if found.report:
    place.note_all(found.report)
  place.end(found.code)


def _show(found: outcome.Outcome) -> None:
  """The result, and with --json nothing but the report."""
  if JSON.value:
    print(json.dumps(found.report, indent=1, allow_nan=False, default=str))
    return
  shown = console()
  for part in found.shown:
    shown.print(part, markup=False)
