"""Reports on a log added up by hand, and on real runs of the engine."""

import io
import json
import pathlib
import tempfile

import numpy as np
import rich.console
from absl.testing import absltest, parameterized

from bevy_jax import (
  baselines,
  engine,
  events,
  figures,
  protocols,
  report,
  runahead,
)
from bevy_jax import request as request_lib
from bevy_jax.layers import config as model_config
from bevy_jax.offload import eviction

MS = 1_000_000


def facts(**changes):
  values = {
    'config': {'engine': {'scheduler': 'runahead', 'eviction': 'lru'}},
    'versions': {'jax': '1'},
    'device': 'a device',
    'link': 'device_put',
    'rows': 2,
    'layers': 2,
    'experts': 4,
    'top_k': 1,
    'slots': 3,
    'block_bytes': 1000,
    'cache_bytes': 3000,
    'eviction': eviction.Lru(),
    'warmup': 1,
  }
  return report.Facts(**(values | changes))


def begun(ms, launch, kind, layer, requests, experts=(), host=(0, 0, 0, 0, 0)):
  host = tuple(us * 1000 for us in host)
  return events.LaunchBegun(
    ms * MS, launch, kind, layer, requests, experts, True, 1, host
  )


def ended(ms, launch):
  return events.LaunchEnded(ms * MS, launch)


def routed(ms, request, token, layer, expert, hits, position):
  return events.Routed(
    ms * MS, request, token, layer, (expert,), hits, position
  )


def issued(ms, key, cause):
  return events.LoadIssued(ms * MS, key, 0, cause)


def landed(ms, key):
  return events.LoadLanded(ms * MS, key, 0)


def token(ms, request, index):
  return events.Token(ms * MS, request, index, 9)


# Two rows, two layers of four experts (keys 0-3, 4-7), three slots. A decode
# launch takes 1 ms and 1 ms an expert. The measured window is 17-27 ms.
BY_HAND = (
  events.Admitted(0, 0, 0, 3, 0),
  events.Admitted(0, 1, 1, 3, 1 * MS),
  begun(0, 0, 'prefill', -1, (0, 1)),
  ended(2, 0),
  events.PrefillRouted(2 * MS, 0, (0, 1), 4, 1),
  issued(2, 0, 'prefill'),
  issued(2, 1, 'prefill'),
  landed(4, 0),
  landed(6, 1),
  begun(6, 1, 'prefill', 0, (0, 1), (0, 1)),
  ended(8, 1),
  events.Prefilled(8 * MS, (0, 1)),
  begun(8, 2, 'enter', -1, (0, 1)),
  ended(9, 2),
  routed(9, 0, 0, 0, 0, 1, 0),
  routed(9, 1, 0, 0, 1, 1, 0),
  begun(9, 3, 'decode', 0, (0, 1), (0, 1)),
  ended(12, 3),
  routed(12, 0, 0, 1, 0, 0, 1),
  routed(12, 1, 0, 1, 0, 0, 1),
  issued(12, 4, 'demand'),
  landed(14, 4),
  begun(14, 4, 'decode', 1, (0, 1), (4,), (10, 20, 30, 40, 5)),
  ended(16, 4),
  token(16, 0, 0),
  routed(16, 0, 1, 0, 2, 0, 2),
  token(16, 1, 0),
  routed(16, 1, 1, 0, 0, 1, 2),
  events.Evicted(16 * MS, 1, 1, True),
  issued(16, 2, 'demand'),
  # Both have done a token: the window opens.
  begun(17, 5, 'decode', 0, (1,), (0,), (11, 22, 33, 44, 6)),
  landed(18, 2),
  begun(18, 6, 'decode', 0, (0,), (2,), (12, 24, 36, 48, 7)),
  ended(19, 5),
  routed(19, 1, 1, 1, 1, 0, 3),
  events.Evicted(19 * MS, 0, 0, False),
  issued(19, 5, 'demand'),
  ended(21, 6),
  routed(21, 0, 1, 1, 0, 1, 3),
  issued(21, 6, 'reload'),
  landed(23, 5),
  begun(24, 7, 'decode', 1, (0, 1), (4, 5), (40, 50, 60, 70, 35)),
  landed(25, 6),
  ended(27, 7),
  # Request 0 ends here: what follows is the tail.
  token(27, 0, 1),
  events.Finished(27 * MS, 0, 'length'),
  token(27, 1, 1),
  routed(27, 1, 2, 0, 0, 1, 4),
  begun(27, 8, 'decode', 0, (1,), (0,), (90, 90, 90, 90, 90)),
  ended(29, 8),
  routed(29, 1, 2, 1, 1, 1, 5),
  begun(29, 9, 'decode', 1, (1,), (5,), (90, 90, 90, 90, 90)),
  ended(31, 9),
  token(31, 1, 2),
  events.Finished(31 * MS, 1, 'length'),
)


class ByHandTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.report = report.make(list(BY_HAND), facts())

  @parameterized.parameters(
    ('decode_seconds', 0.010),
    ('tokens_per_s', 200),  # the two of 27 ms
    ('prefill_seconds', 0.008),
    ('requests', 2),
    ('new_tokens', 5),
    ('uses', 2),  # at 19 and at 21 ms
    ('hits', 1),
    ('hit_rate', 0.5),
    ('loads', 2),  # keys 5 and 6
    ('load_bytes', 2000),
    ('demand_loads', 1),
    ('reloads', 1),
    ('wasted_loads', 1),
    ('prefill_uses', 4),
    ('prefill_hits', 1),
    ('prefill_loads', 2),
    ('gpu_busy', 0.7),  # 17-21, with two launches at once, and 24-27
    ('link_busy', 0.7),  # 17-18, 19-23, 23-25
    ('stall', 0.3),  # 21-24
    ('overlap_efficiency', 0.7),
    ('launches', 3),
    ('h', 0.015),  # 5 * 30 us of 10 ms
    ('mean_group', 4 / 3),
    ('mean_hops', 1),
    ('max_lag', 1),  # 19-21 ms
    # Two loads that follow one another: 2-6 and 19-25 ms, 2 and 3 ms a load;
    # the lower quartile of the two is 2.25 ms. The step
    # of position 3, keys {4, 5}, is the window's: key 5 misses under Belady
    # and under lockstep; it computes for 1 + 2 ms.
    ('bound_fraction', 0.3),
    ('useful_efficiency', 0.3),
    ('s', 0.3),
    ('slots', 3),
    ('cache_bytes', 3000),
    ('gpu_busy_source', 'from launch to seen-ended'),
  )
  def test_figure(self, name, value):
    if isinstance(value, str):
      self.assertEqual(self.report[name], value)
    else:
      self.assertAlmostEqual(self.report[name], value, msg=name)

  @parameterized.parameters(
    ('bound', {'link_s': 0.00225, 'gpu_s': 0.003, 'clairvoyant_s': 0.003}),
    (
      'host_us',
      {'schedule': 10, 'launch': 10, 'poll': 10, 'load': 10, 'settle': 10},
    ),
    # 16 and 15 ms; (27 - 16) / 1 and (31 - 16) / 2 ms.
    ('ttft_ms', {'p50': 15.5, 'p95': 15.95, 'p99': 15.99}),
    ('tpot_ms', {'p50': 9.25, 'p95': 10.825, 'p99': 10.965}),
    ('window', {'begin_ns': 17 * MS, 'end_ns': 27 * MS, 'tokens': 2}),
    ('total', {'seconds': 0.031, 'loads': 4, 'uses': 10, 'hits': 6}),
    ('total', {'load_bytes': 6000, 'launches': 10}),
  )
  def test_figures(self, name, values):
    found = {key: self.report[name][key] for key in values}
    for key, value in values.items():
      self.assertAlmostEqual(found[key], value, msg=f'{name} {key}')

  def test_keys(self):
    self.assertEqual(
      list(self.report)[:4], ['config', 'versions', 'device', 'link']
    )
    self.assertEqual(self.report['window']['note'], '')
    self.assertEqual(json.loads(json.dumps(self.report)), self.report)

  @parameterized.parameters(
    ('throttled:2.5', 'link throttled to 2.5 GB/s: '),
    ('throttled:2.5:40', 'link throttled to 2.5 GB/s and 40 us latency: '),
  )
  def test_a_throttled_link_comes_first(self, link, note):
    found = report.make(list(BY_HAND), facts(link=link))
    self.assertEqual(next(iter(found)), 'note')
    self.assertStartsWith(found['note'], note)


class PrefetchTest(absltest.TestCase):
  def test_by_hand(self):
    """Four experts a layer; the window is all but the first and last event."""
    issue, land = events.LoadIssued, events.LoadLanded
    log = [
      issue(0, 4, 0, 'prefetch'),  # before the window
      issue(1, 5, 1, 'prefetch'),
      routed(2, 0, 0, 1, 0, 0, 1),  # needs 4, which is not there yet: late
      routed(2, 1, 0, 1, 0, 0, 1),  # the same load, counted once
      land(3, 4, 0),
      land(3, 5, 1),
      routed(4, 0, 0, 1, 1, 1, 1),  # 5 came in time
      issue(5, 6, 2, 'prefetch'),
      issue(5, 7, 3, 'demand'),
      land(6, 6, 2),
      land(6, 7, 3),
      events.Evicted(7, 6, 2, False),  # wasted
      events.Evicted(7, 7, 3, False),  # unused too, but no prefetch
      events.Evicted(7, 4, 0, True),
      issue(8, 6, 2, 'reload'),
      land(9, 6, 2),
      events.Evicted(9, 6, 2, False),  # was not prefetched this time
      events.Judged(10, 0, 1, 4, 3, 2, 1, 3),
      events.Judged(10, 1, 1, 4, 1, 3, 1, 2),
      events.Evicted(11, 5, 1, False),  # behind the window
    ]
    counts = figures.cache(log[1:-1])
    self.assertEqual(
      [counts[k] for k in ('loads', 'demand_loads', 'reloads')], [4, 1, 1]
    )
    self.assertEqual(counts['prefetch_loads'], 2)
    self.assertEqual(counts['wasted_loads'], 3)
    self.assertEqual(
      figures.prefetch(log, 4, 0, len(log) - 1, 1000),
      {
        'guess_accuracy': 4 / 8,
        'missing_recall': 2 / 5,
        'missing_precision': 2 / 5,
        'late_prefetches': 1,
        'wasted_prefetches': 1,
        'wasted_prefetch_bytes': 1000,
      },
    )


class WindowTest(parameterized.TestCase):
  def test_too_short_for_the_warmup(self):
    found = report.make(list(BY_HAND), facts(warmup=8))
    # Without warm-up it opens with the first decode launch.
    self.assertEqual(found['window']['begin_ns'], 9 * MS)
    self.assertIn('8 warm-up tokens', found['window']['note'])
    self.assertAlmostEqual(found['tokens_per_s'], 4 / 0.018)

  def test_rows_that_never_meet(self):
    log = [
      events.Admitted(0, 0, 0, 1, 0),
      events.Prefilled(0, (0,)),
      routed(0, 0, 0, 0, 0, 0, 0),
      begun(1, 0, 'decode', 0, (0,), (0,)),
      ended(3, 0),
      token(3, 0, 0),
      events.Finished(3 * MS, 0, 'eos'),
      events.Admitted(4 * MS, 1, 0, 1, 0),
      events.Prefilled(4 * MS, (1,)),
      routed(4, 1, 0, 0, 1, 0, 0),
      begun(5, 1, 'decode', 0, (1,), (1,)),
      ended(7, 1),
      token(7, 1, 0),
      events.Finished(7 * MS, 1, 'eos'),
    ]
    found = report.make(log, facts(layers=1))
    self.assertAlmostEqual(found['decode_seconds'], 0.006)
    self.assertIn('2 rows never decoded together', found['window']['note'])
    self.assertIn('1 prompts were prefilled', found['window']['note'])
    self.assertEqual(found['tpot_ms'], dict.fromkeys(found['tpot_ms']))
    # One row is another matter: both requests had it.
    found = report.make(log, facts(layers=1, rows=1, warmup=0))
    self.assertAlmostEqual(found['decode_seconds'], 0.006)
    self.assertNotIn('together', found['window']['note'])

  def test_nothing_to_measure(self):
    with self.assertRaisesRegex(ValueError, 'at least one token'):
      report.make(list(BY_HAND[:12]), facts())

  def moved(self, old, new):
    log = list(BY_HAND)
    log[log.index(old)] = new
    return report.make(log, facts())

  def test_a_token_at_the_begin_was_done_before(self):
    old = begun(17, 5, 'decode', 0, (1,), (0,), (11, 22, 33, 44, 6))
    found = self.moved(old, begun(16, 5, 'decode', 0, (1,), (0,)))
    self.assertAlmostEqual(found['decode_seconds'], 0.011)
    self.assertEqual(found['window']['tokens'], 2)

  def test_a_lag_before_the_window_is_not_its_own(self):
    old = routed(12, 0, 0, 1, 0, 0, 1)
    self.assertEqual(
      self.moved(old, routed(12, 0, 0, 1, 0, 0, 9))['max_lag'], 1
    )


class Scripted:
  """Executor on a clock of its own; routing drawn by row and turn."""

  chunk, hops = 4, 1

  def __init__(self, layers, experts, top_k):
    self.layers, self.experts, self.top_k = layers, experts, top_k
    self.clock, self.link_free, self.gpu_free = 0, 0, 0
    self.turns, self.happening = {}, []

  def load(self, key, slot):
    del slot
    self.link_free = max(self.clock, self.link_free) + 30
    self.happening.append(protocols.Landed(self.link_free, key))

  def launch(self, number, batch):
    rows = list(batch.rows) or [e.row for e in batch.entries]
    duration = 20 + 3 * batch.experts.bit_count() + 2 * len(rows)
    self.gpu_free = max(self.clock, self.gpu_free) + duration
    last = batch.kind == 'decode' and batch.layer == self.layers - 1
    ends = protocols.Ended(
      self.gpu_free,
      number,
      [
        protocols.Hop(
          [7 if last else -1] * len(rows),
          [True] * len(rows),
          [self.choose(row) for row in rows],
        )
      ]
      if batch.finish
      else [],
    )
    self.happening.append(ends)

  def choose(self, row):
    turn = self.turns[row] = self.turns.get(row, 0) + 1
    rng = np.random.default_rng((row, turn))
    return [int(e) for e in rng.permutation(self.experts)[: self.top_k]]

  def poll(self):
    due = [e for e in self.happening if e.time <= self.clock]
    self.happening = [e for e in self.happening if e.time > self.clock]
    return sorted(due, key=lambda e: e.time)

  def wait(self):
    self.clock = min(e.time for e in self.happening)

  def now(self):
    return self.clock

  def close(self):
    self.happening = []


def run(scheduler, name='lfu_decayed'):
  """Four requests of 12 tokens: 4 layers of 16 experts, half of them cached."""
  shape = {'num_layers': 4, 'num_experts': 16, 'top_k': 2}
  loop = engine.Engine(
    model_config.tiny(**shape),
    Scripted(*shape.values()),
    scheduler,
    eviction.EVICTIONS[name],
    rows=4,
    slots=32,
    link_depth=4,
  )
  for number in range(4):
    loop.submit(request_lib.Request(number=number, prompt=(5,), new_tokens=12))
  while loop.busy:
    loop.step()
  about = facts(
    rows=4,
    layers=4,
    experts=16,
    top_k=2,
    slots=32,
    eviction=eviction.EVICTIONS[name],
    warmup=3,
  )
  return report.make(loop.log, about)


class EngineTest(parameterized.TestCase):
  def test_capacity(self):
    self.assertEqual(report.make(list(BY_HAND), facts())['capacity'], 'global')
    parted = report.make(list(BY_HAND), facts(quota=(2, 1)))
    self.assertEqual(parted['capacity'], 'layer')

  @parameterized.parameters('lru', 'lfu_decayed')
  def test_lockstep(self, name):
    found = run(baselines.Lockstep(), name)
    # 9 of 12 tokens lie after the warm-up; the window's first launch was
    # revealed before it, so that of 36 steps it has the uses of 35.
    self.assertEqual(found['window']['tokens'], 4 * 9)
    self.assertEqual(found['launches'], 36)
    self.assertEqual(found['uses'], 35 * 4 * 2)
    self.assertEqual((found['mean_group'], found['max_lag']), (4.0, 0))
    self.assertEqual(found['uses'] - found['hits'] >= found['loads'] > 0, True)
    self.assertEqual(found['loads'], found['demand_loads'])
    # It never computes and loads at once, and here the host takes no time.
    self.assertAlmostEqual(found['link_busy'] + found['gpu_busy'], 1)
    self.assertAlmostEqual(found['stall'], found['link_busy'])
    # The costs are linear: the fit gives back what 35 launches really took.
    took = found['gpu_busy'] * found['decode_seconds']
    self.assertBetween(took / found['bound']['gpu_s'], 1, 1.05)
    # Its own loads are lockstep's: no more and no fewer.
    link = found['link_busy'] * found['decode_seconds']
    useful = found['useful_efficiency'] * found['decode_seconds']
    self.assertAlmostEqual(
      useful * 1e9, max(link, found['bound']['gpu_s']) * 1e9
    )
    self.assertLess(found['bound']['link_s'], link)

  @parameterized.parameters(1, 2)
  def test_runahead_on_the_same_work(self, depth):
    lockstep = run(baselines.Lockstep())
    ahead = run(runahead.Runahead(depth=depth))
    self.assertEqual(ahead['total']['uses'], lockstep['total']['uses'])
    self.assertGreater(ahead['max_lag'], 0)
    self.assertLess(ahead['mean_group'], 4)
    self.assertLess(ahead['stall'], lockstep['stall'])
    for found in (lockstep, ahead):
      self.assertBetween(found['bound_fraction'], 0.01, 1)
      self.assertBetween(found['useful_efficiency'], 0.01, 1)
    for name, slack in (('gpu_s', 0.1), ('link_s', 0.25)):
      ratio = ahead['bound'][name] / lockstep['bound'][name]
      self.assertBetween(ratio, 1 - slack, 1 + slack, name)


class OutputTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    first = report.make(list(BY_HAND), facts())
    # Without an engine below the configuration, as in a small script.
    second = first | {
      'config': {'scheduler': 'lockstep', 'eviction': 'lfu_decayed'},
      'tokens_per_s': 150.0,
    }
    self.reports = [first, second]

  def test_table(self):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=80)
    console.print(report.table(self.reports))
    lines = out.getvalue().replace('┃', '│').splitlines()
    cells = [[c.strip() for c in x.split('│')[1:-1]] for x in lines]
    self.assertEqual(
      [row for row in cells if row],
      [
        ['scheduler', 'runahead', 'lockstep'],
        ['eviction', 'lru', 'lfu_decayed'],
        ['prefetch', 'none', 'none'],
        ['tokens/s', '200.00', '150.00'],
        ['ratio', '1.00', '0.75'],
        ['hit rate', '50.0%', '50.0%'],
        ['loads', '2', '2'],
        ['link busy', '70%', '70%'],
        ['gpu busy', '70%', '70%'],
        ['stall', '30%', '30%'],
        ['host us a launch', '50', '50'],
        ['mean group', '1.33', '1.33'],
        ['max lag', '1', '1'],
        ['of the bound', '30%', '30%'],
      ],
    )

  def test_one_run_is_saved_as_it_is_and_more_as_a_list(self):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    path = root / 'report.json'
    report.save(path, self.reports[:1])
    self.assertEqual(json.loads(path.read_text()), self.reports[0])
    report.save(path, self.reports)
    self.assertEqual(json.loads(path.read_text()), {'runs': self.reports})


if __name__ == '__main__':
  absltest.main()
