"""Named experiments: functions that return a frozen record."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence

from bevy_jax import config as config_lib
from bevy_jax import policies
from bevy_jax.experiments import overrides

_DEMO_PROMPTS = pathlib.Path(__file__).parent / 'demo_prompts.jsonl'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode:
  """One decode experiment.

  Attributes:
    model: 'demo', a Hugging Face directory or a converted one.
    engine: how the engine runs; `engine.link` is ignored where `balance`
      is above 0.
    prompts: a JSON lines file with `prompt` in each line, or 'demo'.
    count: how many of the prompts; 0 for all.
    new_tokens: tokens that each request generates at most.
    temperature: 0 is greedy.
    top_p: probability mass that is kept.
    seed: request n draws with seed + n.
    ignore_eos: go on after an ending token: equal lengths for measuring.
    balance: above 0, the link is throttled so that lockstep spends about
      this share of its time computing.
    compare: scheduler[:eviction[:prefetch]] to run one after another, each
      from a cold cache; empty for the engine's own. What is left out is the
      engine's.
  """

  model: str = 'demo'
  engine: config_lib.EngineConfig = dataclasses.field(
    default_factory=config_lib.EngineConfig
  )
  prompts: str = 'demo'
  count: int = 0
  new_tokens: int = 64
  temperature: float = 0.0
  top_p: float = 1.0
  seed: int = 0
  ignore_eos: bool = False
  balance: float = 0.0
  compare: tuple[str, ...] = ()

  def __post_init__(self) -> None:
    for name, least in (('count', 0), ('new_tokens', 1)):
      if getattr(self, name) < least:
        raise ValueError(
          f'{name} is {getattr(self, name)}; it must be at least {least}.'
        )

  def variants(self) -> list[tuple[str, str, str]]:
    """Scheduler, eviction, prefetcher of each run; ValueError for unknown."""
    engine = self.engine
    found = policies.variants(
      self.compare, engine.scheduler, engine.eviction, engine.prefetch
    )
    for scheduler, eviction, prefetch in found:
      policies.scheduler(scheduler)
      policies.check_eviction(eviction, engine.trace)
      policies.check_prefetch(prefetch, engine.trace)
    return found

  def checked(self) -> 'Decode':
    """Itself; ValueError where a variant or the prompts cannot be."""
    self.variants()
    self.texts()
    return self

  def texts(self) -> list[str]:
    """The prompts; ValueError names file and line."""
    named = self.prompts != 'demo'
    path = pathlib.Path(self.prompts) if named else _DEMO_PROMPTS
    if not path.is_file():
      raise ValueError(
        f'prompts file {self.prompts} does not exist; give a JSON lines file '
        'in which every line has a "prompt".'
      )
    texts = []
    for number, line in enumerate(path.read_text('utf-8').splitlines(), 1):
      try:
        texts.append(str(json.loads(line)['prompt']))
      except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
          f'{path}, line {number}: expected a JSON object with "prompt" '
          f'({error}).'
        ) from error
    return texts[: self.count or None]


def title(variant: tuple[str, str, str]) -> str:
  """A variant in words; who does not prefetch is not said to."""
  return ' / '.join(name for name in variant if name != 'none')


def plain() -> Decode:
  """The engine's defaults."""
  return Decode()


def demo() -> Decode:
  """What `make demo` shows: half of the experts resident, a slow link."""
  return Decode(
    engine=config_lib.EngineConfig(cache=0.5, requests=8),
    new_tokens=96,
    temperature=0.7,
    top_p=0.95,
    ignore_eos=True,
    balance=0.5,
    compare=('lockstep', 'runahead'),
  )


def assign(config: Decode, assignments: Sequence[str]) -> Decode:
  """`overrides.apply`, where a link that is set is not balanced again."""
  whole = [qualified(a) for a in assignments]
  if any(a.partition('=')[0].strip() == 'engine.link' for a in whole):
    config = dataclasses.replace(config, balance=0.0)
  return overrides.apply(config, whole)


def qualified(assignment: str) -> str:
  """`cache=1` as `engine.cache=1`: the engine's fields need no prefix."""
  name = assignment.partition('=')[0].strip()
  own = {f.name for f in dataclasses.fields(Decode)}
  engine = {f.name for f in dataclasses.fields(config_lib.EngineConfig)}
  return f'engine.{assignment}' if name in engine - own else assignment


def share(link: str) -> float:
  """The device's share that 'balanced:SHARE' asks for; 0.5 where it is bare."""
  _, _, number = link.partition(':')
  try:
    value = float(number or 0.5)
  except ValueError:
    value = 0.0
  if not 0 < value < 1:
    raise ValueError(
      f'link is {link!r}; it must be balanced:SHARE with a share of device '
      'time between 0 and 1.'
    )
  return value


CONFIGS: dict[str, Callable[[], Decode]] = {'plain': plain, 'demo': demo}
