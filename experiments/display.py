"""What a person sees while a run goes on."""

import time

import rich.console
import rich.live
import rich.table

from bevy_jax import engine as engine_lib
from bevy_jax import events

_EVERY = 0.25  # Seconds between looks; drawing takes time from the run.


class Meter:
  """Running figures of an engine, read from its log as it grows."""

  def __init__(self, engine: engine_lib.Engine):
    self._log = engine.log
    self._read = len(engine.log)
    self._begun: dict[int, int] = {}
    self._issued: dict[int, int] = {}
    self._landed = self._seen = 0
    self._first = 0
    self._last = 0
    self.tokens = self.active = self.done = self.loads = 0
    self.uses = self.hits = self.link = self.device = 0

  def update(self) -> None:
    """Reads what has been added to the log."""
    while self._read < len(self._log):
      self._take(self._log[self._read])
      self._read += 1

  def figures(self) -> dict[str, str]:
    """What to show, by name."""
    elapsed = max(1, self._last - self._first)
    return {
      'requests': f'{self.active} active, {self.done} done',
      'tokens': f'{self.tokens}',
      'tokens/s': f'{self.tokens * 1e9 / elapsed:.1f}',
      'hit rate': f'{self.hits / max(1, self.uses):.3f}',
      'loads': f'{self.loads}',
      'link busy': f'{self.link / elapsed:.0%}',
      'device busy': f'{self.device / elapsed:.0%}',
    }

  def _take(self, event: events.Event) -> None:
    self._first = self._first or event.time
    self._last = max(self._last, event.time)
    if isinstance(event, events.Routed):
      self.uses += len(event.experts)
      self.hits += event.hits
    elif isinstance(event, events.LaunchBegun):
      self._begun[event.launch] = event.time
    elif isinstance(event, events.LaunchEnded):
      begun = max(self._begun.pop(event.launch), self._seen)
      self.device += event.time - begun
      self._seen = event.time
    elif isinstance(event, events.LoadIssued):
      self.loads += 1
      self._issued[event.key] = event.time
    elif isinstance(event, events.LoadLanded):
      issued = self._issued.pop(event.key)
      self.link += event.time - max(issued, self._landed, *event.read[1:])
      self._landed = event.time
    elif isinstance(event, events.Token):
      self.tokens += 1
    elif isinstance(event, events.Admitted):
      self.active += 1
    elif isinstance(event, events.Finished):
      self.active -= 1
      self.done += 1


class Display:
  """A live table on a terminal; elsewhere a line now and then.

  A context manager. `tick` may be called as often as one likes.
  """

  def __init__(
    self, console: rich.console.Console, title: str, engine: engine_lib.Engine
  ):
    self._console, self._title = console, title
    self._meter = Meter(engine)
    self._live = rich.live.Live(console=console, auto_refresh=False)
    self._next = 0.0

  def __enter__(self) -> 'Display':
    if self._console.is_terminal:
      self._live.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._draw()
    if self._console.is_terminal:
      self._live.stop()

  def tick(self) -> None:
    """Draws if it is time to."""
    now = time.monotonic()
    if now < self._next:
      return
    patience = 1 if self._console.is_terminal else 40
    self._next = now + _EVERY * patience
    self._draw()

  def _draw(self) -> None:
    self._meter.update()
    figures = self._meter.figures()
    if not self._console.is_terminal:
      parts = '  '.join(f'{k} {v}' for k, v in figures.items())
      self._console.print(f'{self._title}: {parts}', highlight=False)
      return
    table = rich.table.Table(title=self._title, title_justify='left')
    for name in figures:
      table.add_column(name, justify='right')
    table.add_row(*figures.values())
    self._live.update(table, refresh=True)
