"""Machines to simulate: the presets, and files that lie."""

import copy
import json
import pathlib
import tempfile
from typing import Any

from absl.testing import absltest, parameterized

from bevy_jax import costs, platforms

_FILE: dict[str, Any] = {
  'version': 2,
  'device': 'a card',
  'source': 'a command',
  'link': {
    'latency_us': 9,
    'gb_per_s': [
      {'bytes': 1000, 'depth': 1, 'gb_per_s': 0.5},
      {'bytes': 10000, 'depth': 8, 'gb_per_s': 4.0},
      {'bytes': 1000, 'depth': 8, 'gb_per_s': 2.0},
    ],
  },
  'memory_gb_per_s': 100.0,
  'launch_us': 2.5,
  'prefill_us': 0.25,
  'host': {
    'launch_us': 80,
    'answer_us': 4,
    'row_us': 2,
    'load_us': 3,
    'land_us': 5,
    'look_us': 90,
    'wake_us': 60,
  },
  'layer': {
    'expert_bytes': 1000,
    'layer_bytes': 5000,
    'table': [
      {'rows': 1, 'distinct': 2, 'hops': 1, 'us': 30.0},
      {'rows': 1, 'distinct': 4, 'hops': 1, 'us': 40.0},
    ],
  },
  'head': {
    'bytes': 500,
    'table': [{'rows': 4, 'us': 12.0}, {'rows': 1, 'us': 6}],
  },
}


def _load(found: object) -> platforms.Platform:
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'platform.json'
    text = found if isinstance(found, str) else json.dumps(found)
    path.write_text(text, encoding='utf-8')
    return platforms.load(path)


def _with(path: str, value: object) -> dict[str, Any]:
  """The file with one key changed, or without it where value is `...`."""
  found = copy.deepcopy(_FILE)
  *way, last = [int(x) if x.isdigit() else x for x in path.split('.')]
  place: Any = found
  for step in way:
    place = place[step]
  if value is ...:
    del place[last]
  else:
    place[last] = value
  return found


_KEYS = (
  *_FILE,
  *(f'link.{k}' for k in _FILE['link']),
  *(f'host.{k}' for k in _FILE['host']),
  *(f'layer.{k}' for k in _FILE['layer']),
  *(f'head.{k}' for k in _FILE['head']),
  *(f'head.table.1.{k}' for k in ('rows', 'us')),
  *(f'link.gb_per_s.1.{k}' for k in ('bytes', 'depth', 'gb_per_s')),
  *(f'layer.table.0.{k}' for k in ('rows', 'distinct', 'hops', 'us')),
)


def _spelled(path: str) -> str:
  """As messages do: link.gb_per_s[1].bytes."""
  parts = [f'[{x}]' if x.isdigit() else f'.{x}' for x in path.split('.')]
  return ''.join(parts).lstrip('.')


class FileTest(parameterized.TestCase):
  def test_what_it_costs_by_hand(self):
    found = _load(_FILE).costs(1000, 5000, 700)
    self.assertEqual(found.latency, 9000)
    self.assertEqual(found.load, 500)  # at depth 8
    self.assertEqual(found.expert, 10)
    # 200 bytes of the head more than were measured.
    self.assertEqual(found.decode(1, 3, on=True, last=True), 35_000 + 6002)
    self.assertEqual(found.decode(2, 3, on=True, last=True), 35_000 + 8002)
    self.assertEqual(found.decode(9, 3, on=True, last=True), 35_000 + 12_002)
    self.assertEqual(found.decode(1, 3, on=True, last=False), 35_000)
    self.assertEqual(found.host_launch, 80_000)
    self.assertEqual(found.host_answer, 4000)
    self.assertEqual(found.host_load, 3000)
    self.assertEqual(found.host_row, 2000)
    self.assertEqual(found.host_land, 5000)
    self.assertEqual(found.host_look, 90_000)
    self.assertEqual(found.host_wake, 60_000)
    self.assertEqual(found.prompt, 250)
    # Other bytes: 2,000 more an expert and 1,000 less a layer.
    other = _load(_FILE).costs(3000, 4000)
    self.assertEqual(
      other.decode(1, 3, on=True, last=False), 35_000 + 3 * 20 - 10
    )
    # Between 1,000 and 10,000 bytes, linear in the logarithm.
    self.assertEqual(other.load, round(3000 / (2 + 2 * 0.47712)))
    self.assertEqual(_load(_FILE).costs(100, 0).load, 50)
    self.assertEqual(_load(_FILE).costs(10**6, 0).load, 250_000)

  def test_without_a_table_bytes_count(self):
    bare = _with('layer.table', [])
    bare['head']['table'] = []
    found = _load(bare).costs(1000, 5000, 700)
    self.assertEqual(found.head, 7)
    self.assertEqual(
      found.decode(4, 3, on=True, last=False), 2500 + 50 + 3 * 10
    )

  def test_find(self):
    with self.assertRaisesRegex(ValueError, 'nowhere.json.*calibrate'):
      platforms.find('file:nowhere.json')
    with self.assertRaisesRegex(ValueError, "did you mean 'rtx4090'"):
      platforms.find('rtx409')
    with self.assertRaisesRegex(ValueError, 'file:PATH|is not known'):
      platforms.find('file')

  @parameterized.parameters(*_KEYS)
  def test_every_key_is_needed(self, path):
    with self.assertRaises(ValueError) as caught:
      _load(_with(path, ...))
    self.assertIn(f'{_spelled(path)} is missing', str(caught.exception))

  @parameterized.parameters(*_KEYS)
  def test_no_key_holds_anything_else(self, path):
    wrong: list[object] = [None, True, {}, -1, 'NaN', [[]]]
    wrong += [float('nan'), float('inf'), -float('inf'), '', 10**400]
    for value in wrong:
      if path in ('device', 'source') and value == 'NaN':
        continue  # A text may be any but an empty one.
      with self.assertRaises(ValueError, msg=f'{path} = {value!r}') as caught:
        _load(_with(path, value))
      # An object that should not be one is named, or a key that it lacks.
      self.assertIn(_spelled(path), str(caught.exception))

  @parameterized.parameters(
    ('version', 1, 'version is 1; it must be 2'),
    ('version', '1', "version is '1'"),
    ('more', 1, 'more is not known'),
    ('host.wait_us', 1, 'host.wait_us is not known'),
    ('link.gb_per_s', [], 'link.gb_per_s .*at least 1'),
    ('link.gb_per_s.1.gb_per_s', 0, r'gb_per_s\[1\].gb_per_s is 0.*above 0'),
    ('link.gb_per_s.0.depth', 0, r'gb_per_s\[0\].depth is 0'),
    ('link.gb_per_s.2.bytes', 10000, r'gb_per_s\[2\].*be new'),
    ('link.gb_per_s.0.bytes', 1.5, 'be an integer'),
    ('layer.table.1.distinct', 2, r'layer.table\[1\].*be new'),
    ('layer.table.1.us', 0, r'table\[1\].us is 0'),
    ('head.table.1.rows', 4, r'head.table\[1\].*be new'),
    ('memory_gb_per_s', -100, 'memory_gb_per_s is -100'),
    ('launch_us', 1e300, 'launch_us'),
  )
  def test_lies(self, path, value, words):
    with self.assertRaisesRegex(ValueError, words):
      _load(_with(path, value))

  def test_only_deep_hops(self):
    deep = [{'rows': 1, 'distinct': 2, 'hops': 4, 'us': 30.0}]
    with self.assertRaisesRegex(ValueError, 'with hops 1'):
      _load(_with('layer.table', deep))

  @parameterized.parameters(
    ('', 'no platform'),
    ('[1]', 'must be an object'),
    ('[' * 100_000, 'no platform'),
    ('{"version": 1, "version": 1}', "'version' is there twice"),
  )
  def test_no_file_of_ours(self, text, words):
    with self.assertRaisesRegex(ValueError, words):
      _load(text)


class PresetsTest(parameterized.TestCase):
  @parameterized.parameters(*platforms.PLATFORMS)
  def test_each_says_where_it_comes_from(self, name):
    found = platforms.find(name)
    self.assertEqual(found.name, name)
    self.assertGreater(len(found.source), 20)
    made = found.costs(9_437_184, 38_281_216)
    self.assertIsInstance(made, costs.Costs)
    for field in ('load', 'expert', 'shared', 'launch', 'host_launch'):
      self.assertGreater(getattr(made, field), 0)

  def test_facts_of_the_h200(self):
    """One layer of Qwen3-30B-A3B's shape, as measured."""
    made = platforms.H200.costs(9_437_184, 38_281_216)
    self.assertAlmostEqual(made.load + made.latency, 184_000, delta=1000)
    for rows, distinct, us, within in (
      (1, 8, 123, 0.03), (8, 50, 239, 0.02), (32, 108, 491, 0.1)
    ):  # fmt: skip
      found = made.decode(rows, distinct, on=True, last=False) * 1e-3
      self.assertAlmostEqual(found / us, 1, delta=within)


if __name__ == '__main__':
  absltest.main()
