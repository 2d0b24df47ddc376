"""The export, and the trained demo model that the repository ships."""

import json
import pathlib
import tempfile

import jax
import numpy as np
import tokenizers
from absl.testing import absltest
from safetensors import numpy as safetensors_numpy

import bevy_jax
from bevy_jax.experiments import corpus, demo_model, evaluation
from bevy_jax.layers import families

DEMO = pathlib.Path(bevy_jax.__file__).parent / 'demo'

# Ours, so that no model saw them in training.
BOOKS = (
  'The lamp had burned low when the two brothers came in from the rain. '
  '"You are late," said the old woman, without turning from the fire; "and '
  'I suppose you have forgotten what I asked you to bring." The elder of '
  'them took off his hat, and laid a small parcel upon the table. "I have '
  'forgotten nothing," he answered, "but the road is very bad, and we had '
  'to wait for the ferry until it was nearly dark."\n'
)
PYTHON = '''
class Counter:
    """Count how often each word was seen."""

    def __init__(self, words=None):
        self.counts = {}
        if words is not None:
            for word in words:
                self.add(word)

    def add(self, word, number=1):
        if not isinstance(word, str):
            raise TypeError('word must be a string, not %r' % type(word))
        self.counts[word] = self.counts.get(word, 0) + number
        return self.counts[word]
'''


class ExportTest(absltest.TestCase):
  def test_names_are_transformers_and_come_back(self):
    config = demo_model.micro()
    weights = demo_model.init(config, jax.random.key(0))
    named = dict(demo_model.tensors(config, weights))
    shape = named['model.layers.1.mlp.experts.7.down_proj.weight'].shape
    self.assertEqual(shape, (32, 16))
    shape = named['model.layers.0.self_attn.k_proj.weight'].shape
    self.assertEqual(shape, (16, 32))
    self.assertNotIn('lm_head.weight', named)
    again = demo_model.from_tensors(config, named)
    rounded = demo_model.rounded(weights)
    jax.tree.map(np.testing.assert_array_equal, again, rounded)

  def test_shards_hold_each_tensor_once(self):
    config = demo_model.micro()
    weights = demo_model.init(config, jax.random.key(0))
    folder = pathlib.Path(tempfile.mkdtemp())
    demo_model.export(config, weights, folder, shards=3)
    index = json.loads((folder / 'model.safetensors.index.json').read_text())
    named = dict(demo_model.tensors(config, weights))
    self.assertCountEqual(index['weight_map'], named)
    self.assertLen(set(index['weight_map'].values()), 3)
    for name, tensor in named.items():
      part = safetensors_numpy.load_file(folder / index['weight_map'][name])
      np.testing.assert_array_equal(part[name], tensor)

  def test_config_maps_back(self):
    config = demo_model.demo()
    again = families.from_hf(demo_model.hf_config(config))
    self.assertEqual(again, config)


class ShippedTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.config = demo_model.demo()
    cls.named = safetensors_numpy.load_file(DEMO / 'model.safetensors')
    cls.weights = demo_model.from_tensors(cls.config, cls.named)
    path = str(DEMO / 'tokenizer.json')
    cls.tokenizer = tokenizers.Tokenizer.from_file(path)

  def test_size_and_config(self):
    size = sum(p.stat().st_size for p in DEMO.iterdir())
    self.assertLess(size, 36_000_000)
    said = json.loads((DEMO / 'config.json').read_text())
    self.assertEqual(said, demo_model.hf_config(self.config))
    said = json.loads((DEMO / 'generation_config.json').read_text())
    self.assertEqual(said, demo_model.generation_config(self.config))

  def test_tensors_are_all_there_and_narrow(self):
    wanted = demo_model.tensors(self.config, self.weights)
    self.assertEqual(
      {k: v.shape for k, v in wanted},
      {k: v.shape for k, v in self.named.items()},
    )
    self.assertEqual({str(v.dtype) for v in self.named.values()}, {'bfloat16'})

  def test_tokenizer_fits(self):
    self.assertEqual(self.tokenizer.get_vocab_size(), self.config.vocab_size)
    self.assertEqual((corpus.end_id(self.tokenizer),), self.config.eos_ids)
    for text in (BOOKS, PYTHON, ' \r\n\u00e9e\u0301\U0001f600\x00 '):
      ids = self.tokenizer.encode(text).ids
      self.assertEqual(self.tokenizer.decode(ids), text)

  def test_it_predicts_english_and_python_it_never_saw(self):
    # An untrained model needs 3.5 bits a byte.
    for text, most in ((BOOKS, 1.2), (PYTHON, 0.7)):
      windows = evaluation.Windows.of(self.tokenizer, [text], 256)
      said = evaluation.evaluate(
        self.config, self.weights, windows, 'xla', 'float32'
      )
      self.assertLess(said.bits_per_byte, most, text)

  def test_it_writes_words(self):
    texts = evaluation.sample(
      self.config, self.weights, self.tokenizer, ['He looked at her, and'],
      new_tokens=12, temperature=0.0, seed=0, attention='xla',
    )  # fmt: skip
    words = texts[0].removeprefix('He looked at her, and').split()
    self.assertGreater(len(words), 5, texts)
    self.assertTrue(all(len(w) < 16 for w in words), texts)


if __name__ == '__main__':
  absltest.main()
