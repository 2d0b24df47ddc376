"""What a model's shape says beyond its fields."""

from absl.testing import absltest

from bevy_jax.layers import config as config_lib


class ConfigTest(absltest.TestCase):
  def test_derived(self):
    config = config_lib.tiny(moe_layers=(False, True, False, True))
    self.assertEqual(config.moe_ids, (1, 3))
    self.assertEqual(config.expert_shape, (3, 16, 32))
    self.assertEqual([config.window(i) for i in range(4)], [0] * 4)
    config = config_lib.tiny(windows=(0, 5, 0, 7))
    self.assertEqual([config.window(i) for i in range(4)], [0, 5, 0, 7])
    self.assertEqual(hash(config), hash(config_lib.tiny(windows=(0, 5, 0, 7))))


if __name__ == '__main__':
  absltest.main()
