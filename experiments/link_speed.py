"""How fast a transfer fills slots, by size of a block and loads at once."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bevy_jax import links
from bevy_jax.offload import cuda, host_store, pinned, transfer

DEPTHS = (1, 2, 4, 8)
_NEAR = 0.95  # A depth within 5 % of the best one is as good.
_BLOCKS = 16  # Host blocks and slots: no two loads at once share one.
_BYTES = np.dtype(np.uint8)


class Rate(NamedTuple):
  """Measured loads.

  Attributes:
    nbytes: of a block.
    depth: loads at once.
    gb_per_s: until all lay in their slots; the better of two runs.
    host_us: of host time that a load took, slot write included.
  """

  nbytes: int
  depth: int
  gb_per_s: float
  host_us: float


def measure(name: str, sizes: Iterable[int], budget: int) -> list[Rate]:
  """Every size with every depth through the transfer of this name.

  Args:
    name: 'cuda' or 'device_put'.
    sizes: bytes of a block.
    budget: bytes that each entry moves, within 16 to 256 loads.
  """
  found = []
  for nbytes in sizes:
    lane = _Lane(name, nbytes)
    count = min(max(budget // nbytes, 16), 256)
    for depth in DEPTHS:
      runs = [lane.run(depth, count) for _ in range(2)]
      seconds, host = min(runs)
      speed = count * nbytes / seconds * 1e-9
      found.append(Rate(nbytes, depth, speed, host / count * 1e6))
    lane.close()
  return found


def best_depth(rates: Sequence[Rate], nbytes: int) -> int:
  """The least depth that is within 5 % of the best for blocks of a size."""
  here = [r for r in rates if r.nbytes == nbytes]
  best = max(r.gb_per_s for r in here)
  return min(r.depth for r in here if r.gb_per_s >= _NEAR * best)


def latency_us(rates: Sequence[Rate], nbytes: int) -> float:
  """What a load alone takes beyond its bytes at the greatest depth's rate."""
  by_depth = {r.depth: nbytes / r.gb_per_s for r in rates if r.nbytes == nbytes}
  return max(0.0, by_depth[1] - by_depth[max(by_depth)]) * 1e-3


class _Lane:
  """Blocks on the host, slots on the device, and what moves them."""

  def __init__(self, name: str, nbytes: int):
    device = jax.devices()[0]
    memory = None
    if name == 'cuda':
      runtime = cuda.Runtime(device)
      memory = pinned.RegisteredMemory(_BLOCKS, (nbytes,), _BYTES, runtime)
    rng = np.random.default_rng(0)

    def fill(key: int, out: np.ndarray) -> None:
      del key
      out[...] = np.frombuffer(rng.bytes(out.nbytes), np.uint8)

    store = host_store.HostStore.build(
      _BLOCKS, (nbytes,), _BYTES, fill, device, memory
    )
    self._pool = jax.block_until_ready(
      jnp.zeros((_BLOCKS, nbytes), _BYTES, device=device)
    )
    link = links.resolve(name, device, _BYTES, _BYTES)
    self._link = links.make(
      link, store, self._pool, device, time.perf_counter_ns
    )
    self._write: Callable[..., tuple[jax.Array, None]] = jax.jit(
      transfer.write_slots, donate_argnums=0
    )
    for size in transfer.BATCHES:  # compiles the slot writes
      for number in range(size):
        self._link.begin(number, number)
      while self._link.pending():
        self._take(size)
    jax.block_until_ready(self._pool)

  def run(self, depth: int, count: int) -> tuple[float, float]:
    """Seconds until `count` loads lie in their slots, and host seconds."""
    begun = landed = 0
    start = time.perf_counter()
    host = 0.0
    while landed < count:
      before = time.perf_counter()
      while begun < count and begun - landed < depth:
        self._link.begin(begun % _BLOCKS, begun % _BLOCKS)
        begun += 1
      self._link.flush()
      new = self._take(1)
      landed += new
      # Looking in vain is waiting, which an engine does for other things too.
      host += time.perf_counter() - before if new else 0.0
    jax.block_until_ready(self._pool)
    return time.perf_counter() - start, host

  def close(self) -> None:
    """Ends what moves the blocks."""
    self._link.close()

  def _take(self, least: int) -> int:
    """Writes what has arrived, once that is enough; how many it was."""
    moved = self._link.arrived()
    while 0 < len(moved) < least:
      moved += self._link.arrived()
    if any(m.fault for m in moved):
      raise ValueError(next(m.fault for m in moved if m.fault))
    largest = transfer.BATCHES[-1]
    staged = [m for m in moved if m.block is not None]
    for i in range(0, len(staged), largest):
      some = staged[i : i + largest]
      size = next(n for n in transfer.BATCHES if n >= len(some))
      some += [some[-1]] * (size - len(some))
      slots = np.array([m.slot for m in some], np.int32)
      blocks = [m.block for m in some]
      self._pool, _ = self._write(self._pool, slots, blocks)
    return len(moved)
