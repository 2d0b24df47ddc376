"""Ctrl-C as a flag that is looked at where stopping is safe.

An exception in the middle of a launch would lose arrays that the launch has
taken over.
"""

import signal
from types import FrameType


class Interrupt:
  """While it is entered, the first Ctrl-C sets `asked`, the second raises.

  Attributes:
    asked: whether Ctrl-C was pressed.
  """

  def __init__(self) -> None:
    self.asked = False

  def __enter__(self) -> 'Interrupt':
    self._before = signal.signal(signal.SIGINT, self._note)
    return self

  def __exit__(self, *_: object) -> None:
    signal.signal(signal.SIGINT, self._before)

  def _note(self, number: int, frame: FrameType | None) -> None:
    del number, frame
    if self.asked:
      raise KeyboardInterrupt
    self.asked = True
