"""How fast link and device have lately been, as a schedule may know it."""

_KEPT = 0.98  # Of what was seen, by one more launch.
_NEW = 0.1  # Weight of one more load.
_FEW = 0.05  # Of a squared mean: less variance than this tells no slope.
_LATE = 4.0  # So many times the usual is something else than a load.


class Pace:
  """Times measured while the run goes on; the engine alone changes it.

  Nothing is known of the machine beforehand: all is 0 until something has
  been seen. Every time is that of an event, never a look at the clock, so
  that a recorded run makes the same decisions again. All in nanoseconds.

  Attributes:
    now: when the last thing happened; 0 where nothing has since an idle time.
    load: link time of one load.
    fixed: what a launch costs whatever it does.
    expert: what a launch costs for each expert that it reads.
    head: what a launch through the last layer costs beside that: head and
      sampling, which every group that comes there apart pays once more.
    device: device time of a launch.
    loads: loads that a launch's answer makes necessary.
    alone: what a load takes from issue to landing that waits for no other.
    late: whether loads are bound late; see `depth`.
    heads: whether launches through the last layer are measured apart.
  """

  def __init__(self) -> None:
    self.now = 0
    self.load = self.fixed = self.expert = self.device = self.loads = 0.0
    self.alone = self.head = 0.0
    self.late = self.heads = True
    self._landed = self._ended = 0
    self._lone = -1  # Key of a load that began on an idle link.
    self._begun: dict[int, tuple[int, int, bool]] = {}
    self._waves = 0.0  # Device time of waves since the last whole launch.
    self._issued: dict[int, int] = {}
    self._weight = self._apart = 0.0
    self._sums = [0.0, 0.0, 0.0, 0.0]  # Of n, t, n * n, n * t.

  @property
  def balance(self) -> float:
    """Device time over link time that a launch takes: above 1 device-bound."""
    link = self.load * self.loads
    return self.device / link if link else float('inf')

  @property
  def link_free(self) -> float:
    """When the link will have done what it has; `now` where it is idle."""
    if not self._issued:
      return self.now
    first = max(self._landed, min(self._issued.values()))
    return max(self.now, first + self.load * len(self._issued))

  @property
  def device_free(self) -> float:
    """Likewise of the device."""
    if not self._begun:
      return self.now
    begun = self._begun.values()
    first, cost = min([start for start, _, _ in begun]), 0.0
    for _, experts, last in begun:
      cost += self.cost(experts) + self.head * last
    return max(self.now, max(self._ended, first) + cost)

  @property
  def depth(self) -> float:
    """Loads that keep the link busy; infinite while nothing is known.

    One that is on it, and as many behind as it carries until the engine looks
    again, which may take a launch; more where a load alone takes longer than
    one behind others, since then several are under way at once.
    """
    if not (self.late and self.load and self.device):
      return float('inf')
    return max(2.0, (max(self.alone, self.load) + self.device) / self.load)

  @property
  def clear(self) -> float:
    """Layers between two that ask for a load; infinite where none does."""
    return 1 / self.loads if self.loads else float('inf')

  def cost(self, experts: float) -> float:
    """Device time of a launch that reads so many experts."""
    return self.fixed + self.expert * experts

  def pause(self) -> None:
    """Nothing is going on: what comes next is not late."""
    self.now = 0

  def load_issued(self, key: int) -> None:
    """A load begins."""
    if not self._issued:
      self._lone = key
    self._issued[key] = self.now

  def load_ended(self, time: int, key: int) -> None:
    """A load is over; what it waited for others does not count."""
    begun, usual = self._issued.pop(key, 0), self.load
    before = self._landed
    took = float(time - (begun if begun > before else before))
    self._landed = time
    if not begun or took <= 0:
      return
    if key == self._lone:
      lone = min(took, _LATE * usual) if usual else took
      self.alone += (lone - self.alone) * (_NEW if self.alone else 1.0)
    if not usual:
      self.load = took
    elif took < _LATE * usual:
      self.load += (took - usual) * _NEW
    else:
      self.load += (_LATE - 1) * usual * _NEW

  def launch_begun(self, number: int, experts: int, last: bool = False) -> None:
    """A decode launch begins; whether it comes through the last layer."""
    self._begun[number] = self.now, experts, last and self.heads

  def wave_ended(self, time: int, number: int, began: int = -1) -> None:
    """A wave is over: device time of the launch that will finish it."""
    begun, _, _ = self._begun.pop(number)
    took = float(time - max(self._ended, begun, began))
    self._ended = time
    if begun and took > 0:
      self._waves += min(took, _LATE * self.device) if self.device else took

  def launch_ended(
    self,
    time: int,
    number: int,
    loads: int,
    began: int = -1,
    hops: int = 1,
    read: int = 0,
  ) -> None:
    """A decode launch is over and its answer asks for so many loads.

    `began` is when the device turned to it, -1 where nobody can tell. It
    might cross `hops` layers and read so many experts behind the first of
    them: it counts as the mean of so many launches. One through the last
    layer tells of the head, by what it takes longer than others.
    """
    begun, first, last = self._begun.pop(number)
    took = float(time - max(self._ended, begun, began))
    self._ended = time
    waves, self._waves = self._waves, 0.0
    if not begun or took <= 0:
      return
    n = (first + read) / hops
    if last and self.device:
      more = max(0.0, took - self.cost(n) * hops)
      took -= more
      more = min(more, _LATE * self.head) if self.head else more
      self.head += (more - self.head) * (_NEW if self.head else 1.0)
      waves += more / hops
    took /= hops
    took = min(took, _LATE * self.device) if self.device else took
    self._weight = self._weight * _KEPT + 1.0
    sums = self._sums
    sums[0] = sums[0] * _KEPT + n
    sums[1] = sums[1] * _KEPT + took
    sums[2] = sums[2] * _KEPT + n * n
    sums[3] = sums[3] * _KEPT + n * took
    share = 1.0 / self._weight
    self.loads += (loads / hops - self.loads) * share
    self._apart += (waves - self._apart) * share
    self._fit(
      sums[0] * share, sums[1] * share, sums[2] * share, sums[3] * share
    )

  def _fit(self, n: float, t: float, nn: float, nt: float) -> None:
    """A line through what was seen, neither part below 0."""
    self.device = t + self._apart
    variance = nn - n * n
    slope = (nt - n * t) / variance if variance > _FEW * n * n else 0.0
    slope = min(max(slope, 0.0), t / n if n else 0.0)
    self.expert, self.fixed = slope, t - slope * n
