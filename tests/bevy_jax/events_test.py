"""The log on disk and back."""

import pathlib
import tempfile

from absl.testing import absltest

from bevy_jax import events

_LOG = [
  events.Admitted(1, 0, 3, 17, 0),
  events.Judged(7, 1, 2, 4, 3, 2, 1, 2),
  events.PrefillRouted(2, 1, (0, 5), 9, 4),
  events.Prefilled(3, (0,)),
  events.LoadIssued(4, 12, 3, 'demand'),
  events.LoadLanded(5, 12, 3),
  events.Evicted(6, 12, 3, False),
  events.LaunchBegun(
    7, 0, 'decode', 1, (0, 2), (12, 13), True, 1, (1, 2, 3, 4)
  ),
  events.LaunchEnded(8, 0),
  events.Crossed(8, 0, (2, 1), (21, 23)),
  events.Routed(9, 0, 1, 2, (3, 1), 1, 6),
  events.Token(10, 0, 1, 95),
  events.LoadLanded(10, 13, 4, (6, 9)),
  events.LoadFailed(10, 14, 3, 'the disk is broken'),
  events.Finished(11, 0, 'error', 'the disk is broken'),
]


class EventsTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.path = pathlib.Path(folder.name) / 'events.jsonl'

  def test_every_kind_comes_back(self):
    self.assertEqual({type(e) for e in _LOG}, set(events.KINDS.values()))
    kinds = {kind.__name__ for kind in events.Event.__subclasses__()}
    self.assertEqual(set(events.KINDS), kinds)
    events.save(self.path, {'slots': 3}, _LOG)
    header, log = events.load(self.path)
    self.assertEqual(header, {'version': events.VERSION, 'slots': 3})
    self.assertEqual(log, _LOG)

  def test_what_is_wrong_is_named(self):
    events.save(self.path, {}, _LOG)
    lines = self.path.read_text('utf-8').splitlines()
    for bad, said in (
      ('{"event": "Nothing"}', 'line 3'),
      ('{"event": "Token", "time": 1}', 'line 3'),
      ('{"event": "Tok', 'line 3'),
    ):
      text = [*lines[:2], bad, *lines[3:]]
      self.path.write_text('\n'.join(text), 'utf-8')
      with self.assertRaisesRegex(ValueError, said):
        events.load(self.path)
    self.path.write_text('{"version": 0}\n', 'utf-8')
    with self.assertRaisesRegex(ValueError, 'schema version 0'):
      events.load(self.path)


if __name__ == '__main__':
  absltest.main()
