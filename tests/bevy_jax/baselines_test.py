"""Lockstep: the whole batch, waves, and who joins in the middle."""

from absl.testing import absltest

from bevy_jax import baselines, protocols
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
    self.assertEqual(launch, (1, [a, b], 0b10110, True, 1))

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
    self.assertEqual(first, (0, [a, b], 0b001101, False, 1))
    # Both stay in the batch until the last wave, though b needs no more.
    a.need, b.need = 0b100000, 0
    view.resident[0] = 0b100000
    last = self.lockstep.launch(view)
    self.assertEqual(last, (0, [a, b], 0b100000, True, 1))

  def test_who_joined_in_the_middle_catches_up_first(self):
    old, new = _progress(0, 5, 1), _progress(1, 4, 2)
    view = _view([old, new], (0b100, 0b10))
    self.assertEqual(self.lockstep.wants(view), [(0, 0b100)])
    self.assertEqual(self.lockstep.launch(view), (0, [new], 0b100, True, 1))


if __name__ == '__main__':
  absltest.main()
