"""Settings of a request that make no sense are refused."""

from absl.testing import absltest, parameterized

from bevy_jax import request


class SamplingParamsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({'temperature': -0.1}, 'temperature is -0.1'),
    ({'temperature': float('nan')}, 'temperature is nan'),
    ({'top_k': -1}, 'top_k is -1'),
    ({'top_p': 0.0}, 'top_p is 0.0'),
    ({'top_p': 1.1}, 'top_p is 1.1'),
    ({'min_p': -0.1}, 'min_p is -0.1'),
    ({'min_p': 1.5}, 'min_p is 1.5'),
    ({'seed': -1}, 'seed is -1'),
    ({'seed': 2**31}, 'seed is 2147483648'),
  )
  def test_refused(self, changes: dict[str, float], said: str):
    with self.assertRaisesRegex(ValueError, said):
      request.SamplingParams(**changes)

  def test_the_edges_are_fine(self):
    request.SamplingParams(top_p=1.0, min_p=1.0, seed=2**31 - 1)
    request.SamplingParams(temperature=0.0, top_k=0, min_p=0.0, seed=0)


if __name__ == '__main__':
  absltest.main()
