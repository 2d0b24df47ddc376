"""The stretch of a run that is measured: no ramp, no tail."""

import dataclasses
from collections.abc import Sequence

from bevy_jax import events

_NS = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
  """From the begin of one decode launch to the end of a later one.

  What the last launch reveals is loaded after the window; uses, loads and
  evictions are therefore counted strictly between `first` and `last`, and
  tokens up to and with `end`.

  Attributes:
    begin: ns of the executor's clock.
    end: likewise.
    first: index in the log of the first launch's begin.
    last: index in the log of the last launch's end.
    note: what a reader must know about it, empty where nothing.
  """

  begin: int
  end: int
  first: int
  last: int
  note: str = ''

  @property
  def seconds(self) -> float:
    """Its length."""
    return (self.end - self.begin) * _NS

  def inside(self, log: Sequence[events.Event]) -> Sequence[events.Event]:
    """The events strictly between its first and its last one."""
    return log[self.first + 1 : self.last]

  def tokens(self, log: Sequence[events.Event]) -> int:
    """Tokens that were finished in it."""
    return sum(
      isinstance(e, events.Token) and self.begin < e.time <= self.end
      for e in log
    )


def find(log: Sequence[events.Event], rows: int, warmup: int) -> Window:
  """The measured window of a run.

  It opens with the first decode launch at which all rows decode (all
  requests, where there are fewer than rows) and each of them has done
  `warmup` tokens, and closes with the last decode launch that ends while
  all rows decode. Requests too short for that are measured without warm-up,
  and where the rows never decode together the whole of decoding is
  measured; the note says so.

  Raises:
    ValueError: no decode launch has ended.
  """
  full = min(rows, sum(isinstance(e, events.Admitted) for e in log))
  found = _scan(log, full, warmup)
  note = ''
  if found is None:
    found = _scan(log, full, 0)
    note = (
      f'requests ended before all had done {warmup} warm-up tokens: measured '
      'without warm-up'
    )
  if found is None:
    found = _scan(log, None, 0)
    note = f'{full} rows never decoded together: all of decoding is measured'
  if found is None:
    raise ValueError(
      f'the log of {len(log)} events has no decode launch that ended, so there '
      'is nothing to measure; let every request generate at least one token.'
    )
  first, last = found
  late = sum(
    len(e.requests) for e in log[first:last] if isinstance(e, events.Prefilled)
  )
  if late:
    more = f'{late} prompts were prefilled inside the window'
    note = f'{note}; {more}' if note else more
  return Window(
    begin=log[first].time,
    end=log[last].time,
    first=first,
    last=last,
    note=note,
  )


def _scan(
  log: Sequence[events.Event], full: int | None, warmup: int
) -> tuple[int, int] | None:
  """Indices of the first begin and the last end; `full` None: any rows."""
  done: dict[int, int] = {}
  decode: set[int] = set()
  first, last = None, None
  for i, event in enumerate(log):
    match event:
      case events.Prefilled(requests=requests):
        done.update(dict.fromkeys(requests, 0))
      case events.Token(request=request):
        done[request] += 1
      case events.Finished(request=request):
        done.pop(request, None)
      case events.LaunchBegun(kind='decode', launch=launch):
        if first is None and full in (None, len(done)):
          first = i if min(done.values(), default=0) >= warmup else None
        if first is not None:
          decode.add(launch)
      case events.LaunchEnded(launch=launch) if launch in decode:
        last = i if full in (None, len(done)) else last
      case _:
        pass
  return None if first is None or last is None else (first, last)
