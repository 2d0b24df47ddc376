"""The fitted constants of a platform are those of its measurements."""

import csv
import pathlib
import tempfile
import unittest

from absl.testing import absltest

from bevy_jax import platforms, shapes
from bevy_jax.experiments import platform_fit

_REAL = (
  pathlib.Path(__file__).resolve().parents[3]
  / 'shared/data/calibration/qwen3_30b_rtxpro6000'
)


def _write(path, header, rows):
  with open(path, 'w', encoding='utf-8', newline='') as file:
    csv.writer(file).writerows([header, *rows])


class FitTest(absltest.TestCase):
  def test_known_constants_come_back(self):
    """8 us and 3 an expert and 0.5 a row; the dense part is linear too."""
    temporary = tempfile.TemporaryDirectory()
    self.addCleanup(temporary.cleanup)
    folder = pathlib.Path(temporary.name)
    tokens = (1, 2, 4, 8, 16, 32, 64, 256, 512)
    _write(
      folder / 'moe.csv',
      ('tokens', 'activated_experts', 'time_us'),
      [(n, m, 8 + 3 * m + 0.5 * n) for n in tokens for m in (8, 64, 128)],
    )
    _write(
      folder / 'dense.csv',
      ('layer', 'tokens', 'time_us'),
      [(layer, n, 10 + 0.25 * n) for n in tokens
       for layer in ('layernorm', 'qkv_proj', 'embedding')],
    )  # fmt: skip
    found = platform_fit.fit(folder)
    shape = shapes.SHAPES['qwen3-30b-a3b']
    self.assertAlmostEqual(
      found.memory_gb_per_s, shape.expert_bytes() / 3000, places=6
    )
    # Two norms and one projection; the embedding is no part of a layer.
    base = 8 + 3 * 10
    shared = shape.layer_bytes / found.memory_gb_per_s * 1e-3
    self.assertAlmostEqual(found.launch_us, base - shared, places=6)
    self.assertAlmostEqual(found.row_us, 0.5 + 3 * 0.25, places=6)
    self.assertAlmostEqual(found.prefill_us, 0.5 + 3 * 0.25, places=6)
    self.assertLess(found.worst_error, 1e-9)

  @unittest.skipUnless(_REAL.is_dir(), 'the measurements are not here')
  def test_the_preset_is_the_fit(self):
    found, kept = platform_fit.fit(_REAL), platforms.RTX_PRO_6000
    for name in ('memory_gb_per_s', 'launch_us', 'row_us', 'prefill_us'):
      self.assertAlmostEqual(
        getattr(found, name) / getattr(kept, name), 1, delta=0.005, msg=name
      )
    self.assertAlmostEqual(found.mean_error, 0.059, delta=0.001)
    self.assertAlmostEqual(found.worst_error, 0.16, delta=0.001)


if __name__ == '__main__':
  absltest.main()
