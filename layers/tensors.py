"""Which tensors of a Hugging Face checkpoint fill which weights of ours."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import params as params_lib


class Piece(NamedTuple):
  """A contiguous part of one tensor that fills a leaf, or a part of it.

  Attributes:
    name: the tensor's name.
    tensor: shape of the whole tensor.
    start: first element of the part, counted in row-major order.
    shape: shape of the part.
    transpose: whether its two axes are swapped on the way; files keep
      projections as [out, in], the pytree keeps them as [in, out].
  """

  name: str
  tensor: tuple[int, ...]
  start: int
  shape: tuple[int, ...]
  transpose: bool


Leaf = tuple[Piece, ...]
"""One piece is the whole leaf; several are stacked on a new first axis."""


class Plan(NamedTuple):
  """What to read for each weight.

  Attributes:
    shared: path of a shared weight (`layers.0.wq`) -> its pieces.
    experts: pieces of each expert's packed block `[3, F, D]`, by key: index
      among the MoE layers times E, plus the expert's id.
  """

  shared: dict[str, Leaf]
  experts: list[Leaf]

  def pieces(self) -> Iterator[Piece]:
    """Every piece, shared weights first."""
    for leaf in (*self.shared.values(), *self.experts):
      yield from leaf


# Name of a leaf -> names of its tensors under their layer. Where families
# or releases differ, one line an alternative.
_LAYER: dict[str, tuple[tuple[str, ...], ...]] = {
  'attn_norm': (('input_layernorm.weight',),),
  'mlp_norm': (('post_attention_layernorm.weight',),),
  'wq': (('self_attn.q_proj.weight',),),
  'wk': (('self_attn.k_proj.weight',),),
  'wv': (('self_attn.v_proj.weight',),),
  'wo': (('self_attn.o_proj.weight',),),
  'bq': (('self_attn.q_proj.bias',),),
  'bk': (('self_attn.k_proj.bias',),),
  'bv': (('self_attn.v_proj.bias',),),
  'bo': (('self_attn.o_proj.bias',),),
  'q_norm': (('self_attn.q_norm.weight',),),
  'k_norm': (('self_attn.k_norm.weight',),),
  'router': (('mlp.gate.weight',), ('block_sparse_moe.gate.weight',)),
  'shared_in': (
    (
      'mlp.shared_expert.gate_proj.weight',
      'mlp.shared_expert.up_proj.weight',
    ),
  ),
  'shared_out': (('mlp.shared_expert.down_proj.weight',),),
  'shared_gate': (('mlp.shared_expert_gate.weight',),),
  'dense_in': (('mlp.gate_proj.weight', 'mlp.up_proj.weight'),),
  'dense_out': (('mlp.down_proj.weight',),),
}

_TOP: dict[str, str] = {
  'embed': 'model.embed_tokens.weight',
  'final_norm': 'model.norm.weight',
  'head': 'lm_head.weight',
}

# Parent of the experts and the names of gate, up and down, by age: Mixtral
# as released, the others as released, and the mixtures that tools write.
_EXPERTS: tuple[tuple[str, tuple[str, str, str]], ...] = (
  ('mlp', ('gate_proj', 'up_proj', 'down_proj')),
  ('block_sparse_moe', ('w1', 'w3', 'w2')),
  ('mlp', ('w1', 'w3', 'w2')),
  ('block_sparse_moe', ('gate_proj', 'up_proj', 'down_proj')),
)


def shared_pieces(config: config_lib.ModelConfig) -> dict[str, list[Leaf]]:
  """Path of every shared weight -> its alternatives, the likeliest first."""
  return {
    path: _alternatives(path, shape, config)
    for path, shape in flat_shapes(config).items()
  }


def expert_pieces(
  config: config_lib.ModelConfig, layer: int, expert: int
) -> list[Leaf]:
  """Alternatives for gate, up and transposed down of one expert.

  Either three tensors of its own, or parts of the fused tensors of its layer:
  `gate_up_proj` [E, 2F, D] and `down_proj` [E, D, F].
  """
  f, d, e = config.expert_dim, config.model_dim, config.num_experts
  found: list[Leaf] = []
  for parent, names in _by_age(config):
    prefix = f'model.layers.{layer}.{parent}.experts.{expert}'
    gate, up, down = (f'{prefix}.{name}.weight' for name in names)
    found.append(
      (
        Piece(gate, (f, d), 0, (f, d), False),
        Piece(up, (f, d), 0, (f, d), False),
        Piece(down, (d, f), 0, (d, f), True),
      )
    )
  for parent in ('mlp', 'block_sparse_moe'):
    prefix = f'model.layers.{layer}.{parent}.experts'
    both, down = f'{prefix}.gate_up_proj', f'{prefix}.down_proj'
    first = expert * 2 * f * d
    found.append(
      (
        Piece(both, (e, 2 * f, d), first, (f, d), False),
        Piece(both, (e, 2 * f, d), first + f * d, (f, d), False),
        Piece(down, (e, d, f), expert * d * f, (d, f), True),
      )
    )
  return found


def plan(config: config_lib.ModelConfig, names: Collection[str]) -> Plan:
  """Chooses for every weight among the alternatives, by the names there are.

  Where none is complete the nearest one is chosen, so that whoever checks the
  plan against the files can name what is missing.
  """
  shared = {
    path: _choose(alternatives, names)
    for path, alternatives in shared_pieces(config).items()
  }
  experts = [
    _choose(expert_pieces(config, layer, expert), names)
    for layer in config.moe_ids
    for expert in range(config.num_experts)
  ]
  return Plan(shared, experts)


def ignorable(config: config_lib.ModelConfig, name: str) -> bool:
  """Whether a tensor that no weight needs may be there all the same."""
  if name == _TOP['head']:
    return config.tied
  return name.endswith('rotary_emb.inv_freq')


def flat_shapes(
  config: config_lib.ModelConfig,
) -> dict[str, tuple[int, ...]]:
  """Path of every shared weight (`layers.0.wq`) -> its shape."""
  leaves, _ = jax.tree.flatten_with_path(
    params_lib.shapes(config), is_leaf=_is_shape
  )
  return {_path(keys): shape for keys, shape in leaves}


def unflatten(
  config: config_lib.ModelConfig, leaves: Mapping[str, Any]
) -> params_lib.Params:
  """The pytree of shared weights from its leaves by path."""
  tree: params_lib.Params = jax.tree.map_with_path(
    lambda keys, shape: leaves[_path(keys)],
    params_lib.shapes(config),
    is_leaf=_is_shape,
  )
  return tree


def _alternatives(
  path: str, shape: tuple[int, ...], config: config_lib.ModelConfig
) -> list[Leaf]:
  if path in _TOP:
    return [(_piece(_TOP[path], shape, path != 'embed'),)]
  _, layer, leaf = path.split('.')
  prefix = f'model.layers.{layer}.'
  options = _LAYER[leaf]
  if config.family == 'mixtral':
    options = options[::-1]
  return [
    tuple(
      _piece(prefix + name, shape[len(names) > 1 :], True) for name in names
    )
    for names in options
  ]


def _piece(name: str, shape: tuple[int, ...], transpose: bool) -> Piece:
  """The whole of a tensor; vectors have nothing to transpose."""
  transpose = transpose and len(shape) == 2
  kept = shape[::-1] if transpose else shape
  return Piece(name, kept, 0, kept, transpose)


def _by_age(
  config: config_lib.ModelConfig,
) -> list[tuple[str, tuple[str, str, str]]]:
  """Experts' names, those that the family was released with first."""
  own = 'block_sparse_moe' if config.family == 'mixtral' else 'mlp'
  return sorted(_EXPERTS[:2], key=lambda x: x[0] != own) + list(_EXPERTS[2:])


def _choose(alternatives: list[Leaf], names: Collection[str]) -> Leaf:
  """The first with the largest share of its tensors present."""
  return max(
    alternatives,
    key=lambda leaf: sum(p.name in names for p in leaf) / len(leaf),
  )


def _path(keys: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(keys, simple=True, separator='.')


def _is_shape(x: object) -> bool:
  return isinstance(x, tuple)
