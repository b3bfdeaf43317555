"""The processes of runs with faults, and their coordinator."""

from __future__ import annotations

import os
import pathlib
import secrets
import signal
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import workers

from optax_dist.coordinator.server import process as server


class Pool:
  """Processes, and one coordinator for all runs.

  A context manager; no process is left when it exits.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    program: Callable[..., None],
    method: workers.Method = "spawn",
    **settings: Any,
  ):
    """Sets what the processes run.

    Args:
      folder: an existing folder for journals and outputs.
      program: see `workers.Worker`.
      method: how processes are started.
      **settings: of `jax.config`, in the processes.
    """
    self.folder, self._program, self._method = folder, program, method
    self._settings = {
      "jax_platforms": os.environ.get("JAX_PLATFORMS", "cpu"),
      "jax_num_cpu_devices": 1,
      # Processes are killed all the time: their successors need not compile.
      "jax_compilation_cache_dir": str(folder / "compiled"),
      "jax_persistent_cache_min_compile_time_secs": 0.0,
      **settings,
    }
    self._everyone: list[workers.Worker] = []
    self._coordinator: server.CoordinatorProcess | None = None
    self._log, self._killed = folder, False
    self.secret = secrets.token_hex()

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, *exception: object) -> None:
    for process in list(self._everyone):
      self.discard(process)
    self._end_coordinator()

  def address(self) -> str:
    """The address of the coordinator; it is started again if it was killed.

    Raises:
      RuntimeError: it has died by itself.
    """
    if self._coordinator is None:
      # None continues what an earlier one has written.
      new = tempfile.mkdtemp(prefix="coordinator-", dir=self.folder)
      self._log = pathlib.Path(new, "coordinator.log")
      self._coordinator = self._start_coordinator(0)
    elif self._coordinator.process.poll() is not None:
      if not self._killed:
        code = self._coordinator.process.returncode
        self._end_coordinator()
        raise RuntimeError(f"the coordinator has ended with exit code {code}")
      port = int(self._coordinator.address.rpartition(":")[2])
      self._coordinator.stop()
      self._coordinator = self._start_coordinator(port)
    return self._coordinator.address

  def kill_coordinator(self) -> None:
    """Kills the coordinator, also one that is stopped; see `address`."""
    assert self._coordinator is not None
    self._killed = True
    self._coordinator.kill()

  def signal_coordinator(self, number: int) -> None:
    """Sends the coordinator a signal; no effect if it has died."""
    assert self._coordinator is not None
    self._coordinator.process.send_signal(number)

  def cut_power(self, lost: int) -> None:
    """Kills the coordinator as the end of its host does: its logs lack the end.

    Args:
      lost: bytes that were not on the disk yet.
    """
    self.kill_coordinator()
    for log in self._log.parent.glob(f"{self._log.name}*"):
      if log.suffix != ".lock":
        os.truncate(log, max(0, log.stat().st_size - lost))

  def lose_coordinator(self) -> None:
    """Kills the coordinator for good: `address` is that of another one then."""
    self.kill_coordinator()
    self._end_coordinator()

  def _start_coordinator(self, port: int) -> server.CoordinatorProcess:
    self._killed = False
    return server.start(self.secret.encode(), port=port, log=self._log)

  def _end_coordinator(self) -> None:
    if self._coordinator is not None:
      self._coordinator.process.send_signal(signal.SIGCONT)
      self._coordinator.stop()
    self._coordinator = None

  def start(
    self, name: str, job: Mapping[str, Any], log: pathlib.Path, host: str = ""
  ) -> workers.Worker:
    """Starts a process; see `workers.Worker`."""
    process = workers.Worker(
      name,
      self._program,
      job,
      log,
      method=self._method,
      host=host,
      **self._settings,
    )
    self._everyone.append(process)
    return process

  def discard(self, process: workers.Worker) -> bool:
    """Kills a process; returns whether it has left others."""
    if process in self._everyone:
      self._everyone.remove(process)
    return process.kill()
