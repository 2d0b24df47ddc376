"""A schedule as a picture: requests against time, the link beneath."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bevy_jax import busy, events, timeline
from bevy_jax import window as window_lib
from bevy_jax.experiments import figures_style

_MS = 1e-6  # of a nanosecond
_BAR = 0.8  # of a line's height
_PALETTE = 'viridis'
_IDLE, _STALL = '#f0f0f0', '#d62728'


# Runs by name.
Logs = Mapping[str, Sequence[events.Event]]


class Bar(NamedTuple):
  """A stretch of time on one line.

  Attributes:
    line: a request's number, 'device' or 'link'.
    kind: 'launch'; 'stall', until the last expert that a request awaits has
      landed; 'ready', until a launch takes it on; 'load' or 'prefetch'.
    layer: the MoE layer that it is about, -1 where none.
    begin: ns of the log's clock.
    end: likewise.
  """

  line: int | str
  kind: str
  layer: int
  begin: int
  end: int


def bars(log: Sequence[events.Event], experts: int) -> list[Bar]:
  """Everything that a picture shows; launches and loads as `busy` has them.

  Args:
    log: a run's events.
    experts: of a layer, by which keys tell the layer.
  """
  found = []
  for ran in busy.launches(log):
    layer = ran.event.layer
    lines: list[int | str] = ['device', *ran.event.requests]
    found += [Bar(x, 'launch', layer, ran.begin, ran.end) for x in lines]
  landed = [e for e in log if isinstance(e, events.LoadLanded)]
  for key, load, cause in zip(
    [e.key for e in landed], busy.loads(log), _causes(log), strict=True
  ):
    kind = 'prefetch' if cause == 'prefetch' else 'load'
    found.append(Bar('link', kind, key // experts, load.begin, load.end))
  found += _waits(log, landed, experts)
  return found


def draw(
  runs: Logs,
  experts: int,
  *,
  skip: int = 1,
  begin_ms: float = 0.0,
  length_ms: float | None = None,
  title: str = '',
) -> Any:
  """Runs beside each other, a panel each, over equally long stretches.

  A bar of colour is a request in a launch, hatched red one that waits for
  loads, grey one that waits for the device alone. Beneath, what device and
  link do; the colour is the layer everywhere.

  Args:
    runs: event logs by name.
    experts: of a layer.
    skip: tokens that every request has done before a panel begins.
    begin_ms: how long after that moment it begins.
    length_ms: how long all of them are; None for the time in which the first
      run gives every request one more token, and three quarters of it.
    title: above the picture.

  Returns:
    A matplotlib Figure; notebooks show it as it is.

  Raises:
    ValueError: there is no run, or matplotlib is not installed.
  """
  if not runs:
    raise ValueError('there is no run to draw: give at least one event log.')
  starts = [_begin(log, skip) for log in runs.values()]
  first = next(iter(runs.values()))
  ns = round(length_ms / _MS) if length_ms else _stretch(first, starts[0])
  rows = max(len(_requests(log)) for log in runs.values())
  made, axes = figures_style.figure(
    title, 7.2 * len(runs) + 0.8, 0.42 * rows + 3.0, 1, len(runs)
  )
  layers = 1 + max(bar.layer for log in runs.values()
                   for bar in bars(log, experts))  # fmt: skip
  colours = _colours(layers)
  for (name, log), start, panel in zip(
    runs.items(), starts, axes[0], strict=True
  ):
    start += round(begin_ms / _MS)
    _panel(panel, log, experts, (start, start + ns), colours)
    panel.set_title(f'{name}: {summary(log, start, start + ns)}')
  _key(made, axes[0], colours)
  return made


def summary(log: Sequence[events.Event], begin: int, end: int) -> str:
  """Tokens of a stretch, and how busy device and link were, in words."""
  tokens = sum(isinstance(e, events.Token) and begin < e.time <= end
               for e in log)  # fmt: skip
  device = busy.covered(
    ((r.begin, r.end) for r in busy.launches(log)), begin, end
  )
  link = busy.covered(busy.loads(log), begin, end)
  whole = end - begin
  return (
    f'{tokens} tokens in {whole * _MS:.1f} ms, device busy '
    f'{device / whole:.0%}, link {link / whole:.0%}'
  )


def _causes(log: Sequence[events.Event]) -> Iterable[str]:
  """Why each load that landed had been begun, in the order of landings."""
  causes: dict[int, str] = {}
  for event in log:
    if isinstance(event, events.LoadIssued):
      causes[event.key] = event.cause
    elif isinstance(event, events.LoadLanded):
      yield causes[event.key]


def _waits(
  log: Sequence[events.Event],
  landed: Sequence[events.LoadLanded],
  experts: int,
) -> Iterable[Bar]:
  """A stall until the last load that was awaited, then ready."""
  times: dict[int, list[int]] = {}
  for event in landed:
    times.setdefault(event.key, []).append(event.time)
  for wait in timeline.waits(log):
    (begin, end), came = wait.span, wait.span[0]
    for expert in wait.experts if wait.missing else ():
      for time in times.get(wait.layer * experts + expert, ()):
        if begin < time <= end:
          came = max(came, time)
    if came > begin:
      yield Bar(wait.request, 'stall', wait.layer, begin, came)
    if end > came:
      yield Bar(wait.request, 'ready', wait.layer, came, end)


def _begin(log: Sequence[events.Event], skip: int) -> int:
  """Of the stretch in which all rows decode."""
  rows = len(_requests(log))
  return window_lib.find(log, rows, skip).begin


def _requests(log: Sequence[events.Event]) -> list[int]:
  return [e.request for e in log if isinstance(e, events.Admitted)]


def _stretch(log: Sequence[events.Event], begin: int) -> int:
  """1.75 times what one more token for everybody takes, in ns."""
  given = dict.fromkeys(_requests(log), 0)
  for event in log:
    if isinstance(event, events.Token) and event.time > begin:
      given[event.request] += 1
      if min(given.values()) >= 1:
        return (event.time - begin) * 7 // 4
  return max(1, log[-1].time - begin)


def _panel(
  axes: Any,
  log: Sequence[events.Event],
  experts: int,
  span: busy.Span,
  colours: Sequence[Any],
) -> None:
  """One run; lines from above: its requests, the device, the link."""
  begin, end = span
  lines: list[int | str] = [*_requests(log), 'device', 'link']
  at = {line: number + 0.6 * (line in ('device', 'link'))
        for number, line in enumerate(lines)}  # fmt: skip
  shown = [b for b in bars(log, experts) if b.end > begin and b.begin < end]
  for kind, style in _STYLES.items():
    own = [b for b in shown if b.kind == kind]
    for line in dict.fromkeys(b.line for b in own):
      here = [b for b in own if b.line == line]
      fill = {'facecolors': [colours[b.layer] for b in here]}
      spans = [((b.begin - begin) * _MS, (b.end - b.begin) * _MS) for b in here]
      place = at[line] - _BAR / 2, _BAR
      axes.broken_barh(spans, place, **fill | style)
  tokens = [e for e in log if isinstance(e, events.Token)]
  inside = [e for e in tokens if begin < e.time <= end]
  axes.plot(
    [(e.time - begin) * _MS for e in inside],
    [at[e.request] - 0.47 for e in inside],
    linestyle='', marker='v', color='black', markersize=4, clip_on=False,
  )  # fmt: skip
  axes.set_ylim(at['link'] + 0.6, -0.7)
  axes.set_xlim(0, (end - begin) * _MS)
  names = [f'request {x}' if isinstance(x, int) else x for x in lines]
  axes.set_yticks(list(at.values()), names)
  axes.set_xlabel('time (ms)')
  axes.grid(visible=False)


# How each kind is drawn over the colour of its layer, lowest first.
_STYLES: dict[str, dict[str, Any]] = {
  'ready': {'facecolors': _IDLE},
  'stall': {
    'facecolors': '#ffffff', 'hatch': '/////', 'edgecolor': _STALL,
    'linewidth': 0.4,
  },
  'load': {'edgecolor': 'white', 'linewidth': 0.3},
  'prefetch': {'edgecolor': 'black', 'linewidth': 0.9},
  'launch': {'linewidth': 0},
}  # fmt: skip


def _colours(layers: int) -> list[Any]:
  """One a layer; the last is for what has none."""
  import matplotlib

  whole = matplotlib.colormaps[_PALETTE]
  return [whole(n / max(1, layers - 1)) for n in range(layers)] + ['#888888']


def _key(made: Any, axes: Sequence[Any], colours: Sequence[Any]) -> None:
  """What colours, hatches and marks mean."""
  import matplotlib.cm
  import matplotlib.colors
  import matplotlib.lines
  import matplotlib.patches

  layers = len(colours) - 1
  kinds = matplotlib.colors.ListedColormap(list(colours[:-1]))
  scale = matplotlib.cm.ScalarMappable(
    matplotlib.colors.Normalize(-0.5, layers - 0.5), kinds
  )
  made.colorbar(scale, ax=list(axes), label='layer', pad=0.01, aspect=30)
  patch = matplotlib.patches.Patch
  mark = matplotlib.lines.Line2D(
    [], [], linestyle='', marker='v', color='black', markersize=5
  )
  made.legend(
    [
      patch(facecolor=colours[layers // 2]),
      patch(facecolor='white', edgecolor=_STALL, hatch='/////'),
      patch(facecolor=_IDLE),
      patch(facecolor=colours[layers // 2], edgecolor='black'),
      mark,
    ],
    ['in a launch, or a load', 'stalled: awaits loads',
     'ready: awaits device or others', 'prefetch', 'a token is done'],
    loc='outside lower center', ncols=5, fontsize=9,
  )  # fmt: skip
