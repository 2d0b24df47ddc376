import math

import jax
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax.experiments import corpus, demo_model, evaluation

TEXTS = ['one two three four ' * 30, 'x', 'def f():\n  pass\n' * 7]


class WindowsTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.tokenizer = corpus.train_tokenizer(TEXTS, 280)

  @parameterized.parameters(4, 16, 64, 4096)
  def test_every_token_is_predicted_once_after_enough_context(self, window):
    windows = evaluation.Windows.of(self.tokenizer, TEXTS, window)
    spelled, lengths = [], []
    for tokens, counted in zip(windows.tokens, windows.counted, strict=True):
      at = np.flatnonzero(counted)
      spelled += tokens[1:][at].tolist()
      lengths.append((tokens[0], at[0]))
    text = self.tokenizer.decode(spelled)
    self.assertEqual(text, ''.join(TEXTS))
    self.assertEqual(windows.text_bytes, len(text))
    for first, context in lengths:
      # The start of a document has only its end token before it.
      if context == 0:
        self.assertEqual(first, 0)
      else:
        self.assertEqual(context, window // 2)

  def test_an_untrained_model_knows_nothing(self):
    config = demo_model.micro()
    weights = demo_model.init(config, jax.random.key(0))
    weights['shared']['embed'] = 0 * weights['shared']['embed']
    windows = evaluation.Windows.of(self.tokenizer, TEXTS, 16)
    said = evaluation.evaluate(config, weights, windows, 'xla')
    self.assertAlmostEqual(said.loss, math.log(512), places=4)
    tokens = sum(len(x) for x in corpus.encode(self.tokenizer, TEXTS))
    self.assertEqual(said.tokens, tokens)
    size = sum(map(len, TEXTS))
    self.assertAlmostEqual(said.bits_per_byte, 9 * tokens / size, places=4)
    # Each counted token uses top_k experts in every layer, padding none.
    np.testing.assert_array_equal(
      said.loads.sum(axis=-1), [tokens * config.top_k] * config.num_layers
    )


class ExpertUseTest(absltest.TestCase):
  def test_same_and_disjoint_experts(self):
    loads = {
      'books': np.asarray([[1.0, 1.0, 2.0, 0.0], [5.0, 5.0, 0.0, 0.0]]),
      'python': np.asarray([[2.0, 2.0, 4.0, 0.0], [0.0, 0.0, 1.0, 1.0]]),
    }
    use = evaluation.expert_use(loads)
    self.assertEqual(use['distance'], [0.0, 1.0])
    self.assertEqual(use['max_over_mean'], [2.0, 1.0])
    self.assertEqual(use['min_over_mean'], [0.0, 1.0])
    self.assertEqual(use['unused'], 1)


class SampleTest(absltest.TestCase):
  def test_too_long_is_an_error(self):
    tokenizer = corpus.train_tokenizer(TEXTS, 280)
    config = demo_model.micro()
    with self.assertRaisesRegex(ValueError, 'the context is 128'):
      evaluation.sample(
        config, {}, tokenizer, ['x'],
        new_tokens=128, temperature=0.0, seed=0, attention='xla',
      )  # fmt: skip


if __name__ == '__main__':
  absltest.main()
