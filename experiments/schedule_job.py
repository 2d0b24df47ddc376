"""Logs to draw, read or simulated, and their picture."""

import pathlib
from typing import Any, NamedTuple

from bevy_jax import events as events_lib
from bevy_jax.experiments import configs, schedule_picture, simulation


class View(NamedTuple):
  """What is drawn.

  Attributes:
    replay: simulated where there are no event files.
    events: event files.
    experts: of a layer, in these files.
    skip: tokens a request before the picture.
    begin_ms: when it begins, after that.
    length_ms: of time; None for some tokens.
  """

  replay: simulation.Replay
  events: tuple[str, ...]
  experts: int
  skip: int
  begin_ms: float
  length_ms: float | None


def draw(view: View) -> Any:
  """The picture, a matplotlib figure."""
  title, experts = '', view.experts
  if view.events:
    named = {pathlib.Path(p).name: p for p in view.events}
    logs = {name: events_lib.load(p)[1] for name, p in named.items()}
  else:
    config = view.replay
    whole = simulation.Simulation(config)
    runs = config.variants()
    logs = {configs.title(v): whole.run(*v).log for v in runs}
    experts = whole.trace.num_experts
    title = f'{config.model_shape}, {config.trace} routing, '
    title += f'{config.platform} simulated, cache {config.cache}'
  return schedule_picture.draw(
    logs,
    experts,
    skip=view.skip,
    begin_ms=view.begin_ms,
    length_ms=view.length_ms,
    title=title,
  )
