"""Runahead: the order of wants, the group of a launch, the bound of a lag."""

import dataclasses
from unittest import mock

from absl.testing import absltest, parameterized

from bevy_jax import holding, protocols, runahead
from bevy_jax import request as request_lib

_LAYERS = 2
_PLAIN = runahead.Runahead(max_lag=None, near=None, hold=False)


def _progress(number: int, position: int, *experts: int):
  request = request_lib.Request(number=number, prompt=(1,), new_tokens=1)
  return request_lib.Progress(
    request,
    number,
    position=position,
    layer=position % _LAYERS,
    choices=experts,
    need=sum(1 << e for e in experts),
    in_flight=False,
  )


def _view(waiting, resident, floor=None):
  if floor is None:
    floor = min((p.position for p in waiting), default=0)
  return protocols.View(
    list(waiting), len(waiting), floor, list(resident), [0, 0], 8
  )


class WantsTest(absltest.TestCase):
  def test_most_lagging_first_then_fewest_missing(self):
    ahead = _progress(0, 3, 0, 1)
    misses_two = _progress(1, 2, 4, 5)
    misses_one = _progress(2, 2, 0, 5)
    ready = _progress(3, 2, 0, 1)
    view = _view([ahead, misses_two, misses_one, ready], (0b11, 0b11))
    self.assertEqual(
      runahead.Runahead().wants(view),
      [(0, 0b11), (0, 0b100001), (0, 0b110000), (1, 0b11)],
    )
    self.assertEqual(view.waiting[0], ahead)  # It only looked.


class LaunchTest(parameterized.TestCase):
  def test_all_ready_ones_of_the_most_lagging_ready_layer(self):
    far = _progress(0, 7, 0)
    missing = _progress(1, 2, 7)
    one = _progress(2, 4, 0, 1)
    two = _progress(3, 4, 1, 2)
    pass_ahead = _progress(4, 6, 2)
    view = _view([far, missing, one, two, pass_ahead], (0b111, 0b1))
    launch = _PLAIN.launch(view)
    # Who is at the same layer of a later pass comes along: it costs nothing.
    wanted = protocols.Launch(0, [one, two, pass_ahead], 0b111)
    self.assertEqual(launch, wanted)

  def test_nobody_is_ready(self):
    self.assertIsNone(runahead.Runahead().launch(_view([], (0, 0))))
    view = _view([_progress(0, 0, 1, 2)], (0b10, 0))
    self.assertIsNone(runahead.Runahead().launch(view))

  @parameterized.parameters((None, True), (1, False), (2, False), (3, True))
  def test_the_lag_is_bounded(self, max_lag: int | None, goes: bool):
    view = _view([_progress(0, 5, 0), _progress(1, 2, 7)], (0, 0b1))
    rule = dataclasses.replace(_PLAIN, max_lag=max_lag)
    launch = rule.launch(view)
    self.assertEqual(launch is not None, goes)

  @parameterized.parameters(
    (0.39, False), (0.41, True), (1.9, True), (2.1, False)
  )
  def test_staying_together_while_one_is_short(self, balance: float, far: bool):
    view = _view([_progress(0, 5, 0), _progress(1, 2, 7)], (0, 0b1))
    view.pace.load, view.pace.loads, view.pace.device = (
      100.0,
      1.0,
      balance * 100,
    )
    rule = runahead.Runahead(max_lag=3, near=1, hold=False)
    self.assertEqual(rule.launch(view) is not None, far)
    always = dataclasses.replace(rule, near=None)
    self.assertIsNotNone(always.launch(view))

  def test_a_group_that_waits_leaves_the_device_to_the_next_one(self):
    """Seen to fail without a look at the next layer."""
    last, next_one = _progress(0, 2, 0), _progress(1, 3, 1)
    view = _view([last, next_one], (0b1, 0b10))
    with mock.patch.object(
      holding, 'pays', lambda view, launch: launch.group == [last]
    ):
      launch = runahead.Runahead(near=None).launch(view)
    self.assertEqual(launch and launch.group, [next_one])

  @parameterized.parameters(
    # Loads a layer, hops asked for -> hops of the launch.
    (1.5, 8, 2), (0.5, 8, 2), (0.25, 8, 4), (1.5, 1, 1), (0.25, 2, 2),
  )  # fmt: skip
  def test_no_further_than_a_load_is_likely(self, loads, asked, hops):
    """Seen to fail with as many hops as are asked for."""
    view = _long_view([_progress(0, 0, 0)], 0b1)
    view.pace.loads = loads
    view.pace.load = 1.0
    view.pace.fixed = view.pace.device = 100.0
    launch = dataclasses.replace(_PLAIN, hops=asked).launch(view)
    self.assertEqual(launch and launch.hops, hops)

  @parameterized.parameters(
    # A launch's own part, a load -> hops; a launch takes 100 and asks for .25.
    (60, 100, 4), (40, 100, 4), (60, 300, 2), (40, 300, 1),
  )  # fmt: skip
  def test_one_layer_where_the_link_is_short_too(self, fixed, load, hops):
    """Unless a launch costs more by itself than by what it does.

    Seen to fail with the least for all, and without a look at the link.
    """
    view = _long_view([_progress(0, 0, 0)], 0b1)
    pace = view.pace
    pace.loads, pace.device, pace.fixed, pace.load = 0.25, 100, fixed, load
    launch = dataclasses.replace(_PLAIN, hops=8).launch(view)
    self.assertEqual(launch and launch.hops, hops)


class AbreastTest(parameterized.TestCase):
  """Loads are rarer than long launches.

  Seen to fail with a launch while another is in flight, without those who
  are ready where the link is idle, with hops past the head, and with rows
  together of which some are ahead.
  """

  rule = runahead.Runahead(hops=4)

  def test_all_go_together_to_the_head(self):
    group = [_progress(0, 0, 0), _progress(1, 0, 0)]
    launch = self.rule.launch(_long_view(group, 0b1))
    self.assertEqual(launch, (0, group, 0b1, True, 4, True))
    late = [_progress(0, 6, 0)]
    launch = self.rule.launch(_long_view(late, 0b1, layers=8))
    self.assertEqual((launch.layer, launch.hops), (6, 2))

  def test_who_lags_goes_alone_to_the_others(self):
    ahead, behind = _progress(0, 3, 0), _progress(1, 0, 0)
    launch = self.rule.launch(_long_view([ahead, behind], 0b1))
    self.assertEqual(launch, (0, [behind], 0b1, True, 3, False))

  def test_everybody_waits_for_a_load_that_is_under_way(self):
    group = [_progress(0, 0, 0), _progress(1, 0, 1)]
    view = _long_view(group, 0b1)
    view.loading[0] = 0b10
    self.assertIsNone(self.rule.launch(view))
    # Nothing would end the wait.
    view.loading[0] = 0
    self.assertEqual(self.rule.launch(view).group, group[:1])

  def test_one_launch_at_a_time(self):
    view = _long_view([_progress(0, 0, 0)], 0b1)
    view.in_flight = 1
    self.assertIsNone(self.rule.launch(view))

  @parameterized.parameters((1000, True), (2000, False))
  def test_not_where_a_load_is_long(self, load, abreast):
    """Seen to fail without a look at the link."""
    group = [_progress(0, 0, 0), _progress(1, 0, 1)]
    view = _long_view(group, 0b1)
    view.loading[0] = 0b10
    pace = view.pace
    pace.loads, pace.device, pace.fixed, pace.load = 0.05, 150, 0, load
    launch = self.rule.launch(view)
    self.assertEqual(launch is None, abreast)


def _long_view(waiting, resident, layers=8):
  """All layers have the same experts; nothing asks for a load so far."""
  for p in waiting:
    p.layer = p.position % layers
  view = _view(waiting, [resident] * layers)
  view.loading = [0] * layers
  return view


if __name__ == '__main__':
  absltest.main()
