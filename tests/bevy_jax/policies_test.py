"""Policies of one's own: an object or an import path, refused with a fix.

Seen to fail: spelled.split without its brackets, spelled.whole that returns
what it got, policies._own without any one of its tests, Simulation.engine and
LLM.engine asking the tables instead of `policies`.
"""

import contextlib
import dataclasses
import pathlib
import sys
import tempfile
import textwrap

from absl.testing import absltest, parameterized

from bevy_jax import (
  LLM,
  EngineConfig,
  Launch,
  SchedulerBase,
  View,
  policies,
  protocols,
  spelled,
)
from bevy_jax.experiments import ablation, configs, simulation
from bevy_jax.offload import eviction, prefetch

MODULE = """
import dataclasses
import bevy_jax
from bevy_jax.offload import eviction, prefetch

@dataclasses.dataclass(frozen=True, kw_only=True)
class First(bevy_jax.SchedulerBase):
  lag: int = 3
  words: tuple = ()

  def launch(self, view):
    missing = lambda p: p.need & ~view.resident[p.layer]
    ready = [p for p in view.waiting if not missing(p)]
    if not ready:
      return None
    first = min(ready, key=lambda p: p.position)
    return bevy_jax.Launch(first.layer, [first], first.need)

@dataclasses.dataclass(frozen=True, kw_only=True)
class Oldest(eviction.Lru):
  pass

@dataclasses.dataclass(frozen=True, kw_only=True)
class Gone(prefetch.Nothing):
  pass

@dataclasses.dataclass
class Melting:
  depth: int = 2

@dataclasses.dataclass(frozen=True)
class Idle(bevy_jax.SchedulerBase):
  pass

@dataclasses.dataclass(frozen=True)
class Bare:
  def launch(self, view):
    return None

class Plain:
  pass
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alone(SchedulerBase):
  """The most lagging ready request, by itself."""

  def launch(self, view: View) -> Launch | None:
    ready = [p for p in view.waiting if not p.need & ~view.resident[p.layer]]
    if not ready:
      return None
    first = min(ready, key=lambda p: p.position)
    return Launch(first.layer, [first], first.need)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recent(eviction.EvictionBase):
  """The one that was used last."""

  def victim(self, barred: eviction.Array, uses: eviction.Uses) -> int:
    return eviction.uses_lib.scan(-uses.last, barred)


class OwnTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    path = pathlib.Path(folder, 'mine_own.py')
    path.write_text(textwrap.dedent(MODULE), 'utf-8')
    pathlib.Path(folder, 'broken_own.py').write_text('1 / 0\n', 'utf-8')
    cls.folder = folder
    sys.path.insert(0, folder)
    cls.addClassCleanup(sys.path.remove, folder)

  @parameterized.parameters(
    ('mine_own.First', 3),
    ('mine_own.First()', 3),
    ('mine_own.First(lag=5)', 5),
    ("mine_own.First(lag=-1, words=('a:b', 'c'))", -1),
  )
  def test_a_path_is_an_object_and_back(self, text, lag):
    found = policies.scheduler(text)
    self.assertEqual(found.lag, lag)
    self.assertEqual(policies.scheduler(spelled.spell(found)), found)

  @parameterized.parameters(
    ('nowhere_own.First', "importing 'nowhere_own' failed.*PYTHONPATH"),
    ('broken_own.First', 'ZeroDivisionError'),
    ('mine_own.Frist', "did you mean 'First'"),
    ('mine_own.Plain', 'not as a dataclass'),
    ('mine_own.First(lga=3)', "no field 'lga'; did you mean 'lag'"),
    ('mine_own.First(3)', 'by name'),
    ('mine_own.First(lag=os.sep)', 'literals'),
    ('mine_own.First(lag=3', 'literals'),
    ('mine_own..First', 'write module.Class'),
    ('mine_own.Melting', 'frozen'),
    ('mine_own.Idle', "no method 'launch'.*bevy_jax.SchedulerBase"),
    ('mine_own.Bare', "no .'depth', 'wants'.*SchedulerBase"),
    ('mine_own.Oldest', "no method 'launch'"),
    ('runahed', "mean 'runahead'.*module.Class"),
    (Alone, r'Alone\(\)'),
    (object(), 'frozen dataclass'),
  )
  def test_refused(self, asked, words):
    with self.assertRaisesRegex(ValueError, words):
      policies.scheduler(asked)
    with self.assertRaisesRegex(ValueError, words):
      EngineConfig(scheduler=asked)

  def test_the_nearest_module_of_this_folder(self):
    meant = self.assertRaisesRegex(ValueError, "did you mean 'mine_own'")
    with contextlib.chdir(self.folder), meant:
      policies.scheduler('mine_owm.First')

  def test_evictions_and_prefetchers_too(self):
    self.assertIsInstance(policies.eviction('mine_own.Oldest'), eviction.Lru)
    found, warm = policies.parse_prefetch('mine_own.Gone(depth=0)')
    self.assertIsInstance(found, prefetch.Nothing)
    self.assertFalse(warm)
    with self.assertRaisesRegex(ValueError, "no method 'victim'"):
      policies.eviction('mine_own.First')
    with self.assertRaisesRegex(ValueError, 'name one with trace'):
      policies.eviction('static')
    with self.assertRaisesRegex(ValueError, "no method 'guess'"):
      policies.parse_prefetch('mine_own.First')
    with self.assertRaisesRegex(ValueError, 'oracle.*from the future'):
      EngineConfig(prefetch=prefetch.Oracle())

  @parameterized.parameters(
    ('lockstep', ('lockstep', 'e', 'p')),
    ('a:b:transition:depth=2', ('a', 'b', 'transition:depth=2')),
    ("m.A(x='p:q'):lru", ("m.A(x='p:q')", 'lru', 'p')),
    ('::m.P(depth=2)', ('s', 'e', 'm.P(depth=2)')),
  )
  def test_variants(self, text, parts):
    self.assertEqual(policies.variants([text], 's', 'e', 'p'), [parts])
    self.assertEqual(policies.variants([], 's', 'e', 'p'), [('s', 'e', 'p')])

  def test_commas_inside_brackets(self):
    items = 'lockstep,m.A(x=1,y=(2,3)):lru,solo'.split(',')
    self.assertEqual(
      spelled.whole(items), ('lockstep', 'm.A(x=1,y=(2,3)):lru', 'solo')
    )

  def test_decode_and_replay_take_them(self):
    items = ('lockstep', 'mine_own.First(lag=2', 'words=()):mine_own.Oldest')
    for config in (
      configs.Decode(compare=items),
      simulation.Replay(expert_mb=1.0, prefetch='none', compare=items),
    ):
      self.assertEqual(
        config.variants()[1],
        ('mine_own.First(lag=2,words=())', 'mine_own.Oldest', 'none'),
      )
    engine = EngineConfig(scheduler=policies.scheduler('mine_own.First(lag=9)'))
    (variant,) = configs.Decode(engine=engine).variants()
    self.assertEqual(variant[0], 'mine_own.First(lag=9)')

  def test_a_grid_takes_them(self):
    names = 'lru', 'mine_own.Oldest', 'mine_own.Oldes'
    grid = ablation.Grid(names, (0.5,), (2,))
    found = simulation.trace_lib.load('bundled')
    with self.assertRaisesRegex(ValueError, "did you mean 'Oldest'"):
      list(ablation.replayed(found, grid, range(8), 2))
    grid = grid._replace(evictions=names[:2])
    lru, own = ablation.replayed(found, grid, range(8), 2)
    self.assertEqual(own['misses'], lru['misses'])
    self.assertEqual(own['eviction'], 'mine_own.Oldest')


class ObjectTest(absltest.TestCase):
  def test_the_simulator_runs_it(self):
    config = simulation.Replay(
      expert_mb=2.0, requests=2, tokens=6, skip=2, bounds=False, cache=0.3
    )
    machine = simulation.Simulation(config)
    own = machine.run(Alone(depth=3), Recent())
    named = machine.run('solo', 'lru')
    self.assertEqual(
      own.report['config']['scheduler'], f'{__name__}.Alone(depth=3)'
    )
    self.assertEqual(own.report['config']['eviction'], f'{__name__}.Recent')
    # Who gives up what it has just used loads more.
    self.assertGreater(own.report['loads'], named.report['loads'])
    same = machine.run(policies.SCHEDULERS['solo'], policies.EVICTIONS['lru'])
    self.assertEqual(same.log, named.log)

  def test_a_model_runs_it(self):
    # Of the same sizes as in llm_test: compiled once for both.
    options = {'cache': 0.25, 'requests': 2, 'context': 64, 'strict': True}
    prompts = ['Once upon a time', 'def fib(n):']
    with LLM.load(
      'demo', **options, scheduler=Alone(), eviction=Recent()
    ) as llm:
      engine = llm.engine()
      self.assertIsInstance(engine._scheduler, Alone)
      self.assertIsInstance(engine._loads._eviction, Recent)
      mine = [out.tokens for out in llm.generate(prompts, new_tokens=6)]
      engine = llm.engine('lockstep', policies.EVICTIONS['lru'])
      requests = llm.requests(prompts, 6)
      list(llm.run(engine, requests))
      usual = [llm.output(r.number, '').tokens for r in requests]
    self.assertEqual(mine, usual)

  def test_what_stands_in_the_protocol_is_asked_for(self):
    for name, kind in (
      ('scheduler', protocols.Scheduler),
      ('eviction', protocols.Eviction),
      ('prefetch', protocols.Prefetcher),
    ):
      wanted = {n for n in vars(kind) if not n.startswith('_')}
      method = wanted & {'launch', 'victim', 'guess'}
      self.assertEqual(wanted - method, set(policies._READ[name]))


if __name__ == '__main__':
  absltest.main()
