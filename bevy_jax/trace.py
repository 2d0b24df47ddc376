"""Routing traces: which experts every token of many requests used."""

import dataclasses
import json
import os
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt

from bevy_jax.offload import patterns

# What the name 'bundled' stands for; its licence lies beside it.
BUNDLED = pathlib.Path(__file__).parent / 'traces' / 'gptoss20b_16x96.npz'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
  """The routing of requests that were decoded one by one.

  Attributes:
    experts: int16[request, token, layer, k], -1 behind a request's end.
    lengths: int32[request], tokens of each.
    num_experts: experts of a layer; ids lie below it.
    meta: where it comes from: model, phase, licence, source.
  """

  experts: npt.NDArray[np.int16]
  lengths: npt.NDArray[np.int32]
  num_experts: int
  meta: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def layers(self) -> int:
    """Layers that have experts."""
    return int(self.experts.shape[2])

  def popularity(self) -> npt.NDArray[np.float64]:
    """float64[layer * experts + id], how often each key was used."""
    used = self.experts >= 0
    keys = self.experts + self.num_experts * np.arange(self.layers)[:, None]
    counts = np.bincount(
      keys[used].astype(np.intp), minlength=self.layers * self.num_experts
    )
    return counts.astype(np.float64)

  def without(self, first: int, count: int, what: str) -> 'Trace':
    """All requests but `count` from `first` on: their own tell the future.

    Raises:
      ValueError: there are no others; `what` says who needs them.
    """
    keep = [
      n for n in range(len(self.lengths)) if not first <= n < first + count
    ]
    if not keep:
      raise ValueError(
        f'{what} needs requests beside the {count} that decode, and '
        'there are no more in the trace.'
      )
    return dataclasses.replace(
      self, experts=self.experts[keep], lengths=self.lengths[keep]
    )

  def counts(self) -> patterns.Counts:
    """What a prefetcher may learn of all requests: uses and successions."""
    found = patterns.nothing(self.layers, self.num_experts)
    for experts, length in zip(self.experts, self.lengths, strict=True):
      ids = experts[:length].astype(np.intp)
      found.passes[:] += length
      for layer in range(self.layers):
        here = ids[:, layer]
        last = layer == self.layers - 1
        after = ids[1:, 0] if last else ids[:, layer + 1]
        came = here[: len(after)]
        np.add.at(found.popular[layer], here.ravel(), 1.0)
        np.add.at(found.followed[layer], came.ravel(), np.float32(1))
        pairs = came[:, :, None] * self.num_experts + after[:, None]
        found.pairs[layer] += np.bincount(
          pairs.ravel(), minlength=self.num_experts**2
        ).reshape(found.pairs[layer].shape)
    return found


def load(path: str | os.PathLike[str]) -> Trace:
  """Reads and checks a trace; ValueError names the array and the index.

  'bundled' is a small real one that comes with the project.
  """
  path = BUNDLED if path == 'bundled' else path
  try:
    with open(path, 'rb') as file, np.load(file, allow_pickle=False) as found:
      arrays = {n: found[n] for n in ('experts', 'lengths', 'meta')}
  # Zip, compression and headers of arrays fail each in ways of their own.
  except Exception as error:
    raise ValueError(
      f'{path} is no routing trace: {error}. It must be an .npz of plain '
      'arrays experts[request, token, layer, k], lengths[request] and meta, '
      'a JSON string; pickled objects are never read.'
    ) from error
  try:
    meta = json.loads(str(arrays['meta']))
    num_experts = meta['num_experts']
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f'{path}: meta must be a JSON object with num_experts; it is '
      f'{str(arrays["meta"])[:60]!r}.'
    ) from error
  trace = Trace(
    experts=arrays['experts'],
    lengths=arrays['lengths'],
    num_experts=num_experts,
    meta=meta,
  )
  try:
    check(trace)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error
  return trace


def save(path: str | os.PathLike[str], trace: Trace) -> None:
  """Writes a trace that `load` reads; ValueError where it is none."""
  check(trace)
  meta = json.dumps(trace.meta | {'num_experts': trace.num_experts})
  # An open file keeps its name; NumPy adds .npz to a path that lacks it.
  with open(path, 'wb') as file:
    np.savez_compressed(
      file, experts=trace.experts, lengths=trace.lengths, meta=np.array(meta)
    )


def check(trace: Trace) -> None:
  """ValueError where a trace lies, with the first place where it does."""
  experts, lengths, count = trace.experts, trace.lengths, trace.num_experts
  if isinstance(count, bool) or not isinstance(count, int) or count < 1:
    raise ValueError(f'num_experts is {count!r}; it must be an integer >= 1.')
  if experts.ndim != 4 or experts.dtype != np.int16 or 0 in experts.shape:
    raise ValueError(
      f'experts is {experts.dtype}{list(experts.shape)}; it must be '
      'int16[request, token, layer, k] with no side empty.'
    )
  if lengths.shape != experts.shape[:1] or lengths.dtype.kind != 'i':
    raise ValueError(
      f'lengths is {lengths.dtype}{list(lengths.shape)}; it must be one '
      f'integer for each of the {experts.shape[0]} requests of experts.'
    )
  said = trace.meta.get('top_k', experts.shape[3])
  if said != experts.shape[3]:
    raise ValueError(
      f'meta says top_k {said!r}, but experts has {experts.shape[3]} ids for '
      'each token and layer; one of them is wrong.'
    )
  _refuse(
    'lengths', lengths, (lengths < 0) | (lengths > experts.shape[1]),
    f'it must lie in 0..{experts.shape[1]}',
  )  # fmt: skip
  inside = np.arange(experts.shape[1]) < lengths[:, None]
  inside = np.broadcast_to(inside[..., None, None], experts.shape)
  _refuse(
    'experts', experts, inside & ((experts < 0) | (experts >= count)),
    f'an expert id must lie in 0..{count - 1}',
  )  # fmt: skip
  _refuse(
    'experts', experts, ~inside & (experts != -1),
    'behind the end of a request it must be -1',
  )  # fmt: skip
  ordered = np.sort(experts, axis=-1)
  twice = inside[..., 1:] & (ordered[..., 1:] == ordered[..., :-1])
  _refuse(
    'experts', ordered[..., 1:], twice, 'a token uses each expert once at most'
  )


def _refuse(
  name: str, values: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], must: str
) -> None:
  if wrong.any():
    at = np.unravel_index(int(wrong.argmax()), wrong.shape)
    where = ', '.join(str(int(i)) for i in at)
    raise ValueError(f'{name}[{where}] is {values[at]}; {must}.')
