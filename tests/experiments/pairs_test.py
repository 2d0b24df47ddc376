"""Rounds of several schedulers, on a bench that is a script.

Seen to fail with the median in place of its bound, and with tokens that
nobody compares.
"""

import types
from typing import Any

from absl.testing import absltest, parameterized

from bevy_jax.experiments import configs, pairs, run

_ORDER = ('lockstep', 'bevy', 'runahead')


class _Bench:
  """Tokens/s and tokens as they are told, one list a scheduler."""

  exact = True

  def __init__(self, speeds: dict[str, list[float]], liar: str = ''):
    self.config = configs.Decode(compare=tuple(speeds))
    self.ran: list[str] = []
    self._speeds, self._liar = speeds, liar

  def run(self, scheduler: str, eviction: str, prefetch: str) -> run.Run:
    del eviction, prefetch
    number = self.ran.count(scheduler)
    self.ran.append(scheduler)
    tokens = (1, 2 if scheduler == self._liar and number else 3)
    report = {'tokens_per_s': self._speeds[scheduler][number]}
    output: Any = types.SimpleNamespace(tokens=tokens)
    return run.Run(report, [], [output])


def _steady(bevy: float, runahead: float) -> dict[str, list[float]]:
  # A machine that is twice as fast in every other round.
  return {
    'lockstep': [100.0, 200.0] * 3 + [100.0],
    'bevy': [100 * bevy, 200 * bevy] * 3 + [100 * bevy],
    'runahead': [100 * runahead, 200 * runahead] * 3 + [80 * runahead],
  }


class RoundsTest(parameterized.TestCase):
  def _ratios(self, speeds: dict[str, list[float]]) -> list[dict[str, Any]]:
    self.bench = _Bench(speeds)
    said: list[str] = []
    found = pairs.rounds(self.bench, len(speeds['bevy']), said.append)
    self.assertLen(said, len(speeds['bevy']))
    return pairs.ratios(found)

  def test_round_by_round_each_beside_the_one_before(self):
    first, second = self._ratios(_steady(1.25, 1.3))
    self.assertEqual(self.bench.ran, [*_ORDER] * 7)
    self.assertEqual(first['ratio_of'], 'bevy / lockstep')
    self.assertEqual((first['ratio'], first['lower_95']), (1.25, 1.25))
    self.assertEqual(second['ratio_of'], 'runahead / bevy')
    # The least of seven is the bound: its last round was slow.
    self.assertEqual((second['ratio'], second['lower_95']), (1.04, 0.832))

  @parameterized.parameters(
    (1.2, 1.6, True, True), (1.19, 1.5, False, True), (1.3, 1.3, True, False)
  )
  def test_bars(self, bevy, runahead, first, second):
    found = self._ratios(_steady(bevy, runahead))
    self.assertEqual([row['met'] for row in found], [first, second])

  @parameterized.parameters(
    (0, None), (4, None), (5, 1), (7, 1), (8, 2), (11, 3), (14, 4), (21, 7)
  )
  def test_the_bound_of_so_many(self, count, rank):
    """By the binomial distribution, one-sided, 95 %."""
    ratios = [float(i) for i in range(count, 0, -1)]
    self.assertEqual(pairs.lower(ratios), rank)

  def test_few_rounds_have_no_bound_but_a_median(self):
    few = {k: v[:3] for k, v in _steady(1.3, 1.3).items()}
    second = self._ratios(few)[1]
    self.assertIsNone(second['lower_95'])
    self.assertTrue(second['met'])

  def test_other_tokens_are_refused(self):
    bench = _Bench(_steady(1.3, 1.3), liar='runahead')
    with self.assertRaisesRegex(ValueError, r"round 1.*\['runahead'\]"):
      pairs.rounds(bench, 2, print)


if __name__ == '__main__':
  absltest.main()
