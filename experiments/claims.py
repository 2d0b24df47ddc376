"""The article's two figures, and whether ratios reproduce them."""

from collections.abc import Mapping

LLAMA = 3.46  # times llama.cpp's decode throughput
PREFETCH = 1.55  # times the fastest prefetching baseline
_NAMED = 6  # Cells that a sentence names at most.


def over_no_cache(what: str, ratios: Mapping[str, float]) -> str:
  """The same of what stands for llama.cpp, with what that does not show."""
  found = reached(what, ratios, LLAMA, 'reached')
  return f'{found} llama.cpp itself was not run, so over it nothing is shown.'


def reached(
  what: str, ratios: Mapping[str, float], bar: float, word: str = 'reproduced'
) -> str:
  """One sentence: where ratios are at least as large as the article's figure.

  Args:
    what: over what the ratios are.
    ratios: by cell, in words.
    bar: the article's.
    word: for a ratio that is as large.
  """
  if not ratios:
    return f'{what}: nothing ran to compare with the {bar} of the article.'
  met = [cell for cell, ratio in ratios.items() if ratio >= bar]
  least, most = min(ratios.values()), max(ratios.values())
  where = max(ratios, key=lambda cell: ratios[cell])
  span = f'{least:.2f} to {most:.2f}, most at {where}'
  if not met:
    return (
      f'{what} it is {span}: the {bar} of the article is not {word} in any '
      f'of {len(ratios)} cells.'
    )
  named = '; '.join(met[:_NAMED]) + ('; ...' if len(met) > _NAMED else '')
  return (
    f'{what} it is {span}: the {bar} of the article is {word} in '
    f'{len(met)} of {len(ratios)} cells ({named}).'
  )


def overlap(share: float) -> float:
  """What overlap alone can give at most: 1 / max(s, 1 - s).

  Args:
    share: s, the device's share of lockstep's own time.
  """
  return 1 / max(share, 1 - share)
