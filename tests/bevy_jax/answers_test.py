"""What answers mean is told behind the next launch, and nobody can tell.

Seen to fail: `settle` telling of an answer behind what came after it,
`Engine._load` without its `settle`; and the launch that does not wait, with
`moved` telling all at once. Answers in short: tokens taken twice, `read` one
hop too many, who ends by its token carried on.
"""

import random

from absl.testing import absltest, parameterized

from bevy_jax import (
  answers,
  engine,
  events,
  protocols,
  synthetic,
  virtual,
)
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


class _InShort(virtual.VirtualExecutor):
  """Says in short what everybody has passed, as a device does.

  Attributes:
    said: how many answers.
  """

  said = 0

  def launch(self, number, batch):
    self._asked = getattr(self, '_asked', {})
    if batch.kind == 'decode' and batch.finish:
      self._asked[number] = len(batch.tables), len(batch.rows)
    super().launch(number, batch)

  def poll(self):
    return [self._short(happened) for happened in super().poll()]

  def _short(self, happened):
    if not isinstance(happened, protocols.Ended):
      return happened
    hops, rows = self._asked.get(happened.launch, (0, 0))
    told = happened.hops
    whole = len(told) == hops > 0 and len(told[-1].tokens) == rows
    if not whole or told[0].guesses:
      return happened
    heads = [hop.tokens for hop in told if hop.tokens[0] >= 0]
    read = [set().union(*hop.choices) for hop in told[:-1]]
    self.said += 1
    return happened._replace(
      hops=tuple(told),
      passed=protocols.Passed(
        told[-1]._replace(places=()),
        heads[0] if heads else (),
        sum(map(len, read)),
      ),
    )


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

  @parameterized.product(
    scheduler=('lockstep', 'runahead'),
    policies=(('lru', 'none'), ('reuse', 'mixture'), ('lfu', 'oracle:p=0.8')),
    hops=(1, 2, 4),
  )
  def test_saying_it_in_short_changes_nothing(self, scheduler, policies, hops):
    said = 0
    for seed in range(3 * _SEEDS):
      found, other = (
        _engine(seed, scheduler, *policies, hops) for _ in range(2)
      )
      other._executor.__class__ = _InShort
      self.assertEqual(_run(found), _run(other))
      self.assertEqual(vars(found.view.pace), vars(other.view.pace))
      said += other._executor.said
    self.assertEqual(said > 0, 'oracle' not in policies[1])

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
