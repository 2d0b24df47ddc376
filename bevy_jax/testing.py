"""Laws that every policy obeys, to be tried on one of your own.

from bevy_jax import testing
testing.check_laws(MyScheduler())
"""

from collections.abc import Callable
from typing import Any

from bevy_jax import baselines, log_laws, policies, runahead, spelled
from bevy_jax import worlds as worlds_lib
from bevy_jax.law import LawBroken
from bevy_jax.offload import eviction, prefetch

__all__ = ['LawBroken', 'check', 'check_laws']

Policy = policies.Scheduler | policies.Eviction | policies.Prefetcher
_WIDE = 80  # Letters of a policy in an error.
_AGAIN = 4  # Worlds that are run once more, to compare.


def check_laws(policy: Policy, *, worlds: int = 60, first: int = 0) -> None:
  """Tries a scheduler, eviction or prefetcher in random small worlds.

  Each world is a random model shape, cache, link and list of requests, on an
  executor without a device that checks every promise made to it; in some
  worlds loads land in any order, and some fail. In each of them the policy
  runs beside several others of the project. The laws, by their names:

  - a launch carries somebody, a launch misses no expert, layers in order, a
    row is in one launch;
  - no deadlock, no starvation;
  - a slot being read is kept, one copy, slots are never exceeded, only the
    unwanted give way;
  - tokens in order: every request says what it would say alone;
  - a schedule is possible: `bevy_jax.validate` on the event log;
  - the same view, the same decision; a policy only looks; equal runs, equal
    decisions; a decision makes sense;

  and what the engine owes to everybody, whatever the policy.

  Args:
    policy: an object, or text as the command line takes it.
    worlds: how many; 60 take some seconds.
    first: seed of the first world, the others follow.

  Raises:
    LawBroken: names the law, the world's seed, and how to see it again.
    ValueError: no engine could use the policy at all.
  """
  trios = _trios(policy)
  for seed in range(first, first + worlds):
    for trio in trios:
      again = f'testing.check_laws(policy, first={seed}, worlds=1)'
      check(trio, seed, pure=True, again=again)
      if seed < first + _AGAIN:
        _alike(trio, seed, again)


def check(
  trio: worlds_lib.Trio, seed: int, *, pure: bool = False, again: str = ''
) -> None:
  """One world, its log under the laws; see `check_laws`.

  Args:
    trio: the policies.
    seed: of the world.
    pure: whether every policy is asked twice.
    again: how to see it again, for the words of the error.
  """
  world = worlds_lib.world(seed, trio.far)

  def run() -> None:
    log = worlds_lib.run(trio, world, pure)
    log_laws.check(world, log, worlds_lib.parts(trio, world))

  _told(run, trio, seed, again)


def _alike(trio: worlds_lib.Trio, seed: int, again: str) -> None:
  """Two runs of the same are equal, event by event."""
  world = worlds_lib.world(seed, trio.far)

  def run() -> None:
    one, two = worlds_lib.run(trio, world), worlds_lib.run(trio, world)
    for number, (a, b) in enumerate(zip(one, two, strict=False)):
      if a != b:
        what = f'event {number} is {a}, then {b}'
        raise LawBroken('equal runs, equal decisions', what)

  _told(run, trio, seed, again)


def _told(
  run: Callable[[], None], trio: worlds_lib.Trio, seed: int, again: str
) -> None:
  """Runs it; what goes wrong is told with where and how to see it again."""
  names = ', '.join(_short(p) for p in trio[:3])
  where = f' in world {seed} with {names}{", parted" if trio.parted else ""}'
  end = f'. See it again: {again}' if again else ''
  try:
    run()
  except LawBroken as error:
    what = f'{error.what}{end}'
    raise LawBroken(error.law, what, seed, where) from error
  except Exception as error:
    what = f'{type(error).__name__}: {error}{end}'
    raise LawBroken('nothing is raised', what, seed, where) from error


def _short(policy: object) -> str:
  text = str(policy)
  return text if len(text) <= _WIDE else f'{text[:_WIDE]}...'


def _trios(policy: Policy) -> list[worlds_lib.Trio]:
  """A policy beside several others; ValueError where it is none."""
  kind, found = _resolved(policy)
  lru, reuse = eviction.EVICTIONS['lru'], eviction.EVICTIONS['reuse']
  ours, usual = runahead.Runahead(), baselines.Lockstep()
  ahead = prefetch.Transition(depth=2, guarded=False)
  trio = worlds_lib.Trio
  if kind == 'scheduler':
    return [
      trio(found, lru, far=hasattr(found, 'hops')),
      trio(found, reuse, ahead),
      trio(found, lru, parted=True),
    ]
  if kind == 'eviction':
    return [
      trio(ours, found),
      trio(usual, found, ahead),
      trio(ours, found, parted=True),
    ]
  return [trio(ours, lru, found), trio(usual, reuse, found)]


def _resolved(policy: Any) -> tuple[str, Any]:
  """Of which kind a policy is, and the policy as an object."""
  text, found = isinstance(policy, str), policy
  if text and spelled.is_path(policy):
    text, found = False, spelled.make('policy', policy)
  name = policy.partition(':')[0] if text else ''
  if hasattr(found, 'victim') or name in policies.EVICTIONS:
    return 'eviction', policies.eviction(found)
  if hasattr(found, 'guess') or name in policies.PREFETCHERS:
    return 'prefetch', policies.parse_prefetch(found)[0]
  return 'scheduler', policies.scheduler(found)
