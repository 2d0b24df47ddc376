"""platform.json of this machine, by its launcher, and its parts by hand."""

import json
import math
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from absl.testing import absltest, parameterized

from bevy_jax import config as config_lib
from bevy_jax.experiments import calibration, link_speed


def _launch(*flags: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, '-m', 'bevy_jax.experiments.calibrate', *flags],
    capture_output=True,
    text=True,
    check=False,
  )


def _rate(nbytes: int, depth: int, gb_per_s: float) -> link_speed.Rate:
  return link_speed.Rate(nbytes, depth, gb_per_s, 1.0)


class LinkTest(absltest.TestCase):
  rates = (
    _rate(1000, 1, 2.0),
    _rate(1000, 2, 3.81),
    _rate(1000, 4, 4.0),
    _rate(9000, 1, 9.0),
    _rate(9000, 4, 9.3),
  )

  def test_the_least_depth_within_five_percent(self):
    self.assertEqual(link_speed.best_depth(self.rates, 1000), 2)
    self.assertEqual(link_speed.best_depth(self.rates, 9000), 1)

  def test_latency_is_what_a_load_alone_takes_more(self):
    # 1000 bytes take 500 ns alone and 250 among others.
    self.assertAlmostEqual(link_speed.latency_us(self.rates, 1000), 0.25)


class CalibrateTest(parameterized.TestCase):
  def test_measures_a_random_model(self):
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    out = folder / 'platform.json'
    done = _launch(
      f'--out={out}',
      '--shape=num_layers=1,num_experts=4,model_dim=16',
      '--requests=2',
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    for words in ('link by ', 'one layer of decoding', 'link_depth='):
      self.assertIn(words, done.stdout)
    found = json.loads(out.read_text('utf-8'))
    self.assertEqual(found['version'], 2)
    self.assertIn('--requests=2', found['source'])
    rates, table = found['link']['gb_per_s'], found['layer']['table']
    expert = 3 * 16 * 16 * (4 if found['device'].startswith('cpu') else 2)
    self.assertEqual(found['layer']['expert_bytes'], expert)
    self.assertIn(expert, [r['bytes'] for r in rates])
    self.assertEqual({r['depth'] for r in rates}, {1, 2, 4, 8})
    seen = [(m['rows'], m['distinct'], m['hops']) for m in table]
    wanted = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (2, 4, 1)]
    self.assertEqual(seen, wanted)
    positive = [r['gb_per_s'] for r in rates] + [m['us'] for m in table]
    positive.append(found['memory_gb_per_s'])
    others = [found['launch_us'], found['prefill_us'], *found['host'].values()]
    self.assertTrue(all(0 < x < math.inf for x in positive), found)
    self.assertTrue(all(0 <= x < math.inf for x in others), found)
    # Two rows at most: the fit may give all of a launch to its rows.
    host = found['host']
    self.assertGreater(host['launch_us'] + host['row_us'], 0)
    self.assertGreater(host['land_us'], 0)
    self.assertGreater(host['look_us'], 29)

  @parameterized.parameters(
    ({'link': 'throttled:5'}, 'not this machine'),
    ({'shape': ['num_layer=2']}, "did you mean 'num_layers'"),
    ({'out': '/no/such/folder/p.json'}, 'does not exist'),
  )
  def test_refuses(self, change: dict[str, Any], message: str):
    given = {'shape': ['num_layers=1'], 'link': 'auto', 'out': 'p.json'}
    given |= change
    config = config_lib.EngineConfig(link=given['link'])
    with self.assertRaisesRegex(ValueError, message):
      calibration.main(
        calibration.Asked(
          model='demo', shape=tuple(given['shape']), engine=config
        ),
        given['out'],
      )


if __name__ == '__main__':
  absltest.main()
