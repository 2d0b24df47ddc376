"""Cells measured on the machine at hand: the demo model, a throttled link."""

import dataclasses
import functools
import json
import os
import pathlib
import tempfile
from typing import NamedTuple

from bevy_jax import config as config_lib
from bevy_jax import request as request_lib
from bevy_jax.experiments import (
  cell_figures,
  configs,
  interrupt,
  run,
  study,
)

PLACE = 'demo'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What all measured cells have in common.

  Attributes:
    rows: requests that can decode at once; cells have fewer or as many.
    link: slow enough that it matters beside this model.
    tokens: that all requests of a cell generate together, within
    new_tokens: of each of them, at least and at most.
    warmup: of these, before the measured window.
    temperature: texts that differ, though there are few prompts.
    seed: request n draws with seed + n.
  """

  rows: int = 64
  link: str = 'throttled:0.17'
  tokens: int = 160
  new_tokens: tuple[int, int] = (8, 24)
  warmup: int = 3
  temperature: float = 0.7
  seed: int = 0


DEFAULT = Settings()


class _Open(NamedTuple):
  bench: run.Bench
  requests: list[request_lib.Request]


def measure(key: study.Row, settings: Settings) -> study.Row:
  """A cell of `cell_figures.KEY`, from a cold cache; a cache of 0 is a layer's.

  The model is opened once, with room for everything: cells use as many of its
  rows and slots as they say, so that nothing is compiled for them.
  """
  bench, requests = _open(settings)
  llm = bench.llm
  shape = llm.model.config
  bench.set_cache(key['cache'] or shape.num_experts)
  least, most = settings.new_tokens
  each = min(most, max(least, settings.tokens // key['requests']))
  own = [
    dataclasses.replace(request, new_tokens=each)
    for request in requests[: key['requests']]
  ]
  engine = llm.engine(key['scheduler'], key['eviction'], key['prefetch'])
  with interrupt.Interrupt() as stop:
    for _ in llm.run(engine, own):
      if stop.asked:
        break
  if stop.asked:
    raise KeyboardInterrupt
  return cell_figures.figure(
    engine.log,
    rows=settings.rows,
    skip=settings.warmup,
    layers=len(shape.moe_ids),
    experts=shape.num_experts,
    expert_bytes=llm.model.experts.block_bytes,
    note=f'link {bench.link}',
    load=os.getloadavg()[0],
  )


@functools.lru_cache(maxsize=1)
def _open(settings: Settings) -> _Open:
  """The model, and as many requests as there are rows."""
  texts = configs.Decode().texts()
  lines = [
    json.dumps({'prompt': texts[n % len(texts)]}) for n in range(settings.rows)
  ]
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'prompts.jsonl'
    path.write_text('\n'.join(lines), encoding='utf-8')
    bench = run.Bench(
      configs.Decode(
        engine=config_lib.EngineConfig(
          cache=1.0,
          requests=settings.rows,
          link=settings.link,
          warmup=settings.warmup,
        ),
        prompts=str(path),
        new_tokens=settings.new_tokens[1],
        temperature=settings.temperature,
        seed=settings.seed,
        ignore_eos=True,
      ),
      lambda what: print(f'demo model: {what}', flush=True),
    )
  return _Open(bench, bench.requests)
