"""JAX's limit on pinned memory, raised before JAX is there."""

import os
import subprocess
import sys

from absl.testing import absltest, parameterized

_NAME = 'XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB'
# A machine of so many GiB imports us.
_SCRIPT = f"""
import os, sys
sizes = {{'SC_PHYS_PAGES': int(sys.argv[1]) * 2**18, 'SC_PAGE_SIZE': 4096}}
os.sysconf = sizes.__getitem__
import bevy_jax
assert 'jax' not in sys.modules, 'its client could have started'
print(os.environ.get('{_NAME}'))
"""


class PinnedLimitTest(parameterized.TestCase):
  @parameterized.parameters(
    (128, None, '128'), (128, '70', '70'), (32, None, 'None')
  )
  def test_it_is_what_the_machine_has(self, gib, set_before, wanted):
    """Seen to fail where the user's own was overwritten."""
    env = {k: v for k, v in os.environ.items() if k != _NAME}
    if set_before:
      env[_NAME] = set_before
    done = subprocess.run(
      [sys.executable, '-c', _SCRIPT, str(gib)],
      env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    self.assertEqual(done.stdout.strip(), wanted)


if __name__ == '__main__':
  absltest.main()
