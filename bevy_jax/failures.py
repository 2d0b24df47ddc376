"""Who must end where a load has failed; everybody else goes on."""

from bevy_jax import prefill as prefill_lib
from bevy_jax import protocols
from bevy_jax import request as request_lib


def affected(
  failed: protocols.Failed,
  experts: int,
  view: protocols.View,
  prefill: prefill_lib.Prefill | None,
) -> list[request_lib.Progress]:
  """Takes out all who wait for a key, decoding or in a prompt; returns them.

  Who is on the device just then, in a wave of the same layer, stays: once it
  is back, the load is tried again. A later request tries it again too. The
  engine alone calls this, for it changes the view and the prefill.

  Args:
    failed: the load.
    experts: experts of a layer.
    view: loses those who decode.
    prefill: loses those whose prompts need the key now.
  """
  layer, expert = divmod(failed.key, experts)
  gone = [p for p in view.waiting if p.layer == layer and p.need >> expert & 1]
  for p in gone:
    view.waiting.remove(p)
  view.active -= len(gone)
  if prefill is None or prefill.in_flight or prefill.layer != layer:
    return gone
  return gone + (prefill.drop(expert) if prefill.need >> expert & 1 else [])
