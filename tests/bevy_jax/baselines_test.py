"""Lockstep, the published rule, and plain others: wants and groups by hand."""

from absl.testing import absltest, parameterized

from bevy_jax import baselines, protocols
from bevy_jax import config as config_lib
from bevy_jax import request as request_lib

_LAYERS = 2


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


def _view(waiting, resident=(0, 0), *, active=None, slots=8, in_flight=0):
  return protocols.View(
    waiting=list(waiting),
    active=len(waiting) if active is None else active,
    floor=min((p.position for p in waiting), default=0),
    resident=list(resident),
    loading=[0, 0],
    slots=slots,
    in_flight=in_flight,
  )


class WaveTest(absltest.TestCase):
  def test_lowest_bits(self):
    self.assertEqual(baselines.wave(0b110101, 2), 0b000101)
    self.assertEqual(baselines.wave(0b110101, 4), 0b110101)
    self.assertEqual(baselines.wave(0b110101, 99), 0b110101)
    self.assertEqual(baselines.wave(0b1, 0), 0)


class LockstepTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.lockstep = baselines.Lockstep()

  def test_the_union_is_wanted_and_launched_once_resident(self):
    a, b = _progress(0, 3, 1, 4), _progress(1, 3, 4, 2)
    view = _view([a, b], (0, 0b00110))
    self.assertEqual(self.lockstep.wants(view), [(1, 0b10110)])
    self.assertIsNone(self.lockstep.launch(view))
    view.resident[1] |= 0b10000
    launch = self.lockstep.launch(view)
    self.assertEqual(launch, (1, [a, b], 0b10110, True, 1, True))

  def test_it_waits_for_everybody(self):
    view = _view([_progress(0, 0, 1)], (0b10, 0), active=2)
    self.assertEqual(self.lockstep.wants(view), [])
    self.assertIsNone(self.lockstep.launch(view))
    view = _view([_progress(0, 0, 1)], (0b10, 0), in_flight=1)
    self.assertIsNone(self.lockstep.launch(view))
    self.assertIsNone(self.lockstep.launch(_view([])))

  def test_a_union_beyond_the_cache_goes_in_waves(self):
    a, b = _progress(0, 0, 0, 5), _progress(1, 0, 3, 2)
    view = _view([a, b], (0b001101, 0), slots=3)
    self.assertEqual(self.lockstep.wants(view), [(0, 0b001101)])
    first = self.lockstep.launch(view)
    self.assertEqual(first, (0, [a, b], 0b001101, False, 1, True))
    # Both stay in the batch until the last wave, though b needs no more.
    a.need, b.need = 0b100000, 0
    view.resident[0] = 0b100000
    last = self.lockstep.launch(view)
    self.assertEqual(last, (0, [a, b], 0b100000, True, 1, True))

  def test_who_joined_in_the_middle_catches_up_first(self):
    old, new = _progress(0, 5, 1), _progress(1, 4, 2)
    view = _view([old, new], (0b100, 0b10))
    self.assertEqual(self.lockstep.wants(view), [(0, 0b100)])
    self.assertEqual(
      self.lockstep.launch(view), (0, [new], 0b100, True, 1, True)
    )

  def test_hops_end_at_the_head(self):
    lockstep = baselines.Lockstep(hops=8)
    for layer, hops in ((0, 2), (1, 1)):
      a = _progress(0, layer, 1)
      launch = lockstep.launch(_view([a], (0b10, 0b10)))
      self.assertEqual((launch.hops, launch.together), (hops, True))

  def test_hops_end_where_a_load_is_likely(self):
    """Seen to fail with all the hops that are asked for."""
    view = _view([_progress(0, 0, 1)], (0b10, 0b10))
    view.pace.loads = 0.6
    self.assertEqual(baselines.Lockstep(hops=2).launch(view).hops, 1)


class LagFirstTest(parameterized.TestCase):
  @parameterized.parameters(
    baselines.Bevy(), baselines.Solo(), baselines.Largest()
  )
  def test_most_lagging_first_then_fewest_missing(self, scheduler):
    """Seen to fail with `_lag_first` sorting by position alone."""
    ahead = _progress(0, 3, 0, 1)
    misses_two = _progress(1, 2, 4, 5)
    misses_one = _progress(2, 2, 0, 5)
    view = _view([ahead, misses_two, misses_one], (0b11, 0b11))
    self.assertEqual(
      scheduler.wants(view), [(0, 0b100001), (0, 0b110000), (1, 0b11)]
    )

  @parameterized.parameters(
    baselines.Bevy(), baselines.Solo(), baselines.Largest()
  )
  def test_nobody_is_ready(self, scheduler):
    self.assertIsNone(scheduler.launch(_view([_progress(0, 0, 1)])))
    self.assertIsNone(scheduler.launch(_view([])))


class BevyTest(absltest.TestCase):
  def test_all_ready_requests_of_the_most_lagging_ready_layer(self):
    waits = _progress(0, 2, 3)
    one, two = _progress(1, 4, 0), _progress(2, 6, 1)
    nearer = _progress(3, 3, 0)
    view = _view([waits, two, one, nearer], (0b11, 0b1))
    # Tokens differ, the layer is the same.
    view.waiting.remove(nearer)
    launch = baselines.Bevy().launch(view)
    self.assertEqual(launch, (0, [two, one], 0b11, True, 1, False))
    view.waiting.append(nearer)
    launch = baselines.Bevy().launch(view)
    self.assertEqual(launch, (1, [nearer], 0b1, True, 1, False))

  def test_split_keeps_all_within_a_layer(self):
    """Seen to fail with `<` for `<=` in `_ready`."""
    split = config_lib.SCHEDULERS['split']
    last, ahead = _progress(0, 4, 5), _progress(1, 5, 0)
    view = _view([last, ahead], (0, 0b1))
    self.assertIsNone(split.launch(view))
    self.assertEqual(baselines.Bevy().launch(view).group, [ahead])
    # All are there: the next one goes, though another still waits.
    level = _progress(2, 4, 1)
    view = _view([last, level, ahead], (0b10, 0b1))
    self.assertEqual(split.launch(view).group, [level])


class SoloTest(absltest.TestCase):
  def test_the_most_lagging_ready_request_alone(self):
    waits, one, two = _progress(0, 2, 3), _progress(1, 6, 0), _progress(2, 4, 0)
    view = _view([waits, one, two], (0b1, 0))
    self.assertEqual(
      baselines.Solo().launch(view), (0, [two], 0b1, True, 1, False)
    )


class LargestTest(absltest.TestCase):
  def test_the_largest_group_then_the_most_lagging(self):
    last = _progress(0, 2, 0)
    pair = [_progress(1, 5, 0), _progress(2, 7, 1)]
    view = _view([last, *pair], (0b1, 0b11))
    largest = baselines.Largest()
    self.assertEqual(largest.launch(view), (1, pair, 0b11, True, 1, False))
    view.waiting.pop()
    self.assertEqual(largest.launch(view).group, [last])

  def test_who_lags_is_not_left_behind_for_ever(self):
    """Seen to fail with `_ready(view, None)` in `Largest.launch`."""
    last = _progress(0, 0, 0)
    pair = [_progress(1, 65, 0), _progress(2, 67, 1)]
    view = _view([last, *pair], (0b1, 0b11))
    self.assertEqual(baselines.Largest().launch(view).group, [last])


if __name__ == '__main__':
  absltest.main()
