"""Routing traces: what is read, what is refused and by which name."""

import json
import os
import tempfile

import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax import trace


def _trace(**changes):
  experts = np.full((2, 3, 2, 2), -1, np.int16)
  experts[0] = [0, 3]
  experts[1, :2] = [2, 1]
  lengths = np.array([3, 2], np.int32)
  fields = {'experts': experts, 'lengths': lengths, 'num_experts': 4}
  return trace.Trace(**(fields | changes))


def _spring():
  _Trap.sprung = True


class _Trap:
  """Says whether it was ever unpickled."""

  sprung = False

  def __reduce__(self):
    return _spring, ()


class TraceTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    directory = tempfile.TemporaryDirectory()
    self.addCleanup(directory.cleanup)
    self.path = os.path.join(directory.name, 'trace.npz')

  def test_round_trip(self):
    trace.save(self.path, _trace(meta={'source': 'by hand'}))
    found = trace.load(self.path)
    np.testing.assert_array_equal(found.experts, _trace().experts)
    np.testing.assert_array_equal(found.lengths, [3, 2])
    self.assertEqual(found.num_experts, 4)
    self.assertEqual(found.meta['source'], 'by hand')
    self.assertEqual(found.layers, 2)

  def test_popularity(self):
    found = _trace().popularity()
    self.assertEqual(found.tolist(), [3, 2, 2, 3, 3, 2, 2, 3])

  @parameterized.parameters(
    ((0, 1, 1, 0), 4, r'experts\[0, 1, 1, 0\] is 4; an expert id must lie'),
    ((1, 0, 0, 1), -1, r'experts\[1, 0, 0, 1\] is -1; an expert id must lie'),
    ((1, 2, 0, 1), 0, r'experts\[1, 2, 0, 1\] is 0; behind the end'),
    ((0, 2, 1, 0), 3, r'experts\[0, 2, 1, 0\] is 3; a token uses each'),
  )
  def test_refuses_ids(self, at, value, message):
    lying = _trace()
    lying.experts[at] = value
    with self.assertRaisesRegex(ValueError, message):
      trace.check(lying)

  @parameterized.parameters(
    ({'lengths': np.array([3, 4], np.int32)}, r'lengths\[1\] is 4'),
    ({'lengths': np.array([-1, 2], np.int32)}, r'lengths\[0\] is -1'),
    ({'lengths': np.array([3], np.int32)}, 'one integer for each of the 2'),
    ({'lengths': np.array([3.0, 2.0])}, 'one integer for each of the 2'),
    ({'meta': {'top_k': 3}}, r'meta says top_k 3, .* 2 ids'),
    ({'num_experts': 0}, 'num_experts is 0'),
    ({'num_experts': 4.0}, 'num_experts is 4.0'),
    ({'num_experts': '4'}, "num_experts is '4'"),
    ({'num_experts': 3}, r'experts\[0, 0, 0, 1\] is 3; an expert id must lie'),
    ({'experts': np.zeros((2, 3, 2, 2), np.float16)}, 'it must be int16'),
    ({'experts': np.zeros((2, 3, 4), np.int16)}, 'it must be int16'),
    ({'num_experts': True}, 'num_experts is True'),
    ({'experts': np.zeros((2, 3, 2, 2))}, 'it must be int16'),
    ({'experts': np.zeros((2, 0, 2, 2), np.int16)}, 'no side empty'),
  )
  def test_refuses_shapes(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      trace.check(_trace(**changes))

  def test_a_damaged_file_is_refused_or_whole(self):
    """Cut anywhere, or with any byte changed: never another trace."""
    trace.save(self.path, _trace(meta={'source': 'by hand'}))
    with open(self.path, 'rb') as file:
      sound = file.read()
    cuts = [sound[:n] for n in range(0, len(sound), 7)]
    flips = [
      sound[:n] + bytes([sound[n] ^ 0x55]) + sound[n + 1 :]
      for n in range(len(sound))
    ]
    refused = 0
    for damaged in (*cuts, *flips):
      with open(self.path, 'wb') as file:
        file.write(damaged)
      try:
        found = trace.load(self.path)
      except ValueError:
        refused += 1
        continue
      self.assertNotIn(damaged, cuts)
      np.testing.assert_array_equal(found.experts, _trace().experts)
      np.testing.assert_array_equal(found.lengths, _trace().lengths)
      self.assertEqual(found.num_experts, 4)
    self.assertGreater(refused, len(cuts) + len(flips) // 2)

  @parameterized.parameters('experts', 'lengths', 'meta')
  def test_pickled_arrays_are_never_read(self, name):
    meta = np.array(json.dumps({'num_experts': 4}))
    arrays = {'experts': _trace().experts, 'lengths': _trace().lengths}
    pickled = np.array([_Trap()], object)
    np.savez(self.path, **(arrays | {'meta': meta} | {name: pickled}))
    with self.assertRaisesRegex(ValueError, 'pickled objects are never read'):
      trace.load(self.path)
    self.assertFalse(_Trap.sprung)

  def test_other_files_of_numpy_are_refused(self):
    for array in (np.arange(4), np.array([_Trap()], object)):
      with open(self.path, 'wb') as file:
        np.save(file, array)
      with self.assertRaisesRegex(ValueError, 'is no routing trace'):
        trace.load(self.path)
    self.assertFalse(_Trap.sprung)

  def test_refuses_files(self):
    meta = np.array(json.dumps({'num_experts': 4}))
    arrays = {'experts': _trace().experts, 'lengths': _trace().lengths}
    cases = (
      ({**arrays}, 'meta'),
      ({**arrays, 'meta': np.array('no JSON')}, 'meta must be a JSON object'),
      ({**arrays, 'meta': np.array('{}')}, 'meta must be a JSON object'),
      (
        {**arrays, 'meta': meta, 'experts': np.array([{}], object)},
        'never read',
      ),
    )
    for fields, message in cases:
      np.savez(self.path, **fields)
      with self.assertRaisesRegex(ValueError, message):
        trace.load(self.path)
    with open(self.path, 'wb') as file:
      file.write(b'PK no zip file')
    with self.assertRaisesRegex(ValueError, 'is no routing trace'):
      trace.load(self.path)
    with self.assertRaisesRegex(ValueError, 'is no routing trace'):
      trace.load(self.path + '.missing')


if __name__ == '__main__':
  absltest.main()
