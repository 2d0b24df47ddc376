"""Prompts chunk by chunk: all but the last token, in waves."""

from absl.testing import absltest

from bevy_jax import prefill
from bevy_jax import request as request_lib
from bevy_jax.offload import slot_table


def _progress(row: int, length: int) -> request_lib.Progress:
  prompt = tuple(100 * row + i for i in range(length))
  request = request_lib.Request(number=row, prompt=prompt, new_tokens=1)
  return request_lib.Progress(request, row)


class PrefillTest(absltest.TestCase):
  def test_chunks_cover_every_token_but_the_last(self):
    group = [_progress(0, 7), _progress(1, 1), _progress(2, 4), _progress(3, 2)]
    it = prefill.Prefill(group, 3)
    self.assertEqual(
      it.next_chunk(),
      ([0, 2, 3], [(0, 1, 2), (200, 201, 202), (300,)], [0, 0, 0]),
    )
    it.finish_chunk()
    self.assertEqual(it.next_chunk(), ([0], [(3, 4, 5)], [3]))
    self.assertFalse(it.done)
    it.finish_chunk()
    self.assertTrue(it.done)

  def test_one_token_needs_no_prefill(self):
    self.assertTrue(prefill.Prefill([_progress(0, 1)], 3).done)

  def test_padding_uses_nothing(self):
    it = prefill.Prefill([_progress(0, 3), _progress(1, 2)], 3)
    ids = [(0, 1), (1, 2), (7, 7), (1, 3), (7, 7), (7, 7), (7, 7)]
    uses = it.arrive(1, ids)
    self.assertEqual(uses, {0: 1, 1: 3, 2: 1, 3: 1})
    self.assertEqual((it.layer, it.need), (1, 0b1111))
    table = slot_table.SlotTable(2, 8, 9)
    for key in (8, 9, 10, 11):
      table.begin_load(key)
      table.finish_load(key)
    at = table.slot_of
    self.assertEqual(
      it.slots(table, 0b0011),
      [
        [at[8], at[9]],
        [at[9], -1],
        [-1, -1],
        [at[9], -1],
        [-1, -1],
        [-1, -1],
        [-1, -1],
      ],
    )

  def test_waves_take_what_is_there_first(self):
    it = prefill.Prefill([_progress(0, 5)], 4)
    it.arrive(0, [(0, 1), (2, 3), (4, 5), (0, 5)])
    self.assertEqual(it.wave(resident=0b110000, room=3), 0b110001)
    self.assertEqual(it.wave(resident=0b111100, room=3), 0b011100)
    self.assertEqual(it.wave(resident=0, room=9), 0b111111)


if __name__ == '__main__':
  absltest.main()
