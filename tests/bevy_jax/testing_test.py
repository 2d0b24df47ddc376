"""Broken policies are caught, each by its own law, with the way back to it.

Each of these is itself the code broken on purpose; the sound ones must pass.
With the check of its law taken out of `twice`, `watch`, `scripted` or
`testing` each row was seen to fail. Whom a launch may carry is checked twice,
where it is decided and where it is done: there both had to be taken out.
"""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from bevy_jax import (
  EvictionBase,
  Guess,
  Launch,
  PrefetcherBase,
  SchedulerBase,
  View,
  Want,
  lagging,
  law,
  testing,
)
from bevy_jax.offload import eviction
from bevy_jax.offload import uses as uses_lib

_own = dataclasses.dataclass(frozen=True, kw_only=True)


@_own
class Sound(SchedulerBase):
  """All ready requests of the layer that lags most."""

  def launch(self, view: View) -> Launch | None:
    ready = lagging.ready(view, None)
    if not ready:
      return None
    first = min(ready, key=lambda p: p.position)
    return lagging.together([p for p in ready if p.layer == first.layer])


@_own
class Never(SchedulerBase):
  def launch(self, view: View) -> Launch | None:
    return None


@_own
class TooSoon(SchedulerBase):
  """Whoever waits, whether its experts are here or not."""

  def launch(self, view: View) -> Launch | None:
    return lagging.together(view.waiting[:1]) if view.waiting else None


@_own
class LeavesOut(SchedulerBase):
  """Only the lowest expert, and calls it done."""

  def launch(self, view: View) -> Launch | None:
    ready = lagging.ready(view, None)
    if not ready:
      return None
    need = ready[0].need
    return Launch(ready[0].layer, ready[:1], need & -need)


@_own
class Nobody(SchedulerBase):
  def launch(self, view: View) -> Launch | None:
    return Launch(0, [], 0)


@_own
class MixesLayers(SchedulerBase):
  def launch(self, view: View) -> Launch | None:
    ready = lagging.ready(view, None)
    return lagging.together(ready) if ready else None


@_own
class Doubles(SchedulerBase):
  def launch(self, view: View) -> Launch | None:
    ready = lagging.ready(view, None)
    return lagging.together(ready[:1] * 2) if ready else None


@_own
class Starves(Sound):
  """Who leads is served first, and the others when nobody leads."""

  def wants(self, view: View) -> list[Want]:
    waiting = sorted(view.waiting, key=lambda p: -p.position)
    return [Want(p.layer, p.need) for p in waiting]

  def launch(self, view: View) -> Launch | None:
    ready = lagging.ready(view, None)
    if not ready:
      return None
    return lagging.together([max(ready, key=lambda p: p.position)])


@_own
class Dice(Sound):
  def launch(self, view: View) -> Launch | None:
    return super().launch(view) if random.random() < 0.5 else None


@_own
class Counts(Sound):
  """Remembers how often it was asked."""

  asked: list[int] = dataclasses.field(default_factory=list)

  def launch(self, view: View) -> Launch | None:
    self.asked.append(0)
    return super().launch(view) if len(self.asked) % 3 else None


@_own
class RunByRun(Sound):
  """Pure within a run; in every other run each request goes alone."""

  asked: list[int] = dataclasses.field(default_factory=list)

  def launch(self, view: View) -> Launch | None:
    if id(view) not in self.asked[-1:]:
      self.asked.append(id(view))
    found = super().launch(view)
    if found is None or len(self.asked) % 2:
      return found
    return lagging.together(found.group[:1])


@_own
class Meddles(Sound):
  def launch(self, view: View) -> Launch | None:
    found = super().launch(view)
    view.waiting.sort(key=lambda p: -p.row)
    return found


@_own
class WantsNonsense(Sound):
  def wants(self, view: View) -> list[Want]:
    return [Want(len(view.resident), 1)]


@_own
class Raises(Sound):
  def launch(self, view: View) -> Launch | None:
    return [][0] if view.waiting else None


@_own
class SoundEviction(EvictionBase):
  def victim(self, barred: eviction.Array, uses: eviction.Uses) -> int:
    return uses_lib.scan(-uses.loaded, barred)


@_own
class TakesTheBarred(EvictionBase):
  def victim(self, barred: eviction.Array, uses: eviction.Uses) -> int:
    return int(uses.last.argmin())


@_own
class OutOfRange(EvictionBase):
  def victim(self, barred: eviction.Array, uses: eviction.Uses) -> int:
    return len(barred)


@_own
class DrawsAgain(EvictionBase):
  def victim(self, barred: eviction.Array, uses: eviction.Uses) -> int:
    return uses_lib.scan(np.random.default_rng().random(len(barred)), barred)


@_own
class Writes(EvictionBase):
  def victim(self, barred: eviction.Array, uses: eviction.Uses) -> int:
    key = uses_lib.scan(uses.last, barred)
    uses.last[0] += 1
    return key


def _same(patterns: Any, streams: Any, depth: int) -> Guess:
  """What each stream used last at the next layers."""
  ids = np.maximum(patterns.ids[:1, streams], 0).repeat(depth, 0)
  return Guess(ids, np.full(ids.shape, 0.5))


@_own
class SoundGuess(PrefetcherBase):
  def guess(self, patterns: Any, layer: int, streams: Any) -> Guess:
    return _same(patterns, streams, self.depth)


@_own
class BadShape(PrefetcherBase):
  def guess(self, patterns: Any, layer: int, streams: Any) -> Guess:
    return _same(patterns, streams, self.depth + 1)


@_own
class TooSure(PrefetcherBase):
  def guess(self, patterns: Any, layer: int, streams: Any) -> Guess:
    found = _same(patterns, streams, self.depth)
    return found._replace(chance=found.chance * 3)


@_own
class NoSuchExpert(PrefetcherBase):
  def guess(self, patterns: Any, layer: int, streams: Any) -> Guess:
    found = _same(patterns, streams, self.depth)
    return found._replace(ids=found.ids + patterns.experts)


@_own
class Guesses(PrefetcherBase):
  def guess(self, patterns: Any, layer: int, streams: Any) -> Guess:
    found = _same(patterns, streams, self.depth)
    return found._replace(
      chance=np.random.default_rng().random(found.ids.shape)
    )


_PURE = 'the same view, the same decision'
_LOOK = 'a policy only looks'
_SOUND = 'a decision makes sense'
_BROKEN = (
  (Never(), 'no deadlock'),
  (TooSoon(), 'a launch misses no expert'),
  (LeavesOut(), 'a launch misses no expert'),
  (Nobody(), 'a launch carries somebody'),
  (MixesLayers(), 'layers in order'),
  (Doubles(), 'a row is in one launch'),
  (Starves(), 'no starvation'),
  (Dice(), _PURE),
  (Counts(), _PURE),
  (RunByRun(), 'equal runs, equal decisions'),
  (Meddles(), _LOOK),
  (WantsNonsense(), _SOUND),
  (Raises(), 'nothing is raised'),
  (TakesTheBarred(), _SOUND),
  (OutOfRange(), _SOUND),
  (DrawsAgain(), _PURE),
  (Writes(), _LOOK),
  (BadShape(), _SOUND),
  (TooSure(), _SOUND),
  (NoSuchExpert(), _SOUND),
  (Guesses(), _PURE),
)


@pytest.mark.slow
class TestingTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (type(policy).__name__, policy, name) for policy, name in _BROKEN
  )
  def test_the_broken_are_caught(self, policy, name):
    with self.assertRaises(testing.LawBroken) as caught:
      testing.check_laws(policy)
    error = caught.exception
    self.assertEqual(error.law, name, str(error))
    self.assertIn(f'law {name!r} is broken in world {error.seed}', str(error))
    self.assertIn(type(policy).__name__, str(error))
    again = f'check_laws(policy, first={error.seed}, worlds=1)'
    self.assertIn(again, str(error))
    if not hasattr(policy, 'asked'):  # Who remembers cannot be told to forget.
      with self.assertRaises(testing.LawBroken) as caught:
        testing.check_laws(policy, first=error.seed, worlds=1)
      self.assertEqual(caught.exception.law, name)

  @parameterized.parameters(Sound(), SoundEviction(), SoundGuess(), 'mixture')
  def test_the_sound_pass(self, policy):
    testing.check_laws(policy, worlds=12)


class ShortTest(absltest.TestCase):
  def test_tried_and_caught(self):
    testing.check_laws(Sound(), worlds=1)
    with self.assertRaisesRegex(testing.LawBroken, 'no deadlock'):
      testing.check_laws(Never(), worlds=1)

  def test_no_policy_at_all(self):
    with self.assertRaisesRegex(ValueError, 'frozen dataclass'):
      testing.check_laws(object())
    with self.assertRaisesRegex(ValueError, "mean 'lockstep'"):
      testing.check_laws('lokstep')

  def test_it_is_an_assertion(self):
    self.assertTrue(issubclass(law.LawBroken, AssertionError))


if __name__ == '__main__':
  absltest.main()
