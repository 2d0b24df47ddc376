"""A launch's answer on the host, taken apart hop by hop."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from bevy_jax import protocols


def read(
  k: int, told: Iterable[list[list[int]]], gates: Sequence[int]
) -> list[protocols.Hop]:
  """A launch's answer on the host, up to the last hop that anybody took.

  Args:
    k: choices of a row.
    told: what each hop answers of each row, see `steps.decode`.
    gates: MoE layers that each hop guesses.
  """
  found: list[protocols.Hop] = []
  end = 2 + k
  for rows, count in zip(told, gates, strict=True):
    places: list[int] = []
    tokens: list[int] = []
    sound: list[bool] = []
    choices: list[tuple[int, ...]] = []
    guesses: list[list[tuple[int, ...]]] = []
    for place, row in enumerate(rows):
      if found and row[1] < 0:
        continue
      places.append(place)
      tokens.append(row[0])
      sound.append(row[1] > 0)
      choices.append(tuple(row[2:end]))
      if count:
        starts = range(end, end + count * k, k)
        guesses.append([tuple(row[s : s + k]) for s in starts])
    if not places:
      break
    # Who comes to the first one need not be told: all do.
    some = places if found else ()
    found.append(protocols.Hop(tokens, sound, choices, guesses, some))
  return found


def hop_by_hop(
  k: int, table: npt.NDArray[np.int32], gates: Sequence[int]
) -> Iterator[list[list[int]]]:
  """Takes the answer of `steps.decode` apart for `read`."""
  at = 0
  for count in gates:
    end = at + 2 + k + count * k
    yield table[:, at:end].tolist()
    at = end


def passed(
  table: npt.NDArray[np.int32], experts: int
) -> protocols.Passed | None:
  """An answer in short; None where somebody stopped or was not sound.

  Args:
    table: int32 `[hops, rows, 2 + k]`, what each hop answers of each row.
    experts: E, of a layer.
  """
  if table[:, :, 1].min() <= 0:
    return None
  last = table[-1].tolist()
  hop = protocols.Hop(
    [row[0] for row in last],
    [True] * len(last),
    [tuple(row[2:]) for row in last],
  )
  seen = np.zeros((len(table), experts), np.bool_)
  ids = table[:-1, :, 2:].reshape(len(table) - 1, -1)
  seen[np.arange(len(ids))[:, None], ids] = True
  heads = np.flatnonzero(table[:, 0, 0] >= 0).tolist()
  tokens = table[heads[0], :, 0].tolist() if heads else ()
  return protocols.Passed(hop, tokens, int(np.count_nonzero(seen)))
