"""Makes tests/golden/: tiny checkpoints and what transformers says of them.

Run by `make goldens`; needs torch and transformers (extra `goldens`).
`--check` writes nothing: it makes everything again in memory and compares it
with the files. Both ways the files are then opened by transformers and by our
reference, which must say the same.

Each case of cases.py is a folder with config.json, model.safetensors (by
save_pretrained) and expected.safetensors, float32 with eager attention:
  tokens         int32 [B, P]      the prompts
  prefill_logits       [B, P, V]   logits at every prompt position
  decode_tokens  int32 [B, N]      greedy; the first is prefill's last argmax
  decode_logits        [B, N, V]   logits after feeding decode_tokens[:, i]
"""

import argparse
import copy
import json
import pathlib
import shutil
import zlib
from typing import Any

import cases as cases_lib
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
import transformers

from bevy_jax.layers import families, reference, tensors

HERE = pathlib.Path(__file__).parent
BATCH, PROMPT, STEPS, VOCAB = 2, 12, 16, 64
TOLERANCE = 3e-5  # between two ways to run transformers, in float32
OURS = 1e-4  # between transformers and our reference
MATTERS = 1e-2  # what turning a flag off must change in the logits, at least
MARGIN = 3e-4  # between the chosen and the next best, experts and tokens
BYTES = 3_000_000  # of the whole folder

Arrays = dict[str, np.ndarray]
Weights = dict[str, torch.Tensor]


def _model(case: cases_lib.Case, seed: int, **changes: Any) -> cases_lib.Model:
  """A model of the case whose weights depend on `seed` and names alone."""
  sizes = {
    'Mixtral': {'num_local_experts': 6, 'intermediate_size': 16},
    'Olmoe': {
      'num_experts': 8,
      'intermediate_size': 16,
      'pad_token_id': None,
      'eos_token_id': 2,
    },
    'Qwen3Moe': {'num_experts': 8, 'moe_intermediate_size': 16},
    'Qwen2Moe': {
      'num_experts': 7,
      'moe_intermediate_size': 12,
      'shared_expert_intermediate_size': 20,
    },
  }
  base = {
    'vocab_size': VOCAB,
    'hidden_size': 32,
    'intermediate_size': 24,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': None if case.family == 'Olmoe' else 2,
    'num_experts_per_tok': 3 if case.family == 'Olmoe' else 2,
    'max_position_embeddings': 128,
    'attn_implementation': 'eager',
  }
  fields = base | sizes[case.family] | case.config | changes
  config_class = getattr(transformers, f'{case.family}Config')
  model_class = getattr(transformers, f'{case.family}ForCausalLM')
  model = model_class(config_class(**copy.deepcopy(fields))).eval()
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      value = _weight(name, tuple(parameter.shape), seed)
      parameter.copy_(torch.from_numpy(value).to(case.dtype))
  return model


def _weight(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
  # RandomState: its stream is frozen, whatever the version of numpy.
  random = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
  x = random.standard_normal(shape).astype(np.float32)
  if name.endswith('norm.weight'):
    return 1 + 0.3 * x
  if len(shape) == 1:
    return 0.5 * x
  if 'embed' in name:  # small, or a tied head repeats the last token
    return 0.2 * x
  sharp = 2.0 if name.endswith('gate.weight') else 1.0
  return sharp * x / np.sqrt(shape[-1]).astype(np.float32)


def _expected(model: cases_lib.Model, seed: int) -> Arrays:
  random = np.random.RandomState(seed)
  tokens = random.randint(0, VOCAB, (BATCH, PROMPT))
  cache = transformers.DynamicCache(config=model.config)
  with torch.no_grad():
    prefill = model(torch.from_numpy(tokens), cache=cache).logits
    fed, logits, last = [], [], prefill[:, -1]
    for _ in range(STEPS):
      fed.append(last.argmax(-1, keepdim=True))
      last = model(fed[-1], cache=cache).logits[:, -1]
      logits.append(last)
  return {
    'tokens': tokens.astype(np.int32),
    'prefill_logits': prefill.numpy(),
    'decode_tokens': torch.cat(fed, 1).numpy().astype(np.int32),
    'decode_logits': torch.stack(logits, 1).numpy(),
  }


def _whole(
  model: cases_lib.Model, arrays: Arrays, router: list[torch.Tensor] | None
) -> np.ndarray:
  """Logits of prompt and continuation in one pass, without any cache."""
  with torch.no_grad():
    out = model(
      torch.from_numpy(_texts(arrays)).long(),
      use_cache=False,
      output_router_logits=router is not None,
    )
  if router is not None:
    router.extend(out.router_logits)
  logits: np.ndarray = out.logits.numpy()
  return logits


def _texts(arrays: Arrays) -> np.ndarray:
  return np.concatenate([arrays['tokens'], arrays['decode_tokens']], axis=1)


def _logits(arrays: Arrays) -> np.ndarray:
  both = [arrays['prefill_logits'], arrays['decode_logits']]
  return np.concatenate(both, axis=1)


def _sound(model: cases_lib.Model, arrays: Arrays) -> bool:
  """Whether no choice is a near tie and the routing is varied."""
  router: list[torch.Tensor] = []
  logits = _whole(model, arrays, router)
  best = np.sort(logits, axis=-1)
  if (best[..., -1] - best[..., -2]).min() < MARGIN:
    return False
  top_k = model.config.num_experts_per_tok
  for layer in router:
    scores = layer.softmax(-1).sort(-1, descending=True)
    gap = scores.values[:, top_k - 1] - scores.values[:, top_k]
    used = scores.indices[:, :top_k].unique().numel()
    if gap.min() < MARGIN or used < layer.shape[-1] - 1:
      return False
  np.testing.assert_allclose(logits, _logits(arrays), atol=TOLERANCE, rtol=0)
  return len(np.unique(arrays['decode_tokens'])) > 6


def _make(name: str, case: cases_lib.Case) -> tuple[cases_lib.Model, Arrays]:
  """Model and arrays of the first seed without near ties; checks the flags."""
  start = zlib.crc32(name.encode()) % 2**31
  for seed in range(start, start + 500):
    model = _model(case, seed)
    arrays = _expected(model, seed)
    if _sound(model, arrays):
      break
  else:
    raise ValueError(f'{name}: no seed without near ties; lower MARGIN.')
  for flag, off in case.off.items():
    if isinstance(off, dict):
      other = _model(case, seed, **off)
    else:
      other = off(copy.deepcopy(model))
    change = np.abs(_whole(other, arrays, None) - _logits(arrays)).max()
    print(f'{name}: {flag} changes the logits by up to {change:.3f}')
    assert change > MATTERS, f'{name}: {flag} hardly matters'
  return model, arrays


def _write(
  folder: pathlib.Path,
  case: cases_lib.Case,
  model: cases_lib.Model,
  arrays: Arrays,
) -> None:
  shutil.rmtree(folder, ignore_errors=True)
  stored = copy.deepcopy(model).to(case.dtype)
  stored.save_pretrained(folder, save_original_format=not case.fused)
  (folder / 'generation_config.json').unlink()
  metadata = {'made_by': 'make goldens'}
  file = folder / 'expected.safetensors'
  safetensors.numpy.save_file(arrays, file, metadata=metadata)


def _ours(folder: pathlib.Path, weights: Weights, arrays: Arrays) -> np.ndarray:
  """What our reference says after every token; `weights` as on disk."""
  config = families.from_hf(json.loads((folder / 'config.json').read_text()))
  plan = tensors.plan(config, weights)

  def read(piece: tensors.Piece) -> np.ndarray:
    flat = weights[piece.name].float().numpy().reshape(-1)
    size = int(np.prod(piece.shape))
    part = flat[piece.start : piece.start + size].reshape(piece.shape)
    return part.T if piece.transpose else part

  def leaf(pieces: tensors.Leaf) -> np.ndarray:
    parts = [read(piece) for piece in pieces]
    return np.stack(parts) if len(parts) > 1 else parts[0]

  shared = {path: jnp.asarray(leaf(p)) for path, p in plan.shared.items()}
  experts = np.stack([leaf(pieces) for pieces in plan.experts])
  bank = experts.reshape(len(config.moe_ids), -1, *config.expert_shape)
  params = tensors.unflatten(config, shared)
  return np.stack(
    [
      reference.logits(config, params, jnp.asarray(bank), jnp.asarray(text))
      for text in _texts(arrays)
    ]
  )


def _check(
  folder: pathlib.Path, model: cases_lib.Model, arrays: Arrays
) -> None:
  stored = safetensors.torch.load_file(folder / 'model.safetensors')
  kept = safetensors.numpy.load_file(folder / 'expected.safetensors')
  opened = type(model).from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager'
  )
  for name, value in model.state_dict().items():
    assert torch.equal(value, opened.state_dict()[name]), (folder, name)
  for name, value in arrays.items():
    np.testing.assert_allclose(kept[name], value, atol=TOLERANCE, rtol=0)
  whole = _whole(opened, kept, None)
  np.testing.assert_allclose(whole, _logits(kept), atol=TOLERANCE, rtol=0)
  ours = _ours(folder, stored, kept)
  np.testing.assert_allclose(ours, _logits(kept), atol=OURS, rtol=0)
  greedy = ours[:, PROMPT - 1 : -1].argmax(-1)
  np.testing.assert_array_equal(greedy, kept['decode_tokens'])
  apart = np.abs(ours - _logits(kept)).max()
  print(f'{folder.name}: our reference differs by up to {apart:.1e}')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--check', action='store_true', help='compare, no writes')
  parser.add_argument('--only', default='', help='cases that begin with this')
  args = parser.parse_args()
  torch.set_num_threads(1)
  transformers.utils.logging.disable_progress_bar()
  for name, case in cases_lib.CASES.items():
    if name.startswith(args.only):
      model, arrays = _make(name, case)
      if not args.check:
        _write(HERE / name, case, model, arrays)
      _check(HERE / name, model, arrays)
  size = sum(f.stat().st_size for f in HERE.rglob('*') if f.is_file())
  print(f'{len(cases_lib.CASES)} cases, {size} bytes')
  assert size < BYTES, f'tests/golden has {size} bytes, of {BYTES} allowed'


if __name__ == '__main__':
  main()
