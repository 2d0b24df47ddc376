"""Published sizes: what they add up to is what their authors say."""

from absl.testing import absltest, parameterized

from bevy_jax import shapes


class ShapesTest(parameterized.TestCase):
  @parameterized.parameters(
    # Billions of weights that each is known for; embeddings are left out,
    # but for the head, and so are DeepSeek's first layer and all keys.
    ('mixtral-8x7b', 46.7, 0.2),
    ('qwen3-30b-a3b', 30.5, 0.4),
    ('olmoe-1b-7b', 6.9, 0.2),
    ('deepseek-v2-lite', 15.7, 0.3),
    ('gpt-oss-20b', 20.9, 0.7),
  )
  def test_totals(self, name, billions, within):
    s = shapes.SHAPES[name]
    each = s.layer_bytes + s.experts * s.expert_bytes()
    total = (s.layers * each + s.head_bytes) / 2 / 1e9
    self.assertAlmostEqual(total, billions, delta=within)

  def test_bytes_of_an_expert_by_hand(self):
    s = shapes.SHAPES['qwen3-30b-a3b']
    weights = 3 * 2048 * 768
    self.assertEqual(s.expert_bytes(), 2 * weights)
    self.assertEqual(s.expert_bytes('int8'), weights + 2 * weights // 32)
    self.assertEqual(s.expert_bytes('int4'), weights // 2 + 2 * weights // 32)
    self.assertEqual(s.expert_bytes('int4:64'), weights // 2 + weights // 32)
    biased = shapes.SHAPES['gpt-oss-20b']
    self.assertEqual(biased.expert_bytes(), 2 * (3 * 2880 * 2880 + 3 * 2880))

  def test_parse(self):
    olmoe = shapes.SHAPES['olmoe-1b-7b']
    self.assertEqual(shapes.parse('olmoe-1b-7b'), (olmoe, 'bf16'))
    self.assertEqual(
      shapes.parse('olmoe-1b-7b:int4:32:zero'), (olmoe, 'int4:32:zero')
    )
    for wrong, words in (
      ('mixtral', "did you mean 'mixtral-8x7b'"),
      ('olmoe-1b-7b:int5', 'int5'),
      ('gpt-oss-20b:int4:128', '2880'),
    ):
      with self.assertRaisesRegex(ValueError, words):
        shapes.parse(wrong)


if __name__ == '__main__':
  absltest.main()
