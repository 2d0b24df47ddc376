"""The golden truth says what transformers says, for every golden case."""

import functools
import pathlib

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from absl.testing import absltest, parameterized

from bevy_jax import loading
from bevy_jax.layers import config as config_lib
from bevy_jax.layers import params as params_lib
from bevy_jax.layers import reference

_GOLDEN = pathlib.Path(__file__).parent.parent / 'golden'
_CASES = tuple(sorted(p.parent.name for p in _GOLDEN.glob('*/config.json')))
_TOLERANCE = 1e-4


@functools.cache
def _load(
  case: str,
) -> tuple[config_lib.ModelConfig, params_lib.Params, jnp.ndarray]:
  loaded = loading.load(_GOLDEN / case, param_dtype=jnp.float32)
  config, store = loaded.config, loaded.experts
  blocks = [
    np.asarray(store.block(i).view, np.float32) for i in range(len(store))
  ]
  bank = np.stack(blocks).reshape(
    len(config.moe_ids), config.num_experts, *config.expert_shape
  )
  return config, loaded.params, jnp.asarray(bank)


class GoldenTest(parameterized.TestCase):
  def test_cases_are_there(self):
    families = {'mixtral', 'qwen3_moe', 'olmoe', 'qwen2_moe'}
    self.assertEqual({_load(case)[0].family for case in _CASES}, families)
    self.assertGreaterEqual(len(_CASES), 17)

  @parameterized.parameters(*_CASES)
  def test_logits_and_tokens_are_those_of_transformers(self, case: str):
    config, params, experts = _load(case)
    kept = safetensors.numpy.load_file(_GOLDEN / case / 'expected.safetensors')
    prompt = kept['tokens'].shape[1]
    self.assertEqual(kept['decode_tokens'].shape[1], 16)
    for i, tokens in enumerate(kept['tokens']):
      text = np.concatenate([tokens, kept['decode_tokens'][i]])
      ours = np.asarray(
        reference.logits(config, params, experts, jnp.asarray(text))
      )
      np.testing.assert_allclose(
        ours[:prompt], kept['prefill_logits'][i], atol=_TOLERANCE, rtol=0
      )
      np.testing.assert_allclose(
        ours[prompt:], kept['decode_logits'][i], atol=_TOLERANCE, rtol=0
      )
      np.testing.assert_array_equal(
        ours[prompt - 1 : -1].argmax(-1), kept['decode_tokens'][i]
      )


class GenerateTest(absltest.TestCase):
  def test_generate_repeats_the_golden_text(self):
    case = _CASES[0]
    kept = safetensors.numpy.load_file(_GOLDEN / case / 'expected.safetensors')
    got = reference.generate(*_load(case), kept['tokens'][0].tolist(), 16)
    self.assertEqual(got, kept['decode_tokens'][0].tolist())

  def test_padding_changes_nothing_and_an_end_ends(self):
    case = _CASES[0]
    kept = safetensors.numpy.load_file(_GOLDEN / case / 'expected.safetensors')
    prompt, text = kept['tokens'][0].tolist(), kept['decode_tokens'][0].tolist()
    end = text[4]
    got = reference.generate(
      *_load(case), prompt, 16, eos_ids=(end,), length=60
    )
    self.assertEqual(got, text[: text.index(end) + 1])


if __name__ == '__main__':
  absltest.main()
