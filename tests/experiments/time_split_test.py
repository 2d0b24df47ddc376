"""Where time goes: a schedule added up by hand, and one that was simulated."""

from absl.testing import absltest

from bevy_jax import events
from bevy_jax import window as window_lib
from bevy_jax.experiments import simulation, time_split


def _launch(number, begin, end):
  host = (0, 0, 0, 0, 0)
  return [
    events.LaunchBegun(begin, number, 'decode', 0, (0,), (0,), True, 1, host),
    events.LaunchEnded(end, number, began=begin),
  ]


def _load(key, begin, end):
  return [
    events.LoadIssued(begin, key, 0, 'demand'),
    events.LoadLanded(end, key, 0, began=begin),
  ]


class SplitTest(absltest.TestCase):
  def test_by_hand(self):
    """Device 10..30 and 60..80, link 20..40 (layer 0), 40..70 (layer 1).

    Seen to fail with loads that are put down to the layer before.
    """
    log = [*_launch(0, 10, 30), *_load(1, 20, 40), *_load(2, 40, 70),
           *_launch(1, 60, 80)]  # fmt: skip
    window = window_lib.Window(begin=0, end=100, first=0, last=7)
    found = time_split.split(log, window, layers=2, experts=2)
    self.assertEqual(found, (10 + 10, 10 + 10, 10 + 20, 10 + 20, (10, 20)))

  def test_a_window_cuts_what_is_at_its_ends(self):
    log = [*_launch(0, 0, 30), *_load(1, 20, 60)]
    window = window_lib.Window(begin=25, end=50, first=0, last=3)
    found = time_split.split(log, window, layers=1, experts=2)
    self.assertEqual(found, (0, 5, 20, 0, (20,)))

  def test_parts_add_up(self):
    """Seen to fail with `both` counted into `device` too."""
    config = simulation.Replay(
      platform='rtx4090', model_shape='gpt-oss-20b:int4', requests=3,
      tokens=6, skip=2, bounds=False,
    )  # fmt: skip
    whole = simulation.Simulation(config)
    log = whole.run('runahead', 'lru').log
    window = window_lib.find(log, 3, 2)
    found = time_split.split(log, window, 24, 32)
    self.assertEqual(sum(found[:4]), window.end - window.begin)
    self.assertEqual(sum(found.layers), found.link)
    self.assertGreater(min(found[:3]), 0)


if __name__ == '__main__':
  absltest.main()
