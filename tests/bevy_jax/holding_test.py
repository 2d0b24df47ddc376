"""Whether waiting pays, on numbers that one can add up.

A launch costs 100 and 10 an expert; a load takes 100 on the link.
"""

from absl.testing import absltest

from bevy_jax import holding, protocols
from bevy_jax import request as request_lib

_LAYERS, _EXPERTS = 6, 8


def _progress(row: int, layer: int, *experts: int) -> request_lib.Progress:
  request = request_lib.Request(number=row, prompt=(1,), new_tokens=1)
  need = sum(1 << e for e in experts)
  return request_lib.Progress(
    request, row, position=layer, layer=layer, choices=experts, need=need
  )


def _view(
  waiting: list[request_lib.Progress], resident: dict[int, int]
) -> protocols.View:
  view = protocols.View(
    waiting,
    len(waiting),
    0,
    [resident.get(layer, 0) for layer in range(_LAYERS)],
    [0] * _LAYERS,
    40,
    experts=_EXPERTS,
  )
  pace = view.pace
  pace.now, pace.load, pace.fixed, pace.expert = 10_000, 100.0, 100.0, 10.0
  pace.device, pace.loads = 200.0, 0.2
  return view


def _launch(*group: request_lib.Progress) -> protocols.Launch:
  experts = 0
  for p in group:
    experts |= p.need
  return protocols.Launch(group[0].layer, group, experts)


def _fly(view: protocols.View, p: request_lib.Progress) -> None:
  """A launch that began just now carries it."""
  view.in_flight = 1
  view.flying.append(p)
  view.pace.launch_begun(0, p.need.bit_count())


class HoldingTest(absltest.TestCase):
  def test_for_who_is_on_the_way(self):
    """It is there when the device is free: waiting costs nothing."""
    me = _progress(0, 3, 0, 1)
    view = _view([me], {3: 0b11})
    _fly(view, _progress(1, 2, 4, 5))
    self.assertTrue(holding.pays(view, _launch(me)))

  def test_not_for_who_has_passed(self):
    me = _progress(0, 3, 0, 1)
    view = _view([me], {3: 0b11})
    _fly(view, _progress(1, 3, 4, 5))
    self.assertFalse(holding.pays(view, _launch(me)))

  def test_never_where_nothing_is_in_flight(self):
    for in_flight in (0, 1):
      me, late = _progress(0, 3, 0, 1), _progress(1, 3, 0, 1, 5)
      view = _view([me, late], {3: 0b11})
      view.pace.load, view.in_flight = 50.0, in_flight
      self.assertEqual(holding.pays(view, _launch(me)), bool(in_flight))

  def test_a_load_that_has_not_begun_takes_its_time(self):
    for load, pays in ((109.0, True), (111.0, False)):
      me, late = _progress(0, 3, 0, 1), _progress(1, 3, 0, 1, 5)
      view = _view([me, late], {3: 0b11})
      view.in_flight = 1
      view.pace.load, view.pace.loads = load, 20.0 / load
      self.assertEqual(holding.pays(view, _launch(me)), pays, load)

  def test_never_while_the_link_is_short(self):
    """Launching is what keeps the link busy then."""
    me = _progress(0, 3, 0, 1)
    view = _view([me], {3: 0b11})
    _fly(view, _progress(1, 2, 4, 5))
    view.pace.loads = 3.0
    self.assertFalse(holding.pays(view, _launch(me)))

  def test_for_a_load_that_is_nearly_there_and_no_longer(self):
    """A join saves 100 and two shared experts, less 10 for what is revealed.

    Seen to fail without the time that the load takes.
    """
    for load, pays in ((100.0, True), (109.0, True), (111.0, False)):
      me, late = _progress(0, 3, 0, 1), _progress(1, 3, 0, 1, 5)
      view = _view([me, late], {3: 0b11})
      view.loading[3] = 1 << 5
      view.pace.load, view.pace.loads = load, 20.0 / load
      view.pace.load_issued(3 * _EXPERTS + 5)
      self.assertEqual(holding.pays(view, _launch(me)), pays, load)

  def test_longer_where_the_head_comes_next(self):
    """Who goes there apart pays it once more. Seen to fail without it."""
    for layer, load, pays in ((3, 150.0, False), (5, 150.0, True)):
      me, late = _progress(0, layer, 0, 1), _progress(1, layer, 0, 1, 5)
      view = _view([me, late], {layer: 0b11})
      view.loading[layer] = 1 << 5
      view.pace.load, view.pace.loads = load, 20.0 / load
      view.pace.head = 50.0
      view.pace.load_issued(layer * _EXPERTS + 5)
      self.assertEqual(holding.pays(view, _launch(me)), pays, layer)


if __name__ == '__main__':
  absltest.main()
