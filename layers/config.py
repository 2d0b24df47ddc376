"""The shape of a model: everything that its maths depends on."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
  """Rotary position embedding, with the scaling kinds that are supported.

  Attributes:
    kind: 'default', 'linear', 'llama3' or 'yarn'.
    theta: base of the geometric sequence of wavelengths.
    factor: how many times the context was stretched (all but 'default').
    original_context: context before stretching ('llama3', 'yarn').
    low_freq_factor: 'llama3' only.
    high_freq_factor: 'llama3' only.
    beta_fast: 'yarn' only; rotations above which nothing is interpolated.
    beta_slow: 'yarn' only; rotations below which all is interpolated.
    attention_factor: 'yarn' only; scale of cos and sin, None to derive it.
    mscale: 'yarn' only; numerator's weight when the factor is derived.
    mscale_all_dim: 'yarn' only; denominator's weight, likewise.
    truncate: 'yarn' only; whether the ramp's ends are rounded outwards.
  """

  kind: str = 'default'
  theta: float = 10000.0
  factor: float = 1.0
  original_context: int = 0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None
  mscale: float | None = None
  mscale_all_dim: float | None = None
  truncate: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """One Mixture-of-Experts decoder; hashable, so jit takes it as static.

  Attributes:
    family: 'mixtral', 'qwen3_moe', 'olmoe' or 'qwen2_moe'.
    vocab_size: V, rows of the embedding.
    num_layers: L, all layers, with and without experts.
    model_dim: D, width of the residual stream.
    num_heads: H, query heads.
    num_kv_heads: K, key and value heads; divides H.
    head_dim: width of one head.
    num_experts: E, routed experts of one MoE layer.
    top_k: T, experts that each token uses.
    expert_dim: F, hidden width of one routed expert.
    moe_layers: one flag a layer; False is a dense feed-forward layer.
    dense_dim: hidden width of the dense layers, 0 where there are none.
    shared_dim: hidden width of the shared expert, 0 where there is none.
    shared_gate: whether the shared expert is scaled by a sigmoid gate.
    score: how router logits become scores; 'softmax'.
    norm_topk: whether the chosen scores are divided by their sum.
    qk_norm: None, 'head' (over each head) or 'full' (over all heads).
    qkv_bias: biases on the query, key and value projections.
    out_bias: bias on the attention's output projection.
    clip_qkv: clamp of queries, keys and values to +-this, or None.
    windows: one sliding window a layer in tokens, 0 for full attention.
    norm_eps: epsilon of every RMSNorm.
    rope: rotary embedding.
    tied: whether the head is the embedding.
    context: largest number of positions.
    eos_ids: tokens that end a text.
  """

  family: str
  vocab_size: int
  num_layers: int
  model_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  num_experts: int
  top_k: int
  expert_dim: int
  moe_layers: tuple[bool, ...]
  dense_dim: int = 0
  shared_dim: int = 0
  shared_gate: bool = False
  score: str = 'softmax'
  norm_topk: bool = False
  qk_norm: str | None = None
  qkv_bias: bool = False
  out_bias: bool = False
  clip_qkv: float | None = None
  windows: tuple[int, ...] = ()
  norm_eps: float = 1e-6
  rope: RopeConfig = RopeConfig()
  tied: bool = False
  context: int = 4096
  eos_ids: tuple[int, ...] = ()

  @property
  def moe_ids(self) -> tuple[int, ...]:
    """Layer numbers that have experts, ascending."""
    return tuple(i for i, moe in enumerate(self.moe_layers) if moe)

  @property
  def expert_shape(self) -> tuple[int, int, int]:
    """One expert, packed: gate, up and transposed down, `[3, F, D]`."""
    return (3, self.expert_dim, self.model_dim)

  def window(self, layer: int) -> int:
    """Sliding window of a layer in tokens, 0 for full attention."""
    return self.windows[layer] if self.windows else 0


def tiny(**changes: object) -> ModelConfig:
  """A model small enough for tests and notebooks: 4 layers, 8 experts."""
  base = ModelConfig(
    family='qwen3_moe',
    vocab_size=96,
    num_layers=4,
    model_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=8,
    top_k=2,
    expert_dim=16,
    moe_layers=(True,) * 4,
    norm_topk=True,
    qk_norm='head',
    tied=True,
    context=128,
    eos_ids=(1,),
  )
  return dataclasses.replace(base, **changes)  # type: ignore[arg-type]
