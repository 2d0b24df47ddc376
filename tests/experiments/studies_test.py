"""What experiments say of their rows: other numbers, other sentences."""

import pytest
from absl.testing import absltest, parameterized

from bevy_jax.experiments import (
  cell_figures,
  claims,
  demo_cells,
  prefetch_accuracy,
  prefetch_benefit,
  scheduler_ablation,
  simulated_cells,
  stall_breakdown,
  throughput,
)


def _cell(speed, cache=0.5, variant=('runahead', 'reuse', 'none'), **more):
  key = cell_figures.key('rtx4090', 8, cache, variant)
  return key | {'tokens_per_s': speed, 'gpu_busy': 0.5} | more


class ClaimsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({'a': 1.2, 'b': 1.4}, 'not reproduced in any of 2 cells'),
    ({'a': 1.2, 'b': 1.6}, 'reproduced in 1 of 2 cells (b)'),
    ({'a': 1.55, 'b': 1.6}, 'reproduced in 2 of 2 cells (a; b)'),
    ({}, 'nothing ran'),
  )
  def test_reached(self, ratios, words):
    """Seen to fail with `>` for `>=`."""
    self.assertIn(words, claims.reached('over it', ratios, 1.55))

  @parameterized.parameters((0.5, 2.0), (0.2, 1.25), (0.8, 1.25), (1.0, 1.0))
  def test_overlap(self, share, most):
    self.assertAlmostEqual(claims.overlap(share), most)


class AccuracyTest(parameterized.TestCase):
  @parameterized.parameters(
    (0.5, 0.2, 'makes 1 of 1 predictors see less of what is missing (history)'),
    (0.2, 0.5, 'makes 0 of 1 predictors see less of what is missing.'),
  )
  def test_whether_a_larger_cache_makes_it_worse(self, small, large, words):
    rows = [
      {'place': 'trace', 'requests': 8, 'cache': cache, 'eviction': 'lru',
       'prefetch': 'history', 'missing_recall': recall, 'guess_accuracy': 0.6,
       'wasted': 0.1 * cache}
      for cache, recall in ((0.25, small), (0.75, large))
    ]  # fmt: skip
    said = prefetch_accuracy.say(rows)
    self.assertIn(words, said[0])
    self.assertIn(f'history {small:.0%} to {large:.0%}', said[0])
    self.assertIn('history at 75.0%', said[1])


class BenefitTest(parameterized.TestCase):
  @parameterized.parameters(
    (0.9, 1.3, 'unguarded hurts at 25.0% (0.90x); it gives most at 75.0%'),
    (1.1, 1.3, 'unguarded never hurts here; it gives most at 75.0%'),
    (0.9, 0.8, 'hurts at 25.0% (0.90x), 75.0% (0.80x); it gives most at 25.0%'),
  )
  def test_where_it_hurts(self, small, large, words):
    """Seen to fail with speeds over those of the smallest cache."""
    guess = ('lockstep', 'lru', 'history:guarded=false')
    rows = [_cell(50, 0.0, cell_figures.NO_CACHE)]
    for cache, bare, gain in ((0.25, 100, small), (0.75, 200, large)):
      rows += [
        _cell(400, cache),
        _cell(bare, cache, ('lockstep', 'lru', 'none')),
        _cell(bare * gain, cache, guess),
        _cell(800, cache, ('lockstep', 'lru', 'oracle:p=0.8')),
      ]
    said = prefetch_benefit.say(rows)
    self.assertIn(words, said[0])
    over = f'it is {2 / large:.2f} to {4 / small:.2f}'
    real = 'Runahead over the fastest real prefetcher with lru: '
    self.assertIn(real + over, ' '.join(said))
    self.assertIn('fastest oracle with lru: it is 0.50', ' '.join(said))
    self.assertIn('over no cache: it is 8.00', said[-1])
    self.assertIn('3.46 of the article is reached in 2 of 2', said[-1])


class ThroughputTest(absltest.TestCase):
  def _rows(self, ours):
    return [
      _cell(10, 0.0, cell_figures.NO_CACHE),
      _cell(500, 1.0, ('lockstep', 'reuse', 'none')),
      _cell(20, 0.5, ('lockstep', 'lru', 'none')),
      _cell(25, 0.5, ('lockstep', 'lru', 'mixture:guarded=false')),
      _cell(30, 0.5, ('lockstep', 'reuse', 'none'), gpu_busy=0.2),
      _cell(40, 0.5, ('lockstep', 'reuse', 'mixture')),
      _cell(ours, 0.5),
    ]

  def test_ratios(self):
    """Seen to fail with the first prefetcher for the fastest one."""
    (found,) = throughput.ratios(self._rows(50))
    self.assertEqual((found.none, found.published), (5, 2))
    self.assertEqual(found.prefetch, 1.25)
    self.assertAlmostEqual(found.lockstep, 5 / 3)
    self.assertEqual((found.share, found.resident), (0.2, 0.1))

  def test_sentences_follow(self):
    said = throughput.say('rtx4090', throughput.ratios(self._rows(50)))
    self.assertIn('3.46 of the article is reached in 1 of 1', said[0])
    self.assertIn('1.55 of the article is reproduced in 1 of 1', said[1])
    self.assertIn('1.55 of the article is not reproduced in any', said[2])
    self.assertIn('above 1 / max(s, 1 - s) in 1 of 1 cells', said[3])
    slow = throughput.say('rtx4090', throughput.ratios(self._rows(31)))
    self.assertIn('3.46 of the article is not reached in any', slow[0])
    self.assertIn('above 1 / max(s, 1 - s) in 0 of 1 cells', slow[3])


class AblationTest(absltest.TestCase):
  def test_worth(self):
    """Seen to fail with speeds over the fastest part's."""
    place = {'place': 'rtx4090', 'requests': 8, 'cache': 0.5}
    rows = [
      place | {'part': part, 'tokens_per_s': speed}
      for part, speed in (
        ('whole', 100), ('a', 100.2), ('b', 110), ('c', 80),
      )
    ]  # fmt: skip
    said = scheduler_ablation.say(rows)
    self.assertIn('c: 0.800 of the speed of the whole; most is lost', said[0])
    self.assertIn('a: 1.002', said[1])
    self.assertIn('no slower and no faster everywhere', said[1])
    self.assertIn('b: 1.100 of the speed of the whole, faster', said[2])


class StallTest(absltest.TestCase):
  def _row(self, speed, link, layers, variant):
    spent = {'device_alone': 0.9 - link, 'both': 0.1, 'neither': 0.0}
    return _cell(
      speed, variant=variant, link_alone=link, stall_by_layer=layers, **spent
    )

  def test_sentences(self):
    """Seen to fail with shares for milliseconds: 0.5 is less than 0.6."""
    slow = self._row(100, 0.5, '0.4 0.1', ('lockstep', 'lru', 'none'))
    fast = self._row(200, 0.6, '0.2 0.4', ('runahead', 'reuse', 'none'))
    first, second = stall_breakdown.say([slow, fast])
    self.assertIn('5.00 ms a token with lockstep, lru, the most', first)
    self.assertIn('3.00 ms with runahead, reuse, the least', first)
    self.assertIn('runahead, reuse, 2.00x lockstep, lru', second)
    self.assertIn('most for layer 1, 67% of all', second)
    self.assertEqual(sum(stall_breakdown.per_token(slow).values()), 10)


class PartsTest(absltest.TestCase):
  def test_requests_that_were_not_recorded_are_parts_of_others(self):
    """Seen to fail with parts that begin at the same token."""
    settings = simulated_cells.Settings(skip=2, tokens=6)
    key = cell_figures.key('rtx4090', 20, 0.5, cell_figures.NO_CACHE)
    sim, note = simulated_cells.simulate(key, settings)
    self.assertEqual(note, 'parts of 6 tokens of recorded requests')
    whole, _ = simulated_cells.simulate(key | {'requests': 16}, settings)
    experts = sim.trace.experts
    self.assertEqual(experts.shape[:2], (32, 6))
    self.assertTrue((experts[1] == whole.trace.experts[0, 6:12]).all())
    self.assertTrue((experts[2] == whole.trace.experts[1, :6]).all())
    with self.assertRaisesRegex(ValueError, 'too few to cut'):
      simulated_cells.simulate(key | {'requests': 999}, settings)


@pytest.mark.slow
class DemoTest(absltest.TestCase):
  def test_a_measured_cell(self):
    """One request, where there are rows for two.

    Seen to fail with as many requests as there are rows.
    """
    settings = demo_cells.Settings(
      rows=2, link='device_put', tokens=8, new_tokens=(2, 6), warmup=1
    )
    key = cell_figures.key('demo', 1, 0.5, ('lockstep', 'lru', 'none'))
    found = demo_cells.measure(key, settings)
    self.assertEqual(found['mean_group'], 1)
    self.assertEqual(found['tokens'], 5)
    parts = [found[name] for name in stall_breakdown.SHARES]
    self.assertAlmostEqual(sum(parts), 1, places=3)


if __name__ == '__main__':
  absltest.main()
