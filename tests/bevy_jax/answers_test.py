"""What answers mean is told behind the next launch, and nobody can tell.

Seen to fail: `settle` telling of an answer behind what came after it,
`Engine._load` without its `settle`; and the launch that does not wait, with
`moved` telling all at once.
"""

import random

from absl.testing import absltest, parameterized

from bevy_jax import answers, engine, events, synthetic, virtual
from bevy_jax import config as config_lib
from bevy_jax import costs as costs_lib
from bevy_jax import hops as hops_lib
from bevy_jax import request as request_lib
from bevy_jax.layers import config as model_config

_TOP_K = 3
_SEEDS = 5


class _AtOnce(answers.Answers):
  """Tells everything before anybody decides."""

  def moved(self, flight, ended):
    out = super().moved(flight, ended)
    self.settle()
    return out


def _engine(seed: int, scheduler: str, eviction: str, prefetch: str, hops: int):
  rng = random.Random(seed)
  layers, experts = 2 * rng.randint(1, 4), rng.randint(4, 9)
  model = model_config.tiny(
    num_layers=layers,
    num_experts=experts,
    top_k=_TOP_K,
    moe_layers=(True,) * layers,
  )
  costs = costs_lib.Costs(
    load=rng.randint(1, 40), launch=rng.randint(1, 40), host_load=3
  )
  prefetcher, _ = config_lib.parse_prefetch(prefetch)
  most = hops_lib.most(hops, layers)
  found = engine.Engine(
    model,
    virtual.VirtualExecutor(
      synthetic.Hash(experts, _TOP_K, seed),
      costs,
      layers,
      chunk=4,
      gates=prefetcher.gates,
      hops=most,
    ),
    hops_lib.give(config_lib.SCHEDULERS[scheduler], most, layers),
    config_lib.EVICTIONS[eviction],
    rows=rng.randint(1, 5),
    slots=rng.randint(_TOP_K, layers * experts),
    link_depth=rng.randint(1, 5),
    prefetcher=prefetcher,
  )
  for number in range(rng.randint(1, 9)):
    found.submit(
      request_lib.Request(
        number=number,
        prompt=tuple(rng.randrange(20) for _ in range(rng.choice((1, 6)))),
        new_tokens=rng.randint(1, 4),
        eos_ids=(0, 1),
      )
    )
  return found


def _run(found: engine.Engine) -> list[events.Event]:
  while found.busy:
    found.step()
    found.table.check_integrity()
  return found.log


class AnswersTest(parameterized.TestCase):
  @parameterized.product(
    scheduler=('lockstep', 'runahead'),
    policies=(('lru', 'none'), ('reuse', 'mixture'), ('lfu', 'oracle:p=0.8')),
    hops=(1, 4),
  )
  def test_telling_later_changes_nothing(self, scheduler, policies, hops):
    for seed in range(_SEEDS):
      log = _run(_engine(seed, scheduler, *policies, hops))
      other = _engine(seed, scheduler, *policies, hops)
      other._answers.__class__ = _AtOnce
      self.assertEqual(log, _run(other))

  def test_the_next_launch_does_not_wait_for_it(self):
    found = _engine(1, 'lockstep', 'lru', 'none', 4)
    told, launch = [], found._executor.launch

    def watched(number, batch):
      told.append(found._answers.pending)
      launch(number, batch)

    found._executor.launch = watched
    _run(found)
    self.assertIn(True, told)
    self.assertFalse(found._answers.pending)


if __name__ == '__main__':
  absltest.main()
