"""Where the GPU kernels serve a model, and where the plain form does."""

import jax
import jax.numpy as jnp

from bevy_jax.layers import config as config_lib
from bevy_jax.layers import kernel_packed, quant

# Pallas counts the elements of an array of bytes in 32 bits up to 2^32 bytes,
# with a sign: what lies behind 2^31 of them would be looked for elsewhere.
_SHORT, _LONG = 2**31, 2**32
_PRODUCT = 16  # What a tensor core takes at least.


def unfit(
  config: config_lib.ModelConfig,
  dtype: jnp.dtype,
  form: quant.Format | None,
) -> str:
  """Why the kernels cannot decode a model, in words; empty where they can."""
  if not all(config.moe_layers):
    return 'some layers have no experts'
  if config.shared_dim:
    return 'a shared expert stands beside the others'
  if config.head_dim % 2 or config.num_heads % config.num_kv_heads:
    return f'heads of {config.head_dim} cannot be halved'
  sides = (
    config.model_dim,
    config.expert_dim,
    config.num_heads * config.head_dim,
  )
  if any(side % _PRODUCT for side in sides):
    return f'{_PRODUCT} does not divide each of {sides}, the sides of products'
  if dtype not in (jnp.bfloat16, jnp.float32):
    return f'they compute in bfloat16 or float32, not {dtype}'
  if form is not None:
    how = quant.layout(form, config.expert_shape)
    if not kernel_packed.supports(how):
      return f'{form.name} puts parts of two groups into one byte'
  return ''


def chosen(
  asked: str,
  config: config_lib.ModelConfig,
  dtype: jnp.dtype,
  form: quant.Format | None,
) -> bool:
  """Whether decode launches go through the kernels: 'auto', 'on' or 'off'.

  Raises:
    ValueError: they are asked for and cannot serve the model.
  """
  why = unfit(config, dtype, form)
  if asked == 'on' and why:
    raise ValueError(
      f'kernels is on, but {why}. Leave it at auto, which takes the plain form '
      'of such a model.'
    )
  on_gpu = jax.default_backend() == 'gpu' and dtype == jnp.bfloat16
  return asked == 'on' or (asked == 'auto' and on_gpu and not why)


def slots_of(slots: int, block: int, form: quant.Format | None) -> int:
  """How many slots to allocate so that every one of them can be reached."""
  if form is None or not _SHORT < slots * block <= _LONG:
    return slots
  return _LONG // block + 1
