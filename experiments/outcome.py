"""What a launcher hands back, and how its process ends."""

from collections.abc import Mapping
from typing import Any, NamedTuple

# Exit codes, the same everywhere; README has them too.
OK = 0
FAILED = 1  # An error while it ran, or a bar that is not met.
USAGE = 2  # What was asked for cannot be; nothing has run.
FAULT = 70  # Of this program.
INTERRUPTED = 130  # Ctrl-C, as shells have it.


class Outcome(NamedTuple):
  """What a launcher has found.

  Attributes:
    report: all of it, fit for JSON; empty where nothing was found.
    shown: what a person sees of it, last: tables and lines.
    code: how the process ends.
  """

  report: Mapping[str, Any]
  shown: tuple[Any, ...] = ()
  code: int = OK


def judged(met: bool) -> int:
  """The exit code of a launcher that has a bar."""
  return OK if met else FAILED
