"""A law of schedules that was broken: which one, and by what."""


class LawBroken(AssertionError):
  """A policy, or the engine with it, has broken a law.

  Attributes:
    law: its name.
    what: what was seen.
    seed: of the world in which it happened; -1 while nobody has said.
  """

  def __init__(self, law: str, what: str, seed: int = -1, where: str = ''):
    super().__init__(f'law {law!r} is broken{where}: {what}')
    self.law, self.what, self.seed = law, what, seed


def must(holds: bool, law: str, what: str) -> None:
  """LawBroken where it does not hold; `what` is told as it is."""
  if not holds:
    raise LawBroken(law, what)
