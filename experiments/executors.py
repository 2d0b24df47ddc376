"""Who runs the tasks of a sweep: this process, some beside it, or a cluster."""

import concurrent.futures
import gc
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

NAMES = ('local', 'ray')
Tasks = Sequence[tuple[Any, ...]]


class Executor(Protocol):
  """Maps tasks over workers."""

  def each(
    self, work: Callable[..., Any], tasks: Tasks
  ) -> Iterator[tuple[int, Any]]:
    """The number of each task and `work(*task)`, as they come.

    What a task raises is raised here. When the caller stops early, whether by
    Ctrl-C or not, tasks that run are dropped.
    """
    ...


class Local(NamedTuple):
  """Processes of this machine.

  Attributes:
    jobs: how many; 1 for this very process.
  """

  jobs: int = 2

  def each(
    self, work: Callable[..., Any], tasks: Tasks
  ) -> Iterator[tuple[int, Any]]:
    """See `Executor`."""
    if self.jobs == 1:
      yield from ((n, work(*task)) for n, task in enumerate(tasks))
      return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context('spawn')
    with concurrent.futures.ProcessPoolExecutor(
      self.jobs, mp_context=context, initializer=_quiet
    ) as pool:
      numbers = {pool.submit(work, *task): n for n, task in enumerate(tasks)}
      try:
        for future in concurrent.futures.as_completed(numbers):
          yield numbers[future], future.result()
      except BaseException:
        for future in numbers:
          future.cancel()
        for child in set(multiprocessing.active_children()) - others:
          child.terminate()
        raise


class Ray(NamedTuple):
  """A Ray cluster, or one started here for the time of the sweep.

  Attributes:
    address: of a cluster; empty for what RAY_ADDRESS says, and where that
      says nothing for one of our own.
    jobs: processors of our own one.
  """

  address: str = ''
  jobs: int = 2

  def each(
    self, work: Callable[..., Any], tasks: Tasks
  ) -> Iterator[tuple[int, Any]]:
    """See `Executor`; ValueError where ray or the cluster is missing."""
    ray = _ray()
    address = self.address or os.environ.get('RAY_ADDRESS', '')
    settings: dict[str, Any] = {}
    if not address:
      settings = {'num_cpus': self.jobs, 'include_dashboard': False}
    else:
      _answers(address)
    try:
      ray.init(
        address or 'local',
        log_to_driver=False,
        logging_level='ERROR',
        **settings,
      )
    except ConnectionError as error:
      raise ValueError(
        f'the Ray cluster at {address or "this machine"} does not let us in: '
        f'{error} If it asks for a token, set RAY_AUTH_MODE=token and the '
        'token as the documentation of Ray has it.'
      ) from error
    try:
      remote = ray.remote(_call)
      waiting = {remote.remote(work, task): n for n, task in enumerate(tasks)}
      while waiting:
        ready, _ = ray.wait(list(waiting))
        for reference in ready:
          yield waiting.pop(reference), _result(ray, reference)
    finally:
      ray.shutdown()  # What still runs is dropped, a cluster of ours ends.


def make(name: str, jobs: int, address: str = '') -> Executor:
  """The executor of a name in `NAMES`; ValueError where ray is missing."""
  if name == 'ray':
    _ray()
    return Ray(address, jobs)
  if address:
    raise ValueError('--address is of a Ray cluster; add --executor=ray.')
  return Local(jobs)


def _ray() -> Any:
  try:
    import ray  # Takes a second, and few have it.
  except ImportError as error:
    raise ValueError(
      '--executor=ray needs the extra `ray`: pip install "bevy-jax[ray]".'
    ) from error
  return ray


def _answers(address: str) -> None:
  """ValueError where nobody listens; Ray itself would try for minutes."""
  host, colon, port = address.rpartition(':')
  if '//' in address or not (colon and port.isdigit()):
    return  # A client's address, or a word of Ray's such as 'auto'.
  try:
    socket.create_connection((host, int(port)), timeout=5).close()
  except OSError as error:
    raise ValueError(
      f'no Ray cluster answers at {address} ({error}); start one (ray start '
      '--head), give its --address, or leave it out for one of our own.'
    ) from error


def _result(ray: Any, reference: Any) -> Any:
  """A task's result, or its own error without Ray's traceback as text."""
  try:
    return ray.get(reference)
  except ray.exceptions.RayTaskError as error:
    raise error.cause from None


def _call(work: Callable[..., Any], task: tuple[Any, ...]) -> Any:
  gc.disable()  # As in `_quiet`.
  return work(*task)


def _quiet() -> None:
  """A worker leaves Ctrl-C to its parent.

  A log is many small objects without a cycle: to look for one takes time.
  """
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  gc.disable()
