"""The benchmark's cells: named, not a full product."""

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bevy_jax import config as config_lib
from bevy_jax import storage, synthetic
from bevy_jax import trace as trace_lib
from bevy_jax.experiments import bench_models

ROUTINGS = ('model', 'uniform', 'zipf', 'trace')
# What is said of each kind of routing wherever its figures are shown.
LABELS = {
  'model': "the random router's own",
  'uniform': 'synthetic: uniform',
  'zipf': 'synthetic: zipf',
  'trace': 'replay of recorded expert ids',
}
EVICTION = 'lfu_decayed'
# The best of them in the first pair stands for prefetchers.
PREFETCH = ('history', 'transition')
# Where the router itself chooses, its guess of the next layers is one too.
GATE = 'next_gate'
UNGUARDED = 'transition:guarded=false'


class Cell(NamedTuple):
  """One point of the benchmark.

  Attributes:
    shape: of `bench_models.MODELS`.
    form: what the experts are stored as.
    requests: R, that decode at once.
    cache: fraction of all experts.
    routing: one of `ROUTINGS`.
  """

  shape: str
  form: str
  requests: int
  cache: float
  routing: str

  @property
  def name(self) -> str:
    """As `parse` reads it: 'facts/bf16/8/0.5/trace'."""
    return '/'.join(map(str, self))


_RESIDENT = 3  # Times as many turns.


class Suite(NamedTuple):
  """Cells and how often they are measured.

  Attributes:
    cells: in an order in which equal models follow each other.
    pairs: interleaved turns of all variants, see `turns`.
    prefetch: whether the two prefetching variants run too.
  """

  cells: tuple[Cell, ...]
  pairs: int
  prefetch: bool = True

  def turns(self, cell: Cell) -> int:
    """Of a cell; more of those where nothing is loaded.

    Their turns are short, and both sides do the same: all that a ratio shows
    there is how far the machine is from steady.
    """
    return self.pairs * (_RESIDENT if cell.cache == 1 else 1)


def _many(
  shape: str, form: str, points: tuple[tuple[int, float], ...], routing: str
) -> tuple[Cell, ...]:
  return tuple(Cell(shape, form, *point, routing) for point in points)


_CORE = tuple(itertools.product((8, 16), (1.0, 0.75, 0.5)))
_WIDE = {
  ('qwen3-30b-a3b', 'bf16'): (
    (1, 0.5), (8, 0.9), (8, 0.5), (8, 0.25), (32, 0.5),
  ),
  ('qwen3-30b-a3b', 'int8'): ((8, 0.5), (16, 0.75)),
  ('qwen3-30b-a3b', 'int4:32'): (
    (1, 0.25), (8, 0.9), (8, 0.5), (8, 0.25), (32, 0.75),
  ),
  ('olmoe-1b-7b', 'bf16'): ((4, 0.5), (4, 0.25), (16, 0.75)),
  ('olmoe-1b-7b', 'int8'): ((32, 0.9),),
  ('olmoe-1b-7b', 'int4:32'): ((8, 0.5),),
  ('mixtral-8x7b', 'bf16'): ((1, 0.25), (4, 0.5)),
  ('mixtral-8x7b', 'int4:32'): ((8, 0.5),),
}  # fmt: skip
SUITES = {
  'core': Suite(
    _many('gpt-oss-20b-shape', 'int4:32', _CORE, 'trace')
    + _many('facts', 'bf16', _CORE, 'trace'),
    7,
  ),
  'wide': Suite(
    sum((_many(*k, points, 'zipf') for k, points in _WIDE.items()), ()), 3
  ),
  # The throw-away engine's workload.
  'facts310': Suite(_many('facts', 'bf16', _CORE[:3], 'trace'), 5, False),
  'resident': Suite(
    _many('qwen3-30b-a3b', 'bf16', ((8, 1.0),), 'uniform')
    + _many('qwen3-30b-a3b', 'int4:32', ((8, 1.0),), 'uniform'),
    5,
    False,
  ),
  'tiny': Suite(_many('tiny', 'bf16', ((2, 1.0), (2, 0.5)), 'zipf'), 2),
}


def parse(name: str) -> Cell:
  """'SHAPE/FORM/REQUESTS/CACHE/ROUTING' as a cell; ValueError says what ails.

  Only the shape must be there: the rest is bf16, 8, 0.5 and zipf.
  """
  given = name.split('/')
  parts = given + ['', 'bf16', '8', '0.5', 'zipf'][len(given) :]
  try:
    shape, form, requests, cache, routing = parts
    cell = Cell(shape, form, int(requests), float(cache), routing)
  except ValueError:
    raise ValueError(
      f'cell {name!r} is no SHAPE/FORM/REQUESTS/CACHE/ROUTING such as '
      f'facts/bf16/8/0.5/trace, and no suite; suites: {list(SUITES)}.'
    ) from None
  config_lib.choose('model shape', cell.shape, bench_models.MODELS)
  config_lib.choose('routing', cell.routing, ROUTINGS)
  storage.parse(cell.form)
  if cell.requests < 1 or not 0 < cell.cache <= 1:
    raise ValueError(
      f'cell {name!r} has {cell.requests} requests and cache {cell.cache}; '
      'requests must be at least 1 and cache a fraction in (0, 1].'
    )
  return cell


def suite(text: str, pairs: int = 0, routing: str = '') -> Suite:
  """The suite of a name, or of cells separated by commas.

  A cell may be named by how the names of a suite's cells begin:
  'facts/bf16/8' are three. `pairs` and `routing` replace the suite's own.
  """
  if text in SUITES:
    found = SUITES[text]
  else:
    known = dict.fromkeys(c for s in SUITES.values() for c in s.cells)
    cells: list[Cell] = []
    for name in text.split(','):
      near = [c for c in known if f'{c.name}/'.startswith(f'{name}/')]
      cells += near or [parse(name)]
    found = Suite(tuple(dict.fromkeys(cells)), 3)
  if routing:
    config_lib.choose('routing', routing, ROUTINGS)
    changed = (c._replace(routing=routing) for c in found.cells)
    found = found._replace(cells=tuple(changed))
  return found._replace(pairs=pairs or found.pairs)


def variants(
  prefetch: bool, warm: bool, eviction: str = EVICTION, *, gate: bool = False
) -> list[tuple[str, str, str]]:
  """Scheduler, eviction and prefetcher of each variant; lockstep first.

  Args:
    prefetch: whether prefetchers run too.
    warm: whether `transition` may start from other requests' counts.
    eviction: of all but the variant that uses 'lru'.
    gate: whether the routers' own guesses mean anything.
  """
  found = [('lockstep', eviction, 'none'), ('runahead', eviction, 'none')]
  if prefetch:
    start = ':warm=true' if warm else ''
    found += [
      ('lockstep', eviction, p + (start if p == 'transition' else ''))
      for p in (*PREFETCH, *[GATE] * gate)
    ]
    found.append(('lockstep', 'lru', UNGUARDED + start))
  return found


def recording(
  routing: str, path: str, layers: int, experts: int, top_k: int, requests: int
) -> trace_lib.Trace | None:
  """The expert ids that a kind of routing replays; None for the model's own.

  Args:
    routing: one of `ROUTINGS`.
    path: of the trace, for 'trace'.
    layers: MoE layers of the model.
    experts: of a layer.
    top_k: of them that a token uses.
    requests: R; a synthetic recording has twice as many.

  Raises:
    ValueError: the trace is none of such a model.
  """
  if routing == 'model':
    return None
  if routing != 'trace':
    exponent, reuse = (0.0, 0.0) if routing == 'uniform' else (0.8, 0.4)
    return synthetic.zipf(
      layers=layers, experts=experts, top_k=top_k, requests=2 * requests,
      tokens=256, exponent=exponent, reuse=reuse,
    )  # fmt: skip
  trace = trace_lib.load(path or 'bundled')
  has = trace.layers, trace.num_experts, trace.experts.shape[3]
  if has[0] < layers or has[1:] != (experts, top_k):
    raise ValueError(
      f'trace {path or "bundled"} has {has[0]} layers of {has[1]} experts, '
      f'{has[2]} a token, but the model has {layers} of {experts}, {top_k} a '
      'token. Only as many experts and at least as many layers can be '
      'replayed; use another trace, or --routing=zipf.'
    )
  return trace


def tables(
  trace: trace_lib.Trace, layers: int, start: int, positions: int
) -> npt.NDArray[np.int16]:
  """A recording by position, int16 `[requests, positions, layers, k]`.

  Position `start` is a request's first recorded token; behind its last one
  it begins again. Further layers than the model's are left out.
  """
  kept = np.flatnonzero(trace.lengths)
  if not len(kept):
    raise ValueError('the trace has no token to replay; every length is 0.')
  steps = np.arange(positions) - start
  at = [trace.experts[r, steps % trace.lengths[r], :layers] for r in kept]
  return np.stack(at)
