"""Quality of stored experts, on a model small enough to judge in a second."""

import dataclasses
import pathlib
import tempfile

import jax
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax import loading, storage
from bevy_jax.experiments import corpus, demo_model, precision
from bevy_jax.layers import quant
from bevy_jax.offload import host_store

TEXTS = ['one two three four ' * 30, 'x', 'def f():\n  pass\n' * 7]


class PrecisionTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.tokenizer = corpus.train_tokenizer(TEXTS, 280)
    config = dataclasses.replace(demo_model.micro(), expert_dim=32)
    weights = demo_model.init(config, jax.random.key(0))
    # Experts that matter, so that rounding them can be seen.
    flat = np.asarray(weights['experts'] * 40).reshape(-1, *config.expert_shape)

    def fill(key: int, out: np.ndarray) -> None:
      out[...] = flat[key]

    store = host_store.HostStore.build(
      len(flat), config.expert_shape, np.dtype(np.float32), fill
    )
    folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.tokenizer.save(str(folder / 'tokenizer.json'))
    cls.model = loading.Loaded(config, weights['shared'], store, folder)

  def test_costs_grow_as_bits_shrink(self):
    windows = precision.windows(self.model, TEXTS, 0)
    kinds = [storage.parse(n) for n in ('f32', 'int8', 'int4')]
    found = list(
      precision.costs(
        self.model, {'a': windows}, kinds, 'xla', 'float32', rows=2
      )
    )
    self.assertEqual([c.bits_per_weight for c in found], [32, 8.5, 4.5])
    self.assertEqual([c.experts for c in found], ['f32', 'int8:32', 'int4:32'])
    moved = np.abs(precision.excess(found))
    self.assertEqual(moved[0], 0)
    self.assertGreater(moved[1], 0)
    self.assertGreater(moved[2], moved[1])
    self.assertLess(moved[2], 0.5)

  def test_excess_is_that_of_the_same_text(self):
    found = [
      precision.Cost(name, 16, text, bits, 1)
      for name, text, bits in (
        ('bf16', 'a', 1.0), ('bf16', 'b', 2.0), ('int8', 'a', 1.5),
        ('int8', 'b', 2.25),
      )
    ]  # fmt: skip
    np.testing.assert_array_equal(precision.excess(found), [0, 0, 0.5, 0.25])

  @parameterized.parameters(0, 40, 10**6)
  def test_every_document_is_shortened_alike(self, limit: int):
    some = precision.shortened(self.tokenizer, TEXTS, limit)
    self.assertLen(some, len(TEXTS))
    for short, text in zip(some, TEXTS, strict=True):
      self.assertStartsWith(text, short)
      self.assertNotEmpty(short)
    tokens = sum(map(len, corpus.encode(self.tokenizer, some)))
    if limit == 40:
      self.assertBetween(tokens, 30, 60)
    else:
      self.assertEqual(some, TEXTS)

  def test_models_of_another_build_are_refused(self):
    config = dataclasses.replace(self.model.config, qkv_bias=True)
    with self.assertRaisesRegex(ValueError, 'not built like the demo'):
      precision.check(self.model._replace(config=config))
    with self.assertRaisesRegex(ValueError, 'stored as int4:32 already'):
      precision.check(self.model._replace(format=quant.parse('int4')))
    precision.check(self.model)


if __name__ == '__main__':
  absltest.main()
