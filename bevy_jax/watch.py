"""Looks over an engine's shoulder while it runs, and knows the laws."""

from bevy_jax import engine, events, protocols, scripted
from bevy_jax.law import LawBroken, must
from bevy_jax.offload import slot_table


class Watch:
  """Looks over an engine's shoulder; raises where it breaks a law.

  Attributes:
    active: row of every request that has one.
    entering: requests whose prompts are on their way.
    finished: requests that have ended.
  """

  def __init__(
    self,
    found: engine.Engine,
    fake: scripted.Scripted,
    scheduler: protocols.Scheduler,
    bound: int,
  ):
    """Watches an engine from now on.

    Args:
      found: the engine.
      fake: its executor.
      scheduler: its scheduler.
      bound: loads that may begin while the most lagging request waits.
    """
    self._engine, self._scheduler, self._bound = found, scheduler, bound
    self._fake = fake
    self._seen, self._queued = 0, 0
    self._joined: dict[int, int] = {}
    self._at: dict[int, int] = {}
    self.active: dict[int, int] = {}
    self.entering: set[int] = set()
    self.finished: set[int] = set()
    self._starving: dict[tuple[int, int], int] = {}
    found.table.before_evict = self._on_evict
    found.table.before_load = self._on_load

  def step(self, submitted: int, rows: int) -> None:
    """One step of the engine; so many requests have been submitted."""
    was_entering = bool(self.entering)
    waited = list(self._engine.view.waiting)
    self._engine.step()
    self._engine.table.check_integrity()
    for event in self._engine.log[self._seen :]:
      self._on_event(event)
      if isinstance(event, events.LoadFailed):
        layer, expert = divmod(event.key, self._engine.table.experts)
        for p in set(waited) & set(self._engine.view.waiting):
          still = p.layer == layer and p.need >> expert & 1
          what = f'row {p.row} goes on waiting for a load that failed'
          must(not still, 'a failure ends who waits', what)
    self._seen = len(self._engine.log)
    view = self._engine.view
    if not was_entering and not self.entering:
      free = rows - len(self.active)
      queued = submitted - len(self.active) - len(self.finished)
      what = 'a row is free and somebody waits for it'
      must(not (free and queued), 'a row is given back', what)
    floor = min((p.position for p in view.waiting), default=0)
    now = {
      (p.request.number, p.position)
      for p in view.waiting
      if p.position == floor and view.floor == floor
    }
    self._starving = {k: self._starving.get(k, 0) for k in now}

  def _on_event(self, event: events.Event) -> None:
    if isinstance(event, events.Admitted):
      what = f'row {event.row} is given out twice'
      must(event.row not in self.active.values(), 'a row is given back', what)
      layers = len(self._engine.table.resident)
      floor = min(self._at.values(), default=0)
      joined = self._at[event.request] = floor // layers * layers
      self._joined[event.request] = joined
      self.active[event.request] = event.row
      self.entering.add(event.request)
    elif isinstance(event, events.Prefilled):
      self.entering -= set(event.requests)
    elif isinstance(event, events.Finished):
      row = self.active.pop(event.request)
      if event.request in self.entering:
        pair = int(event.detail.split()[0]), row
        what = f'the prompt of {event.request} did not need what failed'
        must(pair in self._fake.excused, 'it ends nobody else', what)
      self.entering.discard(event.request)
      self._at.pop(event.request, None)
      self.finished.add(event.request)
    elif isinstance(event, events.Routed):
      joined = self._joined.pop(event.request, event.position)
      what = f'request {event.request} joins at {event.position}, not {joined}'
      must(event.position == joined, 'who joins joins the last one', what)
      self._at[event.request] = event.position

  def _wants(self) -> list[protocols.Want]:
    wants = self._scheduler.wants(self._engine.view)
    prefill = self._engine._prefill
    if prefill is not None and prefill.layer >= 0:
      wave = self._engine._prefill_wave(prefill)
      wants.insert(0, protocols.Want(prefill.layer, wave))
      # Lockstep wants for the last ones alone; what others await is kept too.
      wants += [
        protocols.Want(p.layer, p.need) for p in self._engine.view.waiting
      ]
    return wants

  def _on_load(self, key: int) -> None:
    layer, expert = divmod(key, self._engine.table.experts)
    # Of this very step too, which `_on_event` has not seen yet.
    late = self._engine.log[self._seen :]
    over = {e.request for e in late if isinstance(e, events.Finished)}
    over |= self.finished
    view, prefill = self._engine.view, self._engine._prefill
    ghosts = over & {p.request.number for p in view.waiting}
    must(not ghosts, 'the finished load nothing', f'{ghosts} still wait')
    needs = [(p.layer, p.need) for p in view.waiting]
    if prefill is not None:
      chosen = {e for ids in prefill.choices for e in ids}
      mask = sum(1 << e for e in chosen)
      needs.append((prefill.layer, prefill.need & mask))
    else:
      for who in self._starving:
        self._starving[who] += 1
        if self._starving[who] > self._bound:
          what = (
            f'request {who[0]}, the most lagging, waits at position {who[1]} '
            f'while {self._starving[who]} loads begin'
          )
          raise LawBroken('no starvation', what)
    if not any(n >> expert & 1 for at, n in needs if at == layer):
      self._is_prefetch(layer, expert, needs)

  def _is_prefetch(
    self, layer: int, expert: int, needs: list[tuple[int, int]]
  ) -> None:
    loads, table = self._engine._loads, self._engine.table
    for row, guesses in enumerate(loads.guesses._of):
      left = self._engine._rows[row] is None
      what = f'row {row} is free'
      must(not (guesses and left), 'no guess outlives its row', what)
    expected = [n for at, n in loads.guesses.expected() if at == layer]
    here = f'expert {expert} of layer {layer}'
    asked = any(n >> expert & 1 for n in expected)
    must(asked, 'only the needed is loaded', f'nobody needs {here}')
    alone = self._engine._prefill is None
    must(alone, 'prompts before prefetch', f'{here} is loaded beside a prompt')
    missing = [n & ~table.resident[i] & ~table.loading[i] for i, n in needs]
    first = not any(missing)
    must(first, 'demand before prefetch', f'{here} comes before a demand')
    few = loads.in_flight < 2
    must(few, 'few prefetches in flight', f'a demand would wait behind {here}')

  def _on_evict(self, key: int) -> None:
    table, wants = self._engine.table, self._wants()
    first: dict[int, int] = {}
    serving = None
    # Whose experts could have made room instead.
    every = range(len(table.resident))
    layers = [key // table.experts] if table.quota else every
    for rank, (layer, experts) in enumerate(wants):
      away = experts & ~table.resident[layer] & ~table.loading[layer]
      away = away if layer in layers else 0
      serving = rank if away and serving is None else serving
      for expert in slot_table.bits(experts):
        first.setdefault(layer * table.experts + expert, rank)
    kept = {
      layer * table.experts + expert
      for layer, experts in self._engine._loads.guesses.kept()
      for expert in slot_table.bits(experts)
    }
    if serving is None:
      self._for_prefetch(key, kept)
      return
    behind = len(wants)  # A key that nobody wants is behind all wants.
    ranks = [
      first.get(layer * table.experts + expert, behind)
      for layer in layers
      for expert in slot_table.bits(table.evictable(layer))
    ]
    mine = first.get(key, behind)
    if key in kept and mine == behind:
      others = {
        layer * table.experts + expert
        for layer in layers
        for expert in slot_table.bits(table.evictable(layer))
      }
      unkept = others - kept - set(first)
      must(not unkept, 'a prefetch is kept for use', f'key {key} gives way')
    what = f'key {key} gives way, but another one would be missed less'
    must(mine == max(ranks), 'only the unwanted give way', what)
    what = f'key {key} gives way to somebody behind'
    must(mine > serving, 'nobody robs those before it', what)
    if self._engine._prefill is not None:
      self._spares_decode(key)

  def _for_prefetch(self, key: int, kept: set[int]) -> None:
    layer, expert = divmod(key, self._engine.table.experts)
    what = f'key {key} gives way'
    on = self._engine._loads.guesses.on
    must(on, 'only the unwanted give way', f'{what} for nothing')
    wanted = any(
      p.layer == layer and p.need >> expert & 1
      for p in self._engine.view.waiting
    )
    must(not wanted, 'no prefetch takes the wanted', f'{what}, somebody waits')
    spared = key not in kept
    must(spared, 'no prefetch takes the wanted', f'{what}, a fresh prefetch')

  def _spares_decode(self, key: int) -> None:
    view, table = self._engine.view, self._engine.table
    prefill = self._engine._prefill
    assert prefill is not None
    every = range(len(table.resident))
    layers = [prefill.layer] if table.quota else every
    awaited = {
      p.layer * table.experts + e
      for p in view.waiting
      for e in slot_table.bits(p.need if p.layer in layers else 0)
    }
    busy = {
      layer * table.experts + e
      for layer in layers
      for e in slot_table.bits(table.loading[layer] | table.reading[layer])
      if layer != prefill.layer or not prefill.need >> e & 1
    }
    room = view.room(prefill.layer) - len(awaited | busy)
    avoidable = room >= self._engine._model.top_k
    robbed = key in awaited and avoidable
    what = f'key {key}, which is awaited, gives way to a prompt'
    must(not robbed, 'prefill spares decode', what)
