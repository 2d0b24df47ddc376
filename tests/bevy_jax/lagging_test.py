"""How far a launch may go on, told by who is where."""

from absl.testing import absltest, parameterized

from bevy_jax import lagging, protocols
from bevy_jax import request as request_lib

_LAYERS = 10


def _at(row: int, position: int) -> request_lib.Progress:
  request = request_lib.Request(number=row, prompt=(0,), new_tokens=1)
  p = request_lib.Progress(
    request, row, position=position, layer=position % _LAYERS
  )
  p.need = 1
  return p


class ReachTest(parameterized.TestCase):
  @parameterized.parameters(
    # Who waits, who flies, the bound: how far the group at 3 goes.
    ((), (), None, 8),
    ((5,), (), None, 2),  # Up to where another one waits,
    ((12,), (), None, 8),
    ((11,), (), None, 8),
    ((1,), (), None, 8),  # also one that is behind: at layer 11.
    ((2, 4, 5), (), None, 1),
    ((3,), (), None, 8),  # Left where it is.
    ((), (5,), None, 3),  # It comes to 6.
    ((), (2,), None, 8),
    ((), (3,), None, 1),
    ((1,), (), 4, 3),  # From 5 on, but not from 6.
    ((1,), (), 1, 1),
    ((), (1,), 4, 3),
    ((13,), (), 4, 8),
  )
  def test_reach(self, waiting, flying, max_lag, wanted):
    group = [_at(0, 3), _at(1, 3)]
    others = [_at(2 + i, position) for i, position in enumerate(waiting)]
    view = protocols.View(
      [*group, *others], 9, 0, [1] * _LAYERS, [0] * _LAYERS, 9
    )
    view.flying = [_at(9 + i, position) for i, position in enumerate(flying)]
    launch = lagging.together(group)
    found = lagging.reach(view, launch, 8, max_lag)
    self.assertEqual(found, launch._replace(hops=wanted))
    self.assertEqual(lagging.reach(view, launch, 1, max_lag), launch)


if __name__ == '__main__':
  absltest.main()
