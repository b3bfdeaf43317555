"""Pre-started processes for runs of the fault matrix."""

from __future__ import annotations

import os
import pathlib
import secrets
import sys

import logged_child

from optax_dist.coordinator.launch import child, watcher
from optax_dist.coordinator.store import process as store_process
from tests.chaos.cases import REPLICAS

# A process is replaced after this many runs.
_RUNS_EACH = 25


class Pool:
  """Pre-started processes, and one store for all runs.

  A context manager; no process is left when it exits.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    module: str = "tests.chaos.replica",
    ready: int = REPLICAS,
  ):
    """Sets an existing folder for journals and outputs.

    Args:
      folder: the folder.
      module: what the processes run.
      ready: how many processes wait for a job.
    """
    self.folder, self._module, self._ready = folder, module, ready
    # Marks the processes, to find any that are left over.
    self.token = secrets.token_hex(8)
    self._idle: list[child.Child] = []
    self._runs: dict[int, int] = {}
    self._started = 0
    self._everyone: list[child.Child] = []
    self._store: store_process.StoreProcess | None = None
    self.secret = secrets.token_hex()

  def __enter__(self) -> Pool:
    self._store = store_process.start(self.secret.encode(), port=0)
    for _ in range(self._ready + 2):
      self._start()
    return self

  def __exit__(self, *exception: object) -> None:
    for process in self._everyone:
      process.kill()
    if self._store is not None:
      self._store.stop()

  @property
  def address(self) -> str:
    """The address of the store; of a new one if it has died."""
    assert self._store is not None
    if self._store.process.poll() is not None:
      self._store.stop()
      self._store = store_process.start(self.secret.encode(), port=0)
    return self._store.address.partition(",")[0]

  def kill_store(self) -> None:
    """Kills the store; `address` is that of another one then."""
    assert self._store is not None
    self._store.process.kill()
    self._store.process.wait()

  def store_died(self) -> bool:
    """Whether the store has died."""
    assert self._store is not None
    return self._store.process.poll() is not None

  def _start(self) -> None:
    self._started += 1
    process = logged_child.LoggedChild(
      f"process {self._started}",
      [sys.executable, "-m", self._module],
      self.folder / f"process-{self._started}.log",
      {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OPTAX_DIST_CHAOS": self.token,
      },
    )
    self._everyone.append(process)
    self._idle.append(process)

  def take(self) -> child.Child:
    """Takes a process that waits for a job."""
    self.top_up()
    for process in list(self._idle):
      if process.popen.poll() is not None:
        self._idle.remove(process)
    if not self._idle:
      self._start()
    return self._idle.pop(0)

  def top_up(self) -> None:
    """Starts processes for future runs."""
    while len(self._idle) < self._ready:
      self._start()

  def give_back(self, process: child.Child) -> None:
    """Keeps a process for the next run, unless it has ended or had many."""
    made = self._runs[process.pid] = self._runs.get(process.pid, 0) + 1
    if process.popen.poll() is None and made < _RUNS_EACH:
      self._idle.append(process)
    else:
      self.discard(process)

  def discard(self, process: child.Child) -> None:
    """Kills a process."""
    process.kill()
    self._everyone.remove(process)

  def orphans(self) -> list[int]:
    """Processes of this pool that still run though they were discarded."""
    known = {process.pid for process in self._everyone}
    return [pid for pid in living(self.token) if pid not in known]


def living(token: str) -> list[int]:
  """The processes with a run's token in their environment."""
  return watcher.having("OPTAX_DIST_CHAOS", token)
