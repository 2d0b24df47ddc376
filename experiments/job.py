"""The whole of a decode job: run every variant, tell, write the files."""

import dataclasses
import pathlib

import rich.console
import rich.markup

from bevy_jax import events, recording, timeline
from bevy_jax import report as report_lib
from bevy_jax import trace as trace_lib
from bevy_jax.experiments import configs, outcome, run

_ROUNDED = (
  'other tokens (groups of other sizes round differently in this type; '
  '--set=strict=true makes them equal) than'
)


def main(
  config: configs.Decode, log: str, record: str = '', picture: str = ''
) -> outcome.Outcome:
  """Runs it; its code is that of a failure where a request failed.

  After Ctrl-C what was decoded until then is told and written all the same.
  All but the config are paths, empty for none: `log` of the events, `record`
  of the routing trace of the first run, whose texts are shown, `picture` of a
  timeline of each.
  """
  for path in (log, record, picture):
    folder = pathlib.Path(path or '.').resolve().parent
    if not folder.is_dir():
      raise ValueError(
        f'{path} cannot be written: {folder} does not exist; make it first.'
      )
  console = rich.console.Console()
  bench = run.Bench(
    config, lambda what: console.print(f'[dim]{what} ...[/dim]')
  )
  runs: list[run.Run] = []
  with bench.llm:  # Whatever happens, no thread stays behind.
    for variant in config.variants():
      runs.append(bench.run(*variant, console=console))
      if runs[-1].interrupted:
        break
  _texts(console, config, runs)
  _files(console, bench, runs, log, picture)
  if record:
    _record(console, bench, runs[0], record)
  code = outcome.judged(not _errors(console, runs))
  if runs[-1].interrupted:
    code = outcome.INTERRUPTED
  reports = [r.report for r in runs if r.report]
  if not reports:
    return outcome.Outcome({}, (), code)
  notes = (reports[0]['note'],) if 'note' in reports[0] else ()
  shown = (report_lib.table(reports), *notes)
  return outcome.Outcome(report_lib.whole(reports), shown, code)


def _files(
  console: rich.console.Console,
  bench: run.Bench,
  runs: list[run.Run],
  log: str,
  picture: str,
) -> None:
  """Writes the events of each run, and its timeline."""
  config = dataclasses.asdict(bench.config) | {'versions': run.versions()}
  for number, done in enumerate(runs if log else []):
    path = log if len(runs) == 1 else f'{log}.{number}'
    events.save(path, {'config': config, 'link': bench.link}, done.log)
    console.print(f'events: {path}', highlight=False)
  if picture:
    experts = bench.llm.model.config.num_experts
    paths = timeline.save_all(picture, [done.log for done in runs], experts)
    console.print(f'timeline: {", ".join(paths)}', highlight=False)


def _record(
  console: rich.console.Console, bench: run.Bench, done: run.Run, path: str
) -> None:
  """Writes a run's routing; one stopped before its first token has none."""
  if not any(isinstance(e, events.Token) for e in done.log):
    console.print('trace: not written, for nothing was decoded')
    return
  model, name = bench.llm.model, ' / '.join(bench.config.variants()[0])
  meta = {'model': bench.config.model, 'source': run.command(), 'run': name}
  licence = recording.licence(model.directory)
  found = recording.trace(
    done.log,
    layers=len(model.config.moe_ids),
    num_experts=model.config.num_experts,
    meta=meta | ({'licence': licence} if licence else {}),
  )
  trace_lib.save(path, found)
  console.print(f'trace of {name}: {path}', highlight=False)


def _texts(
  console: rich.console.Console, config: configs.Decode, runs: list[run.Run]
) -> None:
  """The texts of the first run, and whether the others gave the same."""
  first = runs[0].outputs
  for output, text in zip(first, config.texts(), strict=True):
    console.rule(f'request {output.number} ({output.reason})', align='left')
    shown = rich.markup.escape(text), rich.markup.escape(output.text)
    console.print(f'[bold]{shown[0]}[/bold]{shown[1]}', highlight=False)
  console.rule()
  names = [configs.title(variant) for variant in config.variants()]
  for name, done in zip(names[1:], runs[1:], strict=False):
    if done.interrupted:
      continue
    same = [o.tokens for o in done.outputs] == [o.tokens for o in first]
    say = 'the same tokens as' if same else _ROUNDED
    console.print(f'{name} gave {say} {names[0]}.')
  if runs[-1].interrupted:
    console.print('Interrupted: this is what was decoded until then.')


def _errors(console: rich.console.Console, runs: list[run.Run]) -> bool:
  """Says which requests ended in an error, and what that means."""
  failed = [o for r in runs for o in r.outputs if o.reason == 'error']
  for output in failed:
    console.print(
      f'request {output.number} failed after {len(output.tokens)} tokens: '
      f'{output.detail}',
      highlight=False,
      markup=False,
    )
  if any('finite' in output.detail for output in failed):
    console.print(
      'Where a value is not finite, experts and token cannot be told. Check '
      'the weights; if they are sound, try --set=dtype=float32.'
    )
  return bool(failed)
