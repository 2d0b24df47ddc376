"""Published sizes of models, and the bytes that a simulator needs of them."""

import dataclasses

from bevy_jax import config as config_lib
from bevy_jax.layers import quant

_FLOAT = 2  # Bytes of a bfloat16 weight.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """What one model's layer and its experts weigh.

  Attributes:
    layers: layers with experts.
    experts: routed experts of a layer.
    top_k: of them that a token uses.
    dim: D, width of the residual stream.
    expert_dim: F, hidden width of one routed expert.
    attention: weights of a layer's attention.
    shared_dim: hidden width of all shared experts of a layer together.
    biases: whether each expert has a bias on all three of its products.
    vocab: V, rows of the head.
  """

  layers: int
  experts: int
  top_k: int
  dim: int
  expert_dim: int
  attention: int
  shared_dim: int = 0
  biases: bool = False
  vocab: int = 0

  def expert_bytes(self, form: str = 'bf16') -> int:
    """Bytes of one routed expert as the project stores it.

    Args:
      form: 'bf16', or what `quant.parse` reads, such as 'int8' or 'int4:64'.
        ValueError for anything else. Biases stay bfloat16.
    """
    shape = (3, self.expert_dim, self.dim)
    bias = _FLOAT * (2 * self.expert_dim + self.dim) if self.biases else 0
    if form == 'bf16':
      return _FLOAT * 3 * self.expert_dim * self.dim + bias
    return quant.layout(quant.parse(form), shape).nbytes + bias

  @property
  def layer_bytes(self) -> int:
    """Shared weights of a layer, bfloat16; keys and values do not count."""
    shared = 3 * self.dim * self.shared_dim
    router = self.dim * self.experts
    norms = 2 * self.dim
    return _FLOAT * (self.attention + shared + router + norms)

  @property
  def head_bytes(self) -> int:
    """The head, bfloat16."""
    return _FLOAT * self.vocab * self.dim


def _grouped(dim: int, heads: int, kv_heads: int, head: int) -> int:
  """Weights of grouped-query attention."""
  return dim * head * (2 * heads + 2 * kv_heads)


# Each from the config.json that its authors published.
SHAPES = {
  # mistralai/Mixtral-8x7B-v0.1
  'mixtral-8x7b': Shape(
    layers=32, experts=8, top_k=2, dim=4096, expert_dim=14336,
    attention=_grouped(4096, 32, 8, 128), vocab=32000,
  ),
  # Qwen/Qwen3-30B-A3B
  'qwen3-30b-a3b': Shape(
    layers=48, experts=128, top_k=8, dim=2048, expert_dim=768,
    attention=_grouped(2048, 32, 4, 128), vocab=151936,
  ),
  # allenai/OLMoE-1B-7B-0924
  'olmoe-1b-7b': Shape(
    layers=16, experts=64, top_k=8, dim=2048, expert_dim=1024,
    attention=_grouped(2048, 16, 16, 128), vocab=50304,
  ),
  # deepseek-ai/DeepSeek-V2-Lite: 27 layers, the first one without experts; 2
  # shared experts; latent attention (16 heads, 128 + 64 rotary for queries,
  # 512 + 64 latent, 128 for values).
  'deepseek-v2-lite': Shape(
    layers=26, experts=64, top_k=6, dim=2048, expert_dim=1408,
    attention=(
      2048 * 16 * (128 + 64)
      + 2048 * (512 + 64)
      + 512 * 16 * (128 + 128)
      + 16 * 128 * 2048
    ),
    shared_dim=2 * 1408, vocab=102400,
  ),
  # openai/gpt-oss-20b, whose experts have biases
  'gpt-oss-20b': Shape(
    layers=24, experts=32, top_k=4, dim=2880, expert_dim=2880,
    attention=_grouped(2880, 64, 8, 64), biases=True, vocab=201088,
  ),
}  # fmt: skip


def parse(text: str) -> tuple[Shape, str]:
  """'NAME' or 'NAME:FORM' as a shape and what its experts are stored as.

  Raises:
    ValueError: no such shape, or no such form for it.
  """
  name, _, form = text.partition(':')
  config_lib.choose('model shape', name, SHAPES)
  form = form or 'bf16'
  SHAPES[name].expert_bytes(form)
  return SHAPES[name], form
