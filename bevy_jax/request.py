"""A request, and how far it has come: host dataclasses, no arrays."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
  """How a request draws its tokens.

  Attributes:
    temperature: 0 is greedy.
    top_k: keep the k likeliest tokens; 0 keeps all.
    top_p: keep the likeliest tokens up to this probability mass.
    min_p: drop what is less likely than this times the likeliest token.
    seed: the same seed gives the same text whatever runs beside it.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0

  def __post_init__(self) -> None:
    if not self.temperature >= 0:
      raise ValueError(
        f'temperature is {self.temperature}; it must be 0 (greedy) or more.'
      )
    if self.top_k < 0:
      raise ValueError(f'top_k is {self.top_k}; use 0 to keep all tokens.')
    if not 0 < self.top_p <= 1:
      raise ValueError(f'top_p is {self.top_p}; it must lie in (0, 1].')
    if not 0 <= self.min_p <= 1:
      raise ValueError(f'min_p is {self.min_p}; it must lie in [0, 1].')
    if not 0 <= self.seed < 2**31:
      raise ValueError(f'seed is {self.seed}; it must lie in [0, 2**31).')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """What is asked for.

  Attributes:
    number: its place in the order of arrival, unique in one run.
    prompt: token ids, at least one.
    new_tokens: at most this many are generated.
    sampling: how they are drawn.
    eos_ids: any of these ends the text; it counts as generated.
    past: positions of its row that count as filled before the prompt. What
      lies there is `DeviceExecutor.fill_caches`' business: benchmarks have
      long contexts by it without paying for their prompts.
  """

  number: int
  prompt: tuple[int, ...]
  new_tokens: int
  sampling: SamplingParams = SamplingParams()
  eos_ids: tuple[int, ...] = ()
  past: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Progress:
  """Where an active request stands; the engine alone changes it.

  Equal only to itself: lists of it are searched at every launch.

  Attributes:
    request: what is asked for.
    row: its row in the device's state.
    position: layers gone through, counted in passes of the pack it joined:
      pass * layers + layer; the order of all lag comparisons.
    layer: the MoE layer whose experts it awaits, counted among MoE layers.
    choices: expert ids of that layer, in the router's order.
    need: bitmap of the experts still to be applied there.
    in_flight: whether a launch is carrying it.
    generated: token ids so far.
  """

  request: Request
  row: int
  position: int = 0
  layer: int = 0
  choices: tuple[int, ...] = ()
  need: int = 0
  in_flight: bool = True
  generated: list[int] = dataclasses.field(default_factory=list)
