"""The processes of runs with faults, and their store."""

from __future__ import annotations

import os
import pathlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import workers

from optax_dist.coordinator.store import process as store_process


class Pool:
  """Processes, and one store for all runs.

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
    self._store: store_process.StoreProcess | None = None
    self.secret = secrets.token_hex()

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, *exception: object) -> None:
    for process in list(self._everyone):
      self.discard(process)
    if self._store is not None:
      self._store.stop()

  def address(self) -> str:
    """The address of the store; of a new one if it has died."""
    if self._store is not None and self.store_died():
      self._store.stop()
      self._store = None
    if self._store is None:
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
