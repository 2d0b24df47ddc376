"""Schedulers on the same work, round by round, and what the rounds say."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bevy_jax.experiments import run

_BAR = 0.65  # Of the ideal overlap 1 / max(s, 1 - s).
# What one scheduler must reach beside another: the median ratio, or where it
# only may not lose, the lower bound of it, which noise may push below 1.
_BARS = {
  ('bevy', 'lockstep'): ('ratio', 1.2),
  ('runahead', 'bevy'): ('lower', 0.97),
}
_DOUBT = 0.05  # That the median is below its lower bound.


class Pair(NamedTuple):
  """One run of each side, one after the other.

  Attributes:
    base: report of the first side.
    other: report of the second side.
    ratio: the second side's tokens/s over the first's.
    same: whether both gave the same tokens.
  """

  base: dict[str, Any]
  other: dict[str, Any]
  ratio: float
  same: bool


def measure(
  bench: run.Bench, count: int, say: Callable[[str], None]
) -> list[Pair]:
  """Runs A B A B ... for the first two variants of the bench's config.

  Raises:
    ValueError: tokens differ although the arithmetic is exact.
    KeyboardInterrupt: Ctrl-C ended a run.
  """
  first, second = bench.config.variants()[:2]
  measured = []
  for number in range(count):
    sides = []
    for variant in (first, second):
      sides.append(bench.run(*variant))
      if sides[-1].interrupted:
        raise KeyboardInterrupt
    base, other = sides
    same = [o.tokens for o in base.outputs] == [o.tokens for o in other.outputs]
    if bench.exact and not same:
      raise ValueError(
        f'pair {number}: {first} and {second} gave different tokens; the '
        'scheduling changed the answer, which is a fault of this program.'
      )
    speeds = base.report['tokens_per_s'], other.report['tokens_per_s']
    ratio = speeds[1] / speeds[0]
    measured.append(Pair(base.report, other.report, ratio, same))
    say(
      f'pair {number + 1}: {speeds[0]:.1f} and {speeds[1]:.1f} tokens/s, '
      f'ratio {ratio:.3f}, s {base.report["gpu_busy"]:.2f}'
    )
  return measured


def judge(measured: Sequence[Pair]) -> dict[str, Any]:
  """Medians, the ratio with its lower 95 % bound, and the bar.

  `share` is the device share of the first side's time as it was measured:
  lockstep has one launch at a time, so its busy time is its device time.
  """
  ratios = sorted(pair.ratio for pair in measured)
  share = _median(p.base['gpu_busy'] for p in measured)
  ideal = 1 / max(share, 1 - share)
  outcome: dict[str, Any] = {
    'link': measured[0].base['link'],
    'device': measured[0].base['device'],
    'versions': measured[0].base['versions'],
    'share_s': share,
    'ratios': [round(pair.ratio, 3) for pair in measured],
    'ratio': statistics.median(ratios),
    'ratio_lower_95': lower(ratios),
    'bar': _BAR * ideal,
    'ideal': ideal,
    'share_in_range': 0.4 <= share <= 0.6,
    'met': statistics.median(ratios) >= _BAR * ideal,
    'same_tokens': all(pair.same for pair in measured),
  }
  for side in ('base', 'other'):
    reports = [getattr(pair, side) for pair in measured]
    outcome[side] = {
      'tokens_per_s': _median(r['tokens_per_s'] for r in reports),
      'gpu_busy': _median(r['gpu_busy'] for r in reports),
      'link_busy': _median(r['link_busy'] for r in reports),
      'mean_group': _median(r['mean_group'] for r in reports),
      'loads': _median(r['loads'] for r in reports),
      'host_us_a_launch': {
        k: _median(r['host_us'][k] for r in reports)
        for k in reports[0]['host_us']
      },
    }
  return outcome


def lower(ratios: Sequence[float]) -> float | None:
  """What the median exceeds with 95 % confidence; None of too few.

  That is the highest of the ordered ratios of which it is unlikely enough
  that it lies above the median: as unlikely as so few tails among coins.
  """
  count, doubt, rank = len(ratios), 0.0, 0
  while True:
    doubt += math.comb(count, rank) / 2**count
    if doubt > _DOUBT:
      return sorted(ratios)[rank - 1] if rank else None
    rank += 1


def rounds(
  bench: run.Bench, count: int, say: Callable[[str], None]
) -> list[dict[str, dict[str, Any]]]:
  """Runs A B C A B C ...; each round's reports by scheduler.

  Raises:
    ValueError: tokens differ although the arithmetic is exact.
    KeyboardInterrupt: Ctrl-C ended a run.
  """
  variants, found = bench.config.variants(), []
  for number in range(count):
    done = {}
    for variant in variants:
      done[variant[0]] = bench.run(*variant)
      if done[variant[0]].interrupted:
        raise KeyboardInterrupt
    texts = {
      name: [o.tokens for o in side.outputs] for name, side in done.items()
    }
    first = next(iter(texts))
    other = [name for name in texts if texts[name] != texts[first]]
    if bench.exact and other:
      raise ValueError(
        f'round {number}: {first} and {other} gave different tokens; the '
        'scheduling changed the answer, which is a fault of this program.'
      )
    found.append({name: side.report for name, side in done.items()})
    speeds = (
      f'{name} {side.report["tokens_per_s"]:.1f}' for name, side in done.items()
    )
    say(f'round {number + 1}: {", ".join(speeds)} tokens/s')
  return found


def ratios(found: Sequence[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
  """Each scheduler beside the one before it in the rounds, and its bar.

  A ratio is that of two runs of the same round; `lower` is its median's lower
  95 % bound, None where there are too few or too many rounds to tell.
  """
  names, out = list(found[0]), []
  for base, other in itertools.pairwise(names):
    each = sorted(
      r[other]['tokens_per_s'] / r[base]['tokens_per_s'] for r in found
    )
    ratio, least = statistics.median(each), lower(each)
    row: dict[str, Any] = {
      'ratio_of': f'{other} / {base}',
      'ratio': round(ratio, 3),
      'lower_95': least and round(least, 3),
      'rounds': len(each),
    }
    if (other, base) in _BARS:
      kind, bar = _BARS[other, base]
      seen = least if kind == 'lower' and least is not None else ratio
      row |= {'bar': f'{kind} >= {bar}', 'met': seen >= bar}
    out.append(row)
  return out


def _median(values: Any) -> float:
  return round(float(statistics.median(values)), 4)
