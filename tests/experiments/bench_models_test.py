"""Random weights of published shapes."""

import dataclasses

import jax
import numpy as np
from absl.testing import absltest, parameterized

from bevy_jax import shapes, storage
from bevy_jax.experiments import bench_models
from bevy_jax.layers import params as params_lib
from bevy_jax.layers import quant, reference


class ShapesTest(parameterized.TestCase):
  @parameterized.parameters(
    ('qwen3-30b-a3b', 'qwen3-30b-a3b'),
    ('gpt-oss-20b-shape', 'gpt-oss-20b'),
    ('olmoe-1b-7b', 'olmoe-1b-7b'),
    ('mixtral-8x7b', 'mixtral-8x7b'),
    ('facts', 'qwen3-30b-a3b'),
  )
  def test_a_layer_weighs_what_is_published(self, name: str, published: str):
    config, shape = bench_models.MODELS[name], shapes.SHAPES[published]
    layer = params_lib.shapes(config)['layers'][0]
    sizes = {k: np.prod(v) for k, v in layer.items()}
    attention = sum(
      v for k, v in sizes.items() if k in ('wq', 'wk', 'wv', 'wo')
    )
    self.assertEqual(attention, shape.attention)
    self.assertEqual(
      np.prod(config.expert_shape), 3 * shape.dim * shape.expert_dim
    )
    self.assertEqual(config.vocab_size, shape.vocab)
    if name not in ('facts', 'mixtral-8x7b'):
      self.assertLen(config.moe_ids, shape.layers)

  @parameterized.parameters(
    ('gpt-oss-20b-shape', 'int4:32'), ('qwen3-30b-a3b', 'int8')
  )
  def test_packed_forms_fit(self, name: str, form: str):
    quant.layout(quant.parse(form), bench_models.MODELS[name].expert_shape)


class MakeTest(parameterized.TestCase):
  @parameterized.parameters('bf16', 'f32', 'int8', 'int4:32', 'int4:32:zero')
  def test_experts_are_random_and_sane(self, form: str):
    """Seen to fail without the turns: few templates, many equal experts."""
    made = bench_models.make('tiny', form, 'auto', dtype='float32', threads=3)
    model = made.model
    found = storage.experts(
      model.experts, model.format, model.config.expert_shape
    )
    self.assertLen({e.tobytes() for e in found}, 32)
    _, f, d = model.config.expert_shape
    for expert in found:
      np.testing.assert_allclose(np.std(expert[:2]), d**-0.5, rtol=0.1)
      np.testing.assert_allclose(np.std(expert[2]), f**-0.5, rtol=0.1)
      # Four bits have one value more below zero than above.
      self.assertLess(abs(np.mean(expert)), 0.2 * d**-0.5)

  def test_a_seed_gives_the_same_model(self):
    one, same, other = (
      bench_models.make('tiny', 'int8', 'auto', seed=s).model for s in (1, 1, 2)
    )
    np.testing.assert_array_equal(one.experts.read(5), same.experts.read(5))
    self.assertFalse(np.array_equal(one.experts.read(5), other.experts.read(5)))
    for a, b in zip(
      jax.tree.leaves(one.params), jax.tree.leaves(same.params), strict=True
    ):
      np.testing.assert_array_equal(a, b)

  def test_progress_tells_every_byte(self):
    seen = []
    bench_models.make(
      'tiny', 'bf16', 'auto', progress=lambda *at: seen.append(at)
    )
    whole = 32 * 3 * 64 * 64 * 2
    self.assertEqual(seen[-1], (whole, whole))
    self.assertEqual(sorted(seen), seen)

  def test_what_is_not_known_is_refused(self):
    with self.assertRaisesRegex(ValueError, "did you mean 'facts'"):
      bench_models.make('fact', 'bf16', 'auto')
    with self.assertRaisesRegex(ValueError, 'cannot be stored'):
      bench_models.make('tiny', 'fp8', 'auto')

  def test_activations_stay_sane_through_24_layers(self):
    """Logits of 16 tokens are finite and of order one, so is the stream."""
    config = dataclasses.replace(
      bench_models.MODELS['tiny'], num_layers=24, moe_layers=(True,) * 24
    )
    params = bench_models.shared(config, 0, 'float32')
    fill = bench_models.Fill(config, None, np.dtype(np.float32), 0)
    pool = np.empty((24, config.num_experts, *config.expert_shape), np.float32)
    for key, out in enumerate(pool.reshape(-1, *config.expert_shape)):
      fill(key, out)
    with jax.disable_jit():  # 24 layers take longer to compile than to do.
      logits = reference.logits(
        config, params, jax.numpy.asarray(pool), jax.numpy.arange(16)
      )
    self.assertTrue(np.isfinite(logits).all())
    # The head is the embedding, of size 1: 64 products of numbers near 1.
    self.assertBetween(float(np.std(logits)), 4, 16)


if __name__ == '__main__':
  absltest.main()
