"""Which expert gives up its slot: fast rules against plain scans."""

import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax.offload import eviction, uses

_LAYERS, _EXPERTS, _STREAMS, _TOP_K = 4, 6, 3, 2
_KEYS = _LAYERS * _EXPERTS


def barred(*candidates, keys=_KEYS):
  found = np.full(keys, np.inf)
  found[list(candidates)] = 0.0
  return found


class Plain:
  """The same history told again, in lists, by the words of the docs."""

  def __init__(self):
    self.log: list[tuple[str, int, float]] = []
    self.clock = 0.0

  def last(self, key, kind):
    ticks = [i + 1 for i, (k, x, _) in enumerate(self.log) if (k, x) == kind]
    return ticks[-1] if ticks else 0

  def used(self, key):
    return self.last(key, ('use', key))

  def loaded(self, key):
    return self.last(key, ('load', key))

  def count(self, key):
    return sum(k == 'use' and x == key for k, x, _ in self.log)

  def decayed(self, key):
    return sum(
      0.5 ** ((self.clock - c) / 16)
      for k, x, c in self.log
      if k == 'use' and x == key
    )

  def layer(self):
    at = [x // _EXPERTS for k, x, _ in self.log if k == 'use']
    return at[-1] if at else -1


def plain_victim(name, candidates, told, popularity):
  """By a walk over the candidates; ties: the lowest key."""
  score = {
    'lru': told.used,
    'lfu': lambda k: (told.count(k), told.loaded(k)),
    'lfu_decayed': lambda k: round(told.decayed(k), 9),
    'fifo': told.loaded,
    'least_stale': lambda k: (k // _EXPERTS >= told.layer(), told.used(k)),
    'static': popularity.__getitem__,
  }[name]
  return min(candidates, key=score)


class FastEqualsPlainTest(parameterized.TestCase):
  @parameterized.product(
    name=('lru', 'lfu', 'lfu_decayed', 'fifo', 'least_stale', 'static'),
    seed=(0, 1, 2, 3),
  )
  def test_same_victims(self, name, seed):
    rng = np.random.default_rng(seed)
    popularity = rng.integers(0, 5, _KEYS).astype(float)
    rules = eviction.EVICTIONS | {
      'static': eviction.Static(popularity=popularity)
    }
    history, told = uses.Uses(_LAYERS, _EXPERTS), Plain()
    for step in range(120):
      key = int(rng.integers(_KEYS))
      kind = 'use' if rng.random() < 0.7 else 'load'
      (history.touch if kind == 'use' else history.load)(key)
      told.log.append((kind, key, told.clock))
      if step % 7 == 0:
        told.clock += 1.5
        history.advance(told.clock)
      few = rng.choice(_KEYS, rng.integers(1, _KEYS), replace=False)
      candidates = sorted(int(k) for k in few)
      self.assertEqual(
        rules[name].victim(barred(*candidates), history),
        plain_victim(name, candidates, told, popularity),
      )

  @parameterized.parameters(*eviction.EVICTIONS)
  def test_never_a_barred_one_and_nothing_changes(self, name):
    rng = np.random.default_rng(3)
    history = uses.Uses(_LAYERS, _EXPERTS, _STREAMS, estimate=True)
    rule = eviction.EVICTIONS[name]
    for step in range(60):
      layer = step % _LAYERS
      chosen = [
        rng.choice(_EXPERTS, _TOP_K, replace=False).tolist()
        for _ in range(_STREAMS)
      ]
      history.reveal(layer, range(_STREAMS), chosen)
      for expert in chosen[0]:
        history.touch(layer * _EXPERTS + expert)
      for count in (1, 2, _KEYS):
        few = rng.choice(_KEYS, count, replace=False)
        gate = barred(*few)
        victim = rule.victim(gate, history)
        self.assertIn(victim, few)
        self.assertEqual(victim, rule.victim(gate.copy(), history))
      self.assertBetween(
        rule.victim(barred(), history), 0, _KEYS - 1, 'all are barred'
      )


class RandomTest(absltest.TestCase):
  def test_fair_and_seeded(self):
    history = uses.Uses(1, 8)
    counts = dict.fromkeys((1, 4, 7), 0)
    drawn = []
    for _ in range(3000):
      history.touch(0)
      drawn.append(eviction.Random().victim(barred(1, 4, 7, keys=8), history))
      counts[drawn[-1]] += 1
    for count in counts.values():
      self.assertBetween(count, 900, 1100)
    other = eviction.Random(seed=1).victim
    history, again = uses.Uses(1, 8), []
    for _ in range(100):
      history.touch(0)
      again.append(other(barred(1, 4, 7, keys=8), history))
    self.assertNotEqual(again, drawn[:100])


class ReuseTest(absltest.TestCase):
  def _walk(self, passes, chosen):
    history = uses.Uses(_LAYERS, _EXPERTS, _STREAMS, estimate=True)
    for _ in range(passes):
      for layer in range(_LAYERS):
        history.reveal(layer, range(_STREAMS), chosen)
    return history

  def test_what_is_not_used_goes_first(self):
    history = self._walk(5, [[0, 1], [0, 2], [0, 1]])
    rule = eviction.Reuse()
    self.assertEqual(rule.victim(barred(0, 1, 2, 3), history), 3)
    # One stream of three uses 2, two use 1, all use 0.
    self.assertEqual(rule.victim(barred(0, 1, 2), history), 2)
    self.assertEqual(rule.victim(barred(0, 1), history), 1)

  def test_among_equals_the_layer_that_comes_last(self):
    history = self._walk(5, [[0, 1]] * _STREAMS)
    # All stand at layer 3: 0 is next, and 3 comes again after all others.
    first = [layer * _EXPERTS for layer in range(_LAYERS)]
    rule = eviction.Reuse()
    self.assertEqual(rule.victim(barred(*first), history), first[3])
    self.assertEqual(rule.victim(barred(*first[:3]), history), first[2])
    history.reveal(0, range(_STREAMS), [[0, 1]] * _STREAMS)
    self.assertEqual(rule.victim(barred(*first), history), first[0])


if __name__ == '__main__':
  absltest.main()
