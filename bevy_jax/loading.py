"""Opens a model: its config, its shared weights and its experts."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.typing import DTypeLike

from bevy_jax import config as engine_config
from bevy_jax import links
from bevy_jax.layers import config as config_lib
from bevy_jax.layers import families, quant, tensors
from bevy_jax.layers import params as params_lib
from bevy_jax.offload import (
  checkpoint,
  cuda,
  disk,
  disk_store,
  hf_checkpoint,
  host_store,
  pinned,
  store,
)

_DEMO = 'demo'
_READERS = 8  # Threads that read experts: enough for disk and checksums.


class Loaded(NamedTuple):
  """A model, ready to run.

  Attributes:
    config: its shape and the tokens that end a text.
    params: shared weights on the default device, see layers/params.py.
    experts: every expert, in pinned host memory or on disk, by key: index
      among the MoE layers times the number of experts, plus the expert's id.
    directory: where it came from; its tokenizer lies there.
    format: how experts are packed; None where they are floats.
  """

  config: config_lib.ModelConfig
  params: params_lib.Params
  experts: store.Store
  directory: pathlib.Path
  format: quant.Format | None = None


def load(
  path: str | pathlib.Path,
  *,
  param_dtype: DTypeLike | None = None,
  engine: engine_config.EngineConfig | None = None,
) -> Loaded:
  """Loads 'demo', a Hugging Face directory or a converted one.

  Args:
    path: which.
    param_dtype: dtype of the shared weights; as stored where not given.
      Experts always stay as they are stored, be it packed.
    engine: what its budgets allow and its link needs; all experts in host
      memory, for direct copies where they can be, where not given.

  Raises:
    ValueError: anything missing, broken, unsupported or too large, naming
      file and tensor; before memory is filled wherever it can be known then.
      Or a budget with which the engine cannot run.
  """
  directory = locate(path)
  config = read_config(directory)
  with _open(directory, config) as source:
    form = _format(source)
    blocks = _budgets(source, config, form, param_dtype, engine)
    away = (source.count - blocks) * _block_bytes(source)
    what = f'The weights in {directory}' + (' beside the disk' * bool(away))
    host_store.check_memory(source.nbytes - away, what)
    # Shared weights first: the buffers that reading them takes are free again
    # before the experts fill the memory.
    leaves = {
      name: jax.device_put(
        leaf if param_dtype is None else leaf.astype(param_dtype, copy=False)
      )
      for name, leaf in source.shared()
    }
    pool = np.dtype(np.uint8) if form else leaves['embed'].dtype
    link = engine.link if engine else 'auto'
    where = memory(link, blocks, source.shape, source.dtype, pool)
    experts = _experts(source, config, blocks, engine, where)
  params = tensors.unflatten(config, leaves)
  return Loaded(config, params, experts, directory, form)


def memory(
  link: str,
  count: int,
  shape: tuple[int, ...],
  stored: np.dtype[Any],
  pool: np.dtype[Any],
) -> pinned.Memory | None:
  """Host memory for `count` blocks on a link; None for JAX's own.

  Args:
    link: see `EngineConfig`; ValueError where it cannot be.
    count: how many blocks.
    shape: of each.
    stored: type of the blocks.
    pool: type of the slots that they go to.
  """
  device = jax.local_devices()[0]
  if links.resolve(link, device, stored, pool).transfer != 'cuda':
    return None
  return pinned.RegisteredMemory(count, shape, stored, cuda.Runtime(device))


def _budgets(
  source: 'HfSource | checkpoint.Reader',
  config: config_lib.ModelConfig,
  form: quant.Format | None,
  param_dtype: DTypeLike | None,
  engine: engine_config.EngineConfig | None,
) -> int:
  """Experts that host memory holds; ValueError where a budget cannot work."""
  if engine is None:
    return source.count
  # Floats lie in their slots in the type of the shared weights.
  kind = source.dtype if form or param_dtype is None else np.dtype(param_dtype)
  engine_config.slots(engine, config, math.prod(source.shape) * kind.itemsize)
  whole = checkpoint.stride(source.shape, source.dtype)
  blocks = engine_config.host_blocks(engine, source.count, whole)
  if blocks < source.count and isinstance(source, HfSource):
    raise ValueError(
      f'host_gib {engine.host_gib} holds {blocks} of {source.count} experts, '
      'and the others can be read from disk only where the model is in the '
      'native form; convert it first (python -m bevy_jax.experiments.convert), '
      f'or give at least {source.count * whole / 2**30:.2f} or 0.'
    )
  return blocks


def _block_bytes(source: 'HfSource | checkpoint.Reader') -> int:
  return math.prod(source.shape) * source.dtype.itemsize


def _experts(
  source: 'HfSource | checkpoint.Reader',
  config: config_lib.ModelConfig,
  blocks: int,
  engine: engine_config.EngineConfig | None,
  where: pinned.Memory | None,
) -> store.Store:
  """All of them in host memory, or a cache of those on disk."""
  if engine is None or isinstance(source, HfSource) or blocks == source.count:
    return host_store.HostStore.build(
      source.count,
      source.shape,
      source.dtype,
      source.fill,
      memory=where,
      threads=min(os.cpu_count() or 1, _READERS),
    )
  file = disk.BlockFile(
    source.directory / checkpoint.BLOCKS,
    source.offsets,
    source.checksums,
    _block_bytes(source),
  )
  return disk_store.DiskStore(
    file,
    source.shape,
    source.dtype,
    layers=len(config.moe_ids),
    blocks=blocks,
    policy=engine_config.HOST_EVICTIONS[engine.host_eviction],
    memory=where,
  )


def locate(path: str | pathlib.Path) -> pathlib.Path:
  """The directory of a model; 'demo' is the one that comes with us.

  Raises:
    ValueError: it is not there.
  """
  if str(path) == _DEMO:
    directory = pathlib.Path(__file__).resolve().parent / _DEMO
    if not (directory / 'config.json').is_file():
      raise ValueError(
        f'The demo model is missing: {directory} holds no config.json. '
        'Install the package again, or give the directory of another model.'
      )
    return directory
  directory = pathlib.Path(path).expanduser()
  if not (directory / 'config.json').is_file():
    what = 'holds no config.json' if directory.is_dir() else 'is no directory'
    raise ValueError(
      f'{directory} {what}. Give {_DEMO!r}, the directory of a downloaded '
      'Hugging Face model, or one written by bevy_jax.experiments.convert.'
    )
  return directory


def read_config(directory: pathlib.Path) -> config_lib.ModelConfig:
  """The model's config; ends a text on every end that its files name."""
  generation = directory / 'generation_config.json'
  config = families.from_hf(
    _read_json(directory / 'config.json'),
    _read_json(generation) if generation.is_file() else None,
  )
  # Some tokenizers know an end of turn that neither config lists.
  ends = dict.fromkeys((*config.eos_ids, *_tokenizer_eos(directory)))
  return dataclasses.replace(config, eos_ids=tuple(ends))


@dataclasses.dataclass(frozen=True)
class HfSource:
  """An open Hugging Face directory that was checked against its config.

  Attributes:
    config: the model.
    plan: which tensors fill which weights.
    files: where the tensors lie.
    dtype: of every expert.
  """

  config: config_lib.ModelConfig
  plan: tensors.Plan
  files: hf_checkpoint.HfCheckpoint
  dtype: np.dtype[Any]

  @classmethod
  def open(
    cls, directory: pathlib.Path, config: config_lib.ModelConfig
  ) -> Self:
    """Checks all tensors without reading any; raises ValueError."""
    with contextlib.ExitStack() as stack:
      files = hf_checkpoint.HfCheckpoint.open(directory)
      stack.enter_context(files)
      plan = tensors.plan(config, files.tensors.keys())
      shapes = {p.name: p.tensor for p in plan.pieces()}
      files.require(shapes)
      files.refuse_unused(shapes, lambda n: tensors.ignorable(config, n))
      for leaf in plan.shared.values():
        _one_dtype(files, [piece.name for piece in leaf])
      experts = [piece.name for leaf in plan.experts for piece in leaf]
      source = cls(config, plan, files, _one_dtype(files, experts))
      stack.pop_all()  # all is well: the files stay open
      return source

  @property
  def count(self) -> int:
    """Number of experts, all layers together."""
    return len(self.plan.experts)

  @property
  def shape(self) -> tuple[int, int, int]:
    """Shape of one packed expert, `[3, F, D]`."""
    return self.config.expert_shape

  @property
  def nbytes(self) -> int:
    """Bytes of everything that is read."""
    return sum(
      math.prod(piece.shape) * self.files.dtype(piece.name).itemsize
      for piece in self.plan.pieces()
    )

  def shared(self) -> Iterator[tuple[str, np.ndarray]]:
    """Reads every shared weight: its path and the leaf, as stored."""
    shapes = tensors.flat_shapes(self.config)
    for path, leaf in self.plan.shared.items():
      dtype = _one_dtype(self.files, [piece.name for piece in leaf])
      out = pinned.aligned(shapes[path], dtype)
      self._read(leaf, out)
      yield path, out

  def fill(self, key: int, out: np.ndarray) -> None:
    """Reads one expert into `out` `[3, F, D]`."""
    self._read(self.plan.experts[key], out)

  def _read(self, leaf: tensors.Leaf, out: np.ndarray) -> None:
    for piece, part in zip(
      leaf, out if len(leaf) > 1 else out[None], strict=True
    ):
      if piece.transpose:
        raw = np.empty(piece.shape, out.dtype)
        self.files.read(piece.name, piece.start, raw)
        part[...] = raw.T
      else:
        self.files.read(piece.name, piece.start, part)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self.files.close()


def _open(
  directory: pathlib.Path, config: config_lib.ModelConfig
) -> HfSource | checkpoint.Reader:
  if not checkpoint.is_native(directory):
    return HfSource.open(directory, config)
  with contextlib.ExitStack() as stack:
    reader = stack.enter_context(checkpoint.Reader.open(directory))
    _check_native(reader, config)
    stack.pop_all()
    return reader


def _one_dtype(
  files: hf_checkpoint.HfCheckpoint, names: list[str]
) -> np.dtype[Any]:
  """The dtype that these tensors share, for they become one array or pool."""
  first = files.dtype(names[0])
  for name in names:
    if files.dtype(name) != first:
      raise ValueError(
        f'{files.tensors[name].file}: {name} is stored as '
        f'{files.dtype(name)} and {names[0]} as {first}; they must have the '
        'same dtype. Save the model again in one dtype.'
      )
  return first


def _check_native(
  source: checkpoint.Reader, config: config_lib.ModelConfig
) -> None:
  count = len(config.moe_ids) * config.num_experts
  form, shape = _format(source), config.expert_shape
  block = (quant.layout(form, shape).nbytes,) if form else shape
  if (source.count, source.shape) != (count, block):
    raise ValueError(
      f'{source.directory} holds {source.count} experts of shape '
      f'{source.shape}, but its config.json asks for {count} of '
      f'{block}. Convert the model again.'
    )
  wanted = tensors.flat_shapes(config)
  if source.dense_shapes != wanted:
    name = min(set(source.dense_shapes.items()) ^ set(wanted.items()))[0]
    raise ValueError(
      f'{source.directory}: shared weight {name} is '
      f'{source.dense_shapes.get(name, "absent")}, but its config.json asks '
      f'for {wanted.get(name, "none")}. Convert the model again.'
    )


def _format(source: HfSource | checkpoint.Reader) -> quant.Format | None:
  """How a source's experts are packed; ValueError where it cannot be."""
  if isinstance(source, HfSource):
    return None
  if source.meta is None and source.dtype != np.uint8:
    return None
  try:
    if source.dtype != np.uint8:
      raise ValueError(f'the blocks are {source.dtype}, not bytes')
    told = dict(source.meta or {})
    if (order := told.pop('order', 1)) != quant.ORDER:
      raise ValueError(f'they are in order {order}, and {quant.ORDER} is read')
    return quant.Format(**told)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'{source.directory / checkpoint.INDEX} describes packed experts as '
      f'{source.meta}, which cannot be read: {error}. Convert the model again.'
    ) from error


def _tokenizer_eos(directory: pathlib.Path) -> list[int]:
  """Id of the tokenizer's end of text, if its files name one."""
  settings = directory / 'tokenizer_config.json'
  vocabulary = directory / 'tokenizer.json'
  if not (settings.is_file() and vocabulary.is_file()):
    return []
  token = _read_json(settings).get('eos_token')
  if isinstance(token, dict):  # an AddedToken with its flags
    token = token.get('content')
  if token is None:
    return []
  tokenizer = _read_json(vocabulary)
  ids = {t['content']: t['id'] for t in tokenizer.get('added_tokens', ())}
  words = tokenizer.get('model', {}).get('vocab', {})
  if token not in ids and isinstance(words, dict) and token in words:
    ids[token] = words[token]
  return [ids[token]] if token in ids else []


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  try:
    content = json.loads(path.read_text('utf-8'))
  except ValueError as error:
    raise ValueError(f'{path} is no JSON file: {error}.') from error
  if not isinstance(content, dict):
    raise ValueError(f'{path} holds no JSON object; download it again.')
  return content
