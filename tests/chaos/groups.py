"""Launches multi-process replicas on loopback, for fault injection.

If a process ends, `Groups` ends its replica, and starts it again as a whole.
"""

from __future__ import annotations

import pathlib
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import workers

from optax_dist.coordinator.store import process as store_process
from optax_dist.coordinator.transport import addresses
from tests.chaos import group_process

DEADLINE = 120.0
_OLDER = 200  # Steps whose members are remembered.


class Stuck(RuntimeError):
  """A condition did not become true; the message says where each process is."""


class Process:
  """The launcher's view of a process of a replica.

  Attributes:
    process: the process.
    replica: its replica's index.
    rank: its index in the replica.
    incarnation: how often the replica was started before.
    events: its messages, except for all but the last steps.
    prints: its fingerprint after each step.
    result: its last message; None so far.
    ended_at: when it ended; None if it is running.
  """

  def __init__(
    self, process: workers.Worker, replica: int, rank: int, incarnation: int
  ):
    self.process, self.replica, self.rank = process, replica, rank
    self.incarnation = incarnation
    self.events: list[workers.Event] = []
    self.prints: dict[int, str] = {}
    self.result: workers.Event | None = None
    self.ended_at: float | None = None
    self._steps: list[workers.Event] = []

  def take(self, events: list[workers.Event]) -> None:
    """Adds new messages."""
    for event in events:
      if event["event"] in ("begun", "step"):
        self.prints[event["step"]] = event["print"]
      if event["event"] == "step":
        self._steps = [*self._steps[-_OLDER:], event]
      else:
        self.events.append(event)
      if event["event"] == "result":
        self.result = event

  def said(self, event: str) -> list[workers.Event]:
    """Its messages of this kind."""
    if event == "step":
      return list(self._steps)
    return [e for e in self.events if e["event"] == event]

  def steps_of(self, *members: int, after: float = 0.0) -> list[workers.Event]:
    """Those of its last steps that had exactly these members."""
    return [
      e
      for e in self._steps
      if e["members"] == list(members) and e["at"] > after
    ]

  @property
  def step(self) -> int:
    """Its last step; -1 before the first."""
    return self._steps[-1]["step"] if self._steps else -1

  @property
  def is_leader(self) -> bool:
    """Whether it was the leader after its last step."""
    return bool(self._steps and self._steps[-1]["leader"])

  def __str__(self) -> str:
    return f"process {self.rank} of replica {self.replica}.{self.incarnation}"


class Groups:
  """Multi-process replicas, and one store; a context manager.

  Attributes:
    everyone: all processes that were started.
    live: the processes of the last start of each replica.
    restarts: whether a replica is restarted after losing a process.
    left: processes that have left others behind.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    replicas: int = 2,
    processes: int = 2,
    method: workers.Method = "spawn",
    **job: Any,
  ):
    """Configures the replicas; `start` starts them.

    Args:
      folder: folder for outputs.
      replicas: number of replicas.
      processes: processes of each replica.
      method: how processes are started; see `workers`.
      **job: settings for the processes; see `group_process`.
    """
    self.folder, self.replicas, self.processes = folder, replicas, processes
    self._method = method
    self.job = {"width": 60, "target": 8, "saves": str(folder), **job}
    self.join = {
      "total_num_replicas": replicas,
      "lower_on_loss": True,
      # Kills are detected immediately; a busy machine is not a fault.
      "timeout": 100.0,
      "attempt_timeout": 10.0,
      "leader_timeout": 10.0,
      **self.job.pop("join", {}),
    }
    self.everyone: list[Process] = []
    self.live: dict[int, list[Process]] = {}
    self.restarts = True
    self.left: list[Process] = []
    self.secret = secrets.token_hex()
    self._store: store_process.StoreProcess | None = None

  def __enter__(self) -> Groups:
    self._store = store_process.start(
      self.secret.encode(), port=0, timeout=60.0
    )
    return self

  def __exit__(self, *error: object) -> None:
    for one in self.everyone:
      self._end(one)
    if self._store is not None:
      self._store.stop()

  def start(
    self, replica: int, faults: Mapping[int, Mapping[str, Any]] | None = None
  ) -> list[Process]:
    """Starts all processes of a replica.

    Args:
      replica: its index.
      faults: by process index: the phase in which it is killed, and at which
        occurrence of it.
    """
    assert self._store is not None
    (port,) = addresses.free_ports()
    meet = f"127.0.0.1:{port}"
    incarnation = sum(
      p.replica == replica and p.rank == 0 for p in self.everyone
    )
    group = []
    for rank in range(self.processes):
      number = len(self.everyone) + rank
      one = workers.Worker(
        f"process {rank} of replica {replica}",
        group_process.main,
        {
          "job": {
            **self.job,
            "meet": meet,
            "processes": self.processes,
            "process": rank,
            "replica": replica,
            "incarnation": incarnation,
            "fault": dict((faults or {}).get(rank, {})) or None,
            "join": {
              **self.join,
              "coordinator_address": self._store.address.partition(",")[0],
              "secret": self.secret,
            },
          }
        },
        self.folder / f"process-{number}.log",
        method=self._method,
        jax_platforms="cpu",
        jax_num_cpu_devices=1,
        jax_cpu_collectives_implementation="gloo",
      )
      group.append(Process(one, replica, rank, incarnation))
    self.everyone += group
    self.live[replica] = group
    return group

  def wait(
    self, ready: Callable[[], Any], what: str, seconds: float = DEADLINE
  ) -> None:
    """Waits until a condition is true.

    Raises:
      Stuck: it did not become true in time.
    """
    end = time.monotonic() + seconds
    while not ready():
      if time.monotonic() > end:
        raise Stuck(f"{what} in {seconds:g} s\n{self.where()}")
      self._look()

  def run(self, seconds: float = DEADLINE) -> list[Process]:
    """Waits until all running processes have reported their results."""
    everyone = lambda: [p for group in self.live.values() for p in group]
    done = lambda: all(p.result is not None for p in everyone())
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

  def kill(self, replica: int) -> None:
    """Kills the running processes of a replica."""
    for one in self.live[replica]:
      self._end(one)

  def where(self) -> str:
    """The last output of all relevant processes."""
    found = [p for group in self.live.values() for p in group]
    return "\n".join(
      f"--- {p}, step {p.step}, {p.process.ending()}" for p in found
    )

  def _look(self) -> None:
    live = {p.process.pid: p for p in self.everyone if p.ended_at is None}
    processes = [p.process for p in live.values()]
    for process in workers.wait_for_messages(processes, 0.1):
      one = live[process.pid]
      events, ended = process.read()
      one.take(events)
      if ended:
        one.ended_at = time.time()
        if one.result is None:
          self._lost(one)

  def _end(self, one: Process) -> None:
    one.ended_at = one.ended_at or time.time()
    if one.process.kill():
      self.left.append(one)

  def _lost(self, one: Process) -> None:
    group = self.live[one.replica]
    if one not in group:
      return
    for other in group:
      other.process.signal(signal.SIGKILL)
    if self.restarts:
      self.start(one.replica)


def compare(processes: list[Process]) -> tuple[int, list[int]]:
  """Compares the states of corresponding processes after each step.

  Args:
    processes: the processes of all replicas, including those that died.

  Returns:
    How many fingerprints at least two have, and the steps at which some differ.
  """
  shared, apart = 0, set()
  for rank in {p.rank for p in processes}:
    by_step: dict[int, list[str]] = {}
    for one in processes:
      if one.rank != rank:
        continue
      last = (one.result or {}).get("prints", {})
      seen = one.prints | {int(step): digest for step, digest in last.items()}
      for step, digest in seen.items():
        by_step.setdefault(step, []).append(digest)
    for step, found in by_step.items():
      shared += len(found) > 1
      if len(set(found)) > 1:
        apart.add(step)
  return shared, sorted(apart)
