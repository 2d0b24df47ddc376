"""Machines to simulate: presets with their sources, or a measured file.

`platform.json`, version 2, is one object. All keys are required, others are
refused; 1 GB is 1e9 bytes; numbers are finite.

  version      2
  device       text
  source       text: the command that measured it
  link         latency_us, from issue to first byte, hidden behind earlier
               loads; gb_per_s, a list of {bytes, depth, gb_per_s}
  memory_gb_per_s, launch_us, prefill_us (one more prompt token in a layer)
  host         launch_us (until a launch is on the device), answer_us (to see
               that it ended and read its answer), row_us (for each row of a
               decode launch), load_us (to issue a load), land_us (to see that
               it has landed and write its slot), look_us (between two looks
               while link and device are busy), wake_us (overslept when it
               waits for the link alone)
  layer        expert_bytes and layer_bytes (shared weights of a layer) when
               table was measured: a list of {rows, distinct, hops, us}, which
               may be empty
  head         bytes of it when table was measured: a list of {rows, us}, what
               a launch through head and sampling takes more; may be empty

A load takes bytes / rate, at the rates of the greatest depth, linear in the
logarithm of the size between them and the nearest one outside. A launch takes
what the table says (see `costs.Table`), and beside it the bytes by which this
model's experts, layers and head differ, over the memory's rate.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from bevy_jax import config as config_lib
from bevy_jax import costs

VERSION = 2
_MOST = 1e15  # No machine has more of anything; infinity and NaN are more.

# Read by experts (not by a copy) over what the data sheet says, and the same
# for a link: measured on the RTX PRO 6000 and on the H200 below. Data sheets
# alone would flatter the cards that nobody has measured.
_MEMORY_SHARE = 1403 / 1792
_LINK_SHARE = 54 / 63


@dataclasses.dataclass(frozen=True, kw_only=True)
class Platform:
  """One machine.

  Attributes:
    name: what it is called.
    source: where its numbers come from.
    latency_us: from the issue of a load to its first byte.
    link: (bytes of a load, GB/s) ascending; rates in between are linear in
      the logarithm of the bytes.
    memory_gb_per_s: at which the device reads weights.
    launch_us: of a launch on the device before it does any work.
    row_us: one more row in a launch.
    prefill_us: one more prompt token in one layer.
    idle_us: of a layer of a launch that nobody comes to; -1 where it takes
      what any other takes.
    host_launch_us: host work until a launch is on the device.
    host_answer_us: host work to read the answer of a launch.
    host_load_us: host work to issue a load.
    host_row_us: host work for each row of a decode launch.
    host_land_us: host work for a load that has landed.
    host_look_us: between two looks while link and device are busy.
    host_wake_us: overslept when it waits for the link alone.
    table: measured launches; empty where launch, row and bytes count.
    table_expert_bytes: of an expert when they were measured.
    table_layer_bytes: of a layer's shared weights then.
    heads: (rows, us) of a launch through the head, beside the layer.
    heads_bytes: of the head when they were measured.
  """

  name: str
  source: str
  latency_us: float
  link: tuple[tuple[int, float], ...]
  memory_gb_per_s: float
  launch_us: float
  row_us: float
  prefill_us: float
  host_launch_us: float
  host_answer_us: float
  host_load_us: float
  idle_us: float = -1.0
  host_row_us: float = 0.0
  host_land_us: float = 0.0
  host_look_us: float = 0.0
  host_wake_us: float = 0.0
  table: tuple[costs.Measured, ...] = ()
  table_expert_bytes: int = 1
  table_layer_bytes: int = 0
  heads: tuple[tuple[int, float], ...] = ()
  heads_bytes: int = 0

  def costs(
    self, expert_bytes: int, layer_bytes: int, head_bytes: int = 0
  ) -> costs.Costs:
    """What things take here, for experts and layers of these bytes."""
    sizes = [math.log(size) for size, _ in self.link]
    rates = [rate for _, rate in self.link]
    rate = float(np.interp(math.log(expert_bytes), sizes, rates))
    memory = self.memory_gb_per_s  # bytes / (GB/s) are nanoseconds
    return costs.Costs(
      latency=round(self.latency_us * 1e3),
      load=round(expert_bytes / rate),
      launch=round(self.launch_us * 1e3),
      shared=round(layer_bytes / memory),
      expert=round(expert_bytes / memory),
      row=round(self.row_us * 1e3),
      head=round((head_bytes - self.heads_bytes) / memory),
      heads=tuple((rows, us * 1e3) for rows, us in self.heads),
      prompt=round(self.prefill_us * 1e3),
      table=costs.Table(self.table) if self.table else None,
      table_shared=(layer_bytes - self.table_layer_bytes) / memory,
      table_expert=(expert_bytes - self.table_expert_bytes) / memory,
      idle=round(self.idle_us * 1e3) if self.idle_us >= 0 else -1,
      host_launch=round(self.host_launch_us * 1e3),
      host_answer=round(self.host_answer_us * 1e3),
      host_load=round(self.host_load_us * 1e3),
      host_row=round(self.host_row_us * 1e3),
      host_land=round(self.host_land_us * 1e3),
      host_look=round(self.host_look_us * 1e3),
      host_wake=round(self.host_wake_us * 1e3),
    )


# NVIDIA H200, PCIe 5 x16, virtual machine, JAX 0.11: direct copies 54.5 GB/s
# and 184 us for 9.4 MB (latency is what the rate leaves of them), memory by
# copy; 6 kernels a launch cost the host 74-85 us with an answer in pinned
# memory, which takes 3 us to read once 0.5 us has shown that it is there; a
# copy's call takes 2.8 us, its victim 5. Launch and row fit one layer of
# Qwen3-30B-A3B's shape with 16 layers a launch, 123 / 239 / 491 us for (1, 8),
# (8, 50), (32, 108) rows and experts, to -2 / -1 / -9 %: the host, not the
# device, is what takes longer with one layer a launch. The kernels of a layer
# that nobody comes to end at once, 14 us for all of them in a graph.
H200 = Platform(
  name='h200',
  source='measured on an NVIDIA H200 with PCIe 5 x16; launch and row by fit',
  latency_us=9.0,
  link=((9_437_184, 54.0),),
  memory_gb_per_s=4300.0,
  launch_us=90.0,
  row_us=3.5,
  prefill_us=0.2,
  host_launch_us=80.0,
  host_answer_us=4.0,
  host_load_us=8.0,
  idle_us=14.0,
)
# `experiments.fit_platform` on the layer times of Qwen3-30B-A3B that
# LLMServingSim published (MIT licence, its RTXPRO6000 profiles): launches of
# up to 64 rows are met within 5.9 % on average, 16 % at worst (8 experts).
# Attention over the context is not in them. PCIe 5 x16 and the host as on the
# H200: nobody has measured them here.
RTX_PRO_6000 = dataclasses.replace(
  H200,
  name='rtx-pro-6000',
  source=(
    'memory, launch, row and prefill fitted to published layer times; link '
    'and host assumed as on the H200'
  ),
  memory_gb_per_s=1403.0,
  launch_us=1.97,
  row_us=0.271,
  prefill_us=0.178,
)


def _card(name: str, bus: str, bus_gb: float, memory_gb: float) -> Platform:
  """A card by its data sheet, scaled by what others keep of theirs."""
  return dataclasses.replace(
    RTX_PRO_6000,
    name=name,
    source=(
      f'data sheet ({bus} {bus_gb} GB/s a direction, memory {memory_gb} GB/s) '
      'times the shares measured on other cards; launch, row and host assumed '
      'as on the RTX PRO 6000 and the H200'
    ),
    link=((9_437_184, bus_gb * _LINK_SHARE),),
    memory_gb_per_s=memory_gb * _MEMORY_SHARE,
  )


PLATFORMS = {
  p.name: p
  for p in (
    _card('rtx4090', 'PCIe 4 x16', 31.5, 1008.0),
    _card('rtx5090', 'PCIe 5 x16', 63.0, 1792.0),
    _card('rtx4060-laptop', 'PCIe 4 x8', 15.75, 256.0),
    RTX_PRO_6000,
    H200,
  )
}


def find(name: str) -> Platform:
  """The preset of a name, or 'file:PATH'; ValueError where there is none."""
  if name.startswith('file:'):
    return load(name.removeprefix('file:'))
  config_lib.choose('platform', name, [*PLATFORMS, 'file:platform.json'])
  if name not in PLATFORMS:
    raise ValueError(f'platform {name!r} needs a file: file:PATH.')
  return PLATFORMS[name]


def load(path: pathlib.Path | str) -> Platform:
  """Reads a `platform.json`; ValueError names the key that is wrong."""
  try:
    text = pathlib.Path(path).read_text(encoding='utf-8')
    found = json.loads(text, object_pairs_hook=_once)
    return _read(_fields('', found, _WHOLE))
  except (OSError, ValueError, RecursionError) as error:
    raise ValueError(
      f'{path} is no platform of version {VERSION}: {error} Measure one with '
      'python -m bevy_jax.experiments.calibrate.'
    ) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) < len(pairs):
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    raise ValueError(f'{twice!r} is there twice.')
  return found


def _read(found: dict[str, Any]) -> Platform:
  link, host, layer = found['link'], found['host'], found['layer']
  head = found['head']
  deepest = max(e['depth'] for e in link['gb_per_s'])
  rates = [
    (e['bytes'], float(e['gb_per_s']))
    for e in link['gb_per_s']
    if e['depth'] == deepest
  ]
  table = [
    costs.Measured(e['rows'], e['distinct'], e['hops'], e['us'] * 1e3)
    for e in layer['table']
  ]
  _refuse_twice('link.gb_per_s', link['gb_per_s'], ('bytes', 'depth'))
  _refuse_twice('layer.table', layer['table'], ('rows', 'distinct', 'hops'))
  _refuse_twice('head.table', head['table'], ('rows',))
  if table and not any(m.hops == 1 for m in table):
    _wrong('layer.table', 'no entry', 'one with hops 1, or be empty')
  return Platform(
    name=found['device'],
    source=found['source'],
    latency_us=link['latency_us'],
    link=tuple(sorted(rates)),
    memory_gb_per_s=found['memory_gb_per_s'],
    launch_us=found['launch_us'],
    row_us=0.0,
    prefill_us=found['prefill_us'],
    host_launch_us=host['launch_us'],
    host_answer_us=host['answer_us'],
    host_load_us=host['load_us'],
    host_row_us=host['row_us'],
    host_land_us=host['land_us'],
    host_look_us=host['look_us'],
    host_wake_us=host['wake_us'],
    table=tuple(table),
    table_expert_bytes=layer['expert_bytes'],
    table_layer_bytes=layer['layer_bytes'],
    heads=tuple(sorted((e['rows'], e['us']) for e in head['table'])),
    heads_bytes=head['bytes'] if head['table'] else 0,
  )


def _refuse_twice(
  where: str, entries: list[dict[str, Any]], names: tuple[str, ...]
) -> None:
  seen = set()
  for i, entry in enumerate(entries):
    key = tuple(entry[name] for name in names)
    if key in seen:
      _wrong(f'{where}[{i}]', dict(zip(names, key, strict=True)), 'be new')
    seen.add(key)


# What each key must hold: a check that raises, or the keys of an object.
_Check = Callable[[str, Any], None]


def _fields(
  where: str, found: Any, known: Mapping[str, _Check]
) -> dict[str, Any]:
  """An object that has these keys and no others, each as it must be."""
  if not isinstance(found, dict):
    _wrong(where, found, 'be an object')
  for name in (*known, *found):
    path = f'{where}.{name}'.lstrip('.')
    if name not in found:
      raise ValueError(f'{path} is missing.')
    if name not in known:
      raise ValueError(f'{path} is not known; known are {list(known)}.')
    known[name](path, found[name])
  return found


def _wrong(where: str, found: object, must: str) -> NoReturn:
  raise ValueError(f'{where or "the file"} is {found!r:.80}; it must {must}.')


def _number(least: float, *, above: bool = False) -> _Check:
  def check(where: str, found: Any) -> None:
    real = isinstance(found, int | float) and not isinstance(found, bool)
    if not (real and abs(found) <= _MOST):
      _wrong(where, found, f'be a number of at most {_MOST:.0e}')
    if found < least or (above and found == least):
      _wrong(where, found, f'be {"above" if above else "at least"} {least}')

  return check


def _whole(least: int) -> _Check:
  def check(where: str, found: Any) -> None:
    if isinstance(found, bool) or not isinstance(found, int):
      _wrong(where, found, 'be an integer')
    _number(least)(where, found)

  return check


def _text(where: str, found: Any) -> None:
  if not isinstance(found, str) or not found.strip():
    _wrong(where, found, 'be a text that is not empty')


def _version(where: str, found: Any) -> None:
  if isinstance(found, bool) or found != VERSION:
    _wrong(where, found, f'be {VERSION}, the version that this build reads')


def _object(known: Mapping[str, _Check]) -> _Check:
  def check(where: str, found: Any) -> None:
    _fields(where, found, known)

  return check


def _list(known: Mapping[str, _Check], least: int) -> _Check:
  def check(where: str, found: Any) -> None:
    if not isinstance(found, list) or len(found) < least:
      _wrong(where, found, f'be a list of at least {least} objects')
    for i, entry in enumerate(found):
      _fields(f'{where}[{i}]', entry, known)

  return check


_RATE = {
  'bytes': _whole(1), 'depth': _whole(1), 'gb_per_s': _number(0, above=True)
}  # fmt: skip
_MEASURED = {
  'rows': _whole(1),
  'distinct': _whole(0),
  'hops': _whole(1),
  'us': _number(0, above=True),
}
_HOST = ('launch', 'answer', 'row', 'load', 'land', 'look', 'wake')
_WHOLE: dict[str, _Check] = {
  'version': _version,
  'device': _text,
  'source': _text,
  'link': _object({'latency_us': _number(0), 'gb_per_s': _list(_RATE, 1)}),
  'memory_gb_per_s': _number(0, above=True),
  'launch_us': _number(0),
  'prefill_us': _number(0),
  'host': _object({f'{name}_us': _number(0) for name in _HOST}),
  'layer': _object(
    {
      'expert_bytes': _whole(1),
      'layer_bytes': _whole(0),
      'table': _list(_MEASURED, 0),
    }
  ),
  'head': _object(
    {
      'bytes': _whole(0),
      'table': _list({'rows': _whole(1), 'us': _number(0)}, 0),
    }
  ),
}
