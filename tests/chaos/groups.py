"""Multi-process replicas on loopback, for fault injection.

If a process ends, `Groups` ends its replica, and starts it again as a whole.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import workers

from tests.chaos import group_process
from tests.chaos.members import Member, Members
from tests.chaos.pool import Pool

DEADLINE = 120.0


class Groups:
  """Multi-process replicas, and their coordinator; a context manager.

  Attributes:
    members: all processes that were started.
    live: the processes of the last start of each replica.
    journal: the file.
    restarts: whether a replica is restarted after losing a process.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    replicas: int = 2,
    processes: int = 2,
    name: str = "run",
    method: workers.Method = "spawn",
    **job: Any,
  ):
    """Configures the replicas; `start` starts them.

    Args:
      folder: folder for outputs.
      replicas: number of replicas.
      processes: processes of each replica.
      name: of the run and its folder.
      method: how processes are started; see `workers`.
      **job: settings for the processes; see `group_process`.
    """
    self._pool = Pool(
      folder,
      group_process.main,
      method,
      jax_cpu_collectives_implementation="gloo",
      # Of programs of several processes only one would keep them.
      jax_compilation_cache_dir=None,
    )
    self.members = Members(self._pool, name)
    self.journal = self.members.folder / "journal.jsonl"
    self._processes = processes
    self.job = {
      "width": 60,
      "target": 8,
      "saves": str(self.members.folder),
      "processes": processes,
      **job,
    }
    self._join = {
      "total_num_replicas": replicas,
      "lower_on_loss": True,
      "start_coordinator": False,
      "journal": str(self.journal),
      # Kills are detected immediately; a busy machine is not a fault.
      "timeout": 100.0,
      "transfer_timeout": 10.0,
      "silence_timeout": 10.0,
      **self.job.pop("join", {}),
    }
    self.live: dict[int, list[Member]] = {}
    self.restarts = True

  def __enter__(self) -> Groups:
    return self

  def __exit__(self, *error: object) -> None:
    self._pool.__exit__()

  def start(
    self, replica: int, faults: Mapping[int, Mapping[str, Any]] | None = None
  ) -> list[Member]:
    """Starts all processes of a replica.

    Args:
      replica: its index.
      faults: by process index: the phase in which it is killed, and at which
        occurrence of it.
    """
    join = {**self._join, "coordinator_address": self._pool.address()}
    job = {**self.job, "join": join}
    self.live[replica] = group = [
      self.members.add(
        replica, {**job, "fault": (faults or {}).get(rank)}, rank
      )
      for rank in range(self._processes)
    ]
    for one in group:
      # By itself, or with its replica.
      one.doomed = True
    return group

  def wait(
    self, ready: Callable[[], Any], what: str, seconds: float = DEADLINE
  ) -> None:
    """Waits until a condition is true, or raises `members.Stuck`."""

    def checked() -> bool:
      for replica, group in list(self.live.items()):
        if any(one.killed for one in group) and not any(
          one.result for one in group
        ):
          self.kill(replica)
          if self.restarts:
            self.start(replica)
      return ready()

    self.members.wait(checked, what, seconds)

  def run(self, seconds: float = DEADLINE) -> list[Member]:
    """Waits until all running processes have reported their results."""
    everyone = lambda: [one for group in self.live.values() for one in group]
    done = lambda: all(one.result is not None for one in everyone())
    self.wait(done, "not all replicas have come to the end", seconds)
    return everyone()

  def finish(self) -> None:
    """Ends the run after the next steps."""
    self.tell("finish", *self.live)

  def tell(self, what: str, *replicas: int) -> None:
    """Sends replicas an order before their next steps: "save" or "finish"."""
    for replica in replicas:
      for one in self.live[replica][:1]:  # It decides for all.
        one.process.send(do=what)

  def kill_coordinator(self) -> None:
    """Kills the coordinator, and starts it again from its log."""
    self._pool.kill_coordinator()
    self._pool.address()

  def kill(self, replica: int) -> None:
    """Kills the running processes of a replica."""
    for one in self.live[replica]:
      self.members.kill(one)


def compare(members: Iterable[Member]) -> tuple[int, list[int]]:
  """Compares the states of corresponding processes after each step.

  Args:
    members: the processes of all replicas, including those that died.

  Returns:
    How many fingerprints at least two have, and the steps at which some differ.
  """
  result: dict[tuple[int, int], list[str]] = {}
  for one in members:
    last = (one.result or {}).get("prints", {})
    seen = {e["step"]: e["print"] for e in (*one.said("joined"), *one.steps)}
    for step, digest in (seen | last).items():
      result.setdefault((one.rank, step), []).append(digest)
  shared = sum(len(some) > 1 for some in result.values())
  apart = {step for (_, step), some in result.items() if len(set(some)) > 1}
  return shared, sorted(apart)
