"""Schedulers without one idea: they still get everybody through, lawfully."""

from absl.testing import absltest, parameterized

from bevy_jax import events, validate
from bevy_jax.experiments import simulated_cells, switched_off

_SETTINGS = simulated_cells.Settings(skip=1, tokens=3)


class PartsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (name.replace(' ', '_'), name) for name in switched_off.PARTS
  )
  def test_possible_and_complete_with_little_room(self, name):
    """Seen to fail with launches of who is not ready."""
    key = {'place': 'rtx4090', 'requests': 5, 'cache': 24}
    sim, _ = simulated_cells.simulate(key, _SETTINGS)
    log = simulated_cells.log(sim, switched_off.PARTS[name])
    facts = validate.Facts(24, 32, slots=24, rows=5, costs=sim.costs)
    self.assertEqual(validate.faults(log, facts), [])
    self.assertLen([e for e in log if isinstance(e, events.Finished)], 5)

  def test_what_is_off_is_off(self):
    """Seen to fail with the whole in place of each."""
    key = {'place': 'rtx4060-laptop', 'requests': 4, 'cache': 0.5}
    sim, _ = simulated_cells.simulate(key, _SETTINGS)
    groups = {}
    for name, part in switched_off.PARTS.items():
      log = simulated_cells.log(sim, part)
      row = simulated_cells.figure(sim, log)
      hops = max(e.hops for e in log if isinstance(e, events.LaunchBegun))
      groups[name] = row['mean_group'], hops, row['prefetch_loads'] > 0
    self.assertEqual(groups['no grouping: requests alone'][0], 1)
    self.assertGreater(groups[switched_off.WHOLE][0], 1)
    alone = [name for name, (_, hops, _) in groups.items() if hops > 1]
    self.assertEqual(alone, ['with hops: up to 4 layers a launch'])
    self.assertFalse(groups['no prefetch on an idle link'][2])


if __name__ == '__main__':
  absltest.main()
