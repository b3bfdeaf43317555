"""Runs of replicas with several processes each, on loopback.

`Groups` is their launcher: a process that ends takes its replica with it, and
the replica is started again as a whole.
"""

import os
import pathlib
import secrets
import select
import signal
import sys
import time

from optax_dist.coordinator.launch import child
from optax_dist.coordinator.store import process as store_process

DEADLINE = 120.0
_HERE = pathlib.Path(__file__).parent
_PROGRAM = str(_HERE / "group_process.py")
sys.path.insert(0, str(_HERE.parent / "processes"))


class Process:
  """A process of a replica, as its launcher sees it."""

  def __init__(self, process, replica, rank, incarnation):
    self.process, self.replica, self.rank = process, replica, rank
    self.incarnation = incarnation
    self.events, self.result, self.ended_at = [], None, None

  def said(self, event):
    """What it has said of this kind."""
    return [e for e in self.events if e["event"] == event]

  @property
  def step(self):
    steps = self.said("step")
    return steps[-1]["step"] if steps else -1

  def __str__(self):
    return f"process {self.rank} of replica {self.replica}.{self.incarnation}"


class Groups:
  """Replicas of several processes, and one store; a context manager."""

  def __init__(self, folder, replicas=2, processes=2, devices=1, **job):
    self.folder, self.replicas, self.processes = folder, replicas, processes
    self.devices = devices
    self.job = {"width": 60, "target": 8, **job}
    self.join = {
      "total_num_replicas": replicas,
      "lower_on_loss": True,
      # Kills are noticed at once; a machine that is busy is not a fault.
      "timeout": 100.0,
      "attempt_timeout": 10.0,
      "leader_timeout": 10.0,
      **self.job.pop("join", {}),
    }
    self.everyone, self.live = [], {}
    self.restarts = True
    self.secret = secrets.token_hex()

  def __enter__(self):
    self.store = store_process.start(self.secret.encode(), port=0, timeout=60.0)
    return self

  def __exit__(self, *error):
    for one in self.everyone:
      one.process.kill()
    self.store.stop()

  def start(self, replica, faults=None):
    """Starts all processes of a replica; `faults` by their ranks."""
    import launch

    port = launch.free_port()
    incarnation = sum(
      p.replica == replica and p.rank == 0 for p in self.everyone
    )
    group = []
    for rank in range(self.processes):
      one = child.Child(
        f"process {rank} of replica {replica}",
        [sys.executable, _PROGRAM],
        self.folder / f"process-{len(self.everyone) + rank}.log",
        {
          "JAX_PLATFORMS": "cpu",
          "JAX_NUM_CPU_DEVICES": str(self.devices),
          "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
          "PYTHONPATH": os.pathsep.join(
            [str(_HERE.parent / "processes"), *filter(None, sys.path)]
          ),
          "OPTAX_DIST_SECRET": self.secret,
        },
      )
      one.send(
        {
          **self.job,
          "port": port,
          "processes": self.processes,
          "process": rank,
          "replica": replica,
          "fault": (faults or {}).get(rank),
          "join": {
            **self.join,
            "coordinator_address": self.store.address.partition(",")[0],
          },
        }
      )
      group.append(Process(one, replica, rank, incarnation))
    self.everyone += group
    self.live[replica] = group
    return group

  def wait(self, ready, what, seconds=DEADLINE):
    """Waits until something has come about, or fails with who is where."""
    end = time.monotonic() + seconds
    while not ready():
      assert time.monotonic() < end, f"{what}\n{self.where()}"
      self._look()

  def run(self, seconds=DEADLINE):
    """Waits until all replicas have the result."""
    done = lambda: all(
      p.result is not None for group in self.live.values() for p in group
    )
    self.wait(done, "not all replicas have come to the end", seconds)
    return [p for group in self.live.values() for p in group]

  def finish(self):
    """Has the run end after the next steps."""
    for group in self.live.values():
      for one in group:
        one.process.send({"do": "finish"})

  def kill(self, replica):
    """Ends what lives of a replica."""
    for one in self.live[replica]:
      one.process.kill()
      one.ended_at = one.ended_at or time.time()

  def _look(self):
    live = {p.process.pid: p for p in self.everyone if p.ended_at is None}
    found, _, _ = select.select([p.process for p in live.values()], [], [], 0.1)
    for process in found:
      one = live[process.pid]
      events, ended = process.read()
      one.events += events
      one.result = next(iter(one.said("result")), None)
      if ended:
        one.ended_at = time.time()
        if one.result is None:
          self._lost(one)

  def _lost(self, one):
    group = self.live[one.replica]
    if one not in group:
      return
    for other in group:
      other.process.signal(signal.SIGKILL)
    if self.restarts:
      self.start(one.replica)

  def where(self):
    return "\n".join(
      f"--- {p}, step {p.step}, {p.process.ending()}\n{p.process.tail(40)}"
      for p in self.everyone
    )


def check_equal(processes):
  """Like holds what like holds, at all steps that both have seen."""
  shared = 0
  for rank in {p.rank for p in processes}:
    by_step = {}
    for one in processes:
      if one.rank == rank:
        for step, digest in one.result["prints"].items():
          by_step.setdefault(step, set()).add(digest)
    assert all(len(found) == 1 for found in by_step.values()), by_step
    shared += len(by_step)
  assert len({p.result["step"] for p in processes}) == 1
  return shared
