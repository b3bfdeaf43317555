"""A process that takes part in a run, and its settings."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import pathlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint  # noqa: F401  What takes long is loaded before a job.
import outcomes
import workers
from jax.experimental import multihost_utils

from optax_dist import coordinator
from optax_dist.coordinator import checkpoint
from optax_dist.coordinator._internal import phases
from optax_dist.coordinator.launch import environment
from optax_dist.coordinator.runtime import endpoint
from tests.runs import models, samples

_REPLY = 20.0
_LINGER = 60.0  # Seconds; the launcher kills it before.
# What process 0 decides before a gradient, for all processes of its replica.
_GO_ON, _FINISH, _LEAVE = range(3)


@dataclasses.dataclass(frozen=True)
class Job:
  """The settings of a process.

  Attributes:
    model: makes what it trains; a function that can be pickled.
    join: options of `coordinator.join`.
    pause: seconds before each gradient.
    limit: the first step that is not to be computed yet.
    target: the step at which it ends.
    checkpoints: the folder of the run's checkpoints, from which it goes on; ""
      for none.
    every: steps between them.
    saves: the folder in which each replica saves every second step; "" for none.
    processes: how many processes its replica has.
    armed: what `Processes.arm` has said before it started.
    replica: its replica's index.
    rank: its index in the replica.
    incarnation: how many processes were this one before.
    secret: the job's secret.
  """

  model: Callable[[], models.Model]
  join: Mapping[str, Any]
  pause: float = 0.01
  limit: float = math.inf
  target: float = math.inf
  checkpoints: str = ""
  every: int = 3
  saves: str = ""
  processes: int = 1
  armed: Mapping[str, Any] | None = None
  replica: int = 0
  rank: int = 0
  incarnation: int = 0
  secret: str = ""


def main(channel: workers.Channel, job: Job) -> None:
  """Trains until it is to finish, and reports its observations."""
  logging.basicConfig(
    level=logging.INFO, format="%(relativeCreated)d %(threadName)s %(message)s"
  )
  process = _Process(channel, job)
  channel.obey(process.obey)
  phases.listen(process.reached)
  channel.say("result", **process.run())
  if job.processes > 1:
    # If it exited now, it would end the other processes before they report.
    time.sleep(_LINGER)
    os._exit(0)


class _Process:
  """The process's work."""

  def __init__(self, channel: workers.Channel, job: Job):
    self._channel, self._job = channel, job
    self._commands: queue.Queue[int] = queue.Queue()
    self._replies: queue.Queue[dict[str, Any]] = queue.Queue()
    self._limit = job.limit
    # The phase in which a fault is to hit it, and how often it comes before.
    self._phase, self._skip = "", 0
    self._lock = threading.Lock()
    if job.armed is not None:
      self._arm(**job.armed)
    self._replica: Any = None
    self._seen: dict[str, Any] = {
      **outcomes.none_yet(),
      "prints": {},
      "drawn": {},
      "waited": 0.0,
      "error": None,
    }

  def obey(self, told: dict[str, Any]) -> None:
    """Does what the launcher says."""
    match told.pop("do"):
      case "arm":
        self._arm(**told)
      case "go":
        self._replies.put(told)
      case "inflict":
        threading.Thread(target=self._inflict, kwargs=told, daemon=True).start()
      case "limit":
        self._limit = told["step"]
      case "finish":
        self._commands.put(_FINISH)
      case "leave":
        self._commands.put(_LEAVE)

  # The run.

  def run(self) -> dict[str, Any]:
    """Trains; returns what it has seen."""
    try:
      self._train()
    except coordinator.RunFinished:
      self._seen["error"] = "finished"
    except Exception as error:
      self._seen["error"] = f"{type(error).__name__}: {error}"
    self._phase = ""
    return self._seen

  def _train(self) -> None:
    job, seen = self._job, self._seen
    if job.processes > 1:
      self._initialize()
    model = job.model()
    start: dict[str, Any] = {"params": model.params}
    if job.checkpoints:
      start = checkpoint.resume(
        job.checkpoints, model.params, model.opt.init(model.params)
      )
    data = job.join.get("data")
    deterministic = data is not None and data.deterministic
    if deterministic:
      start["probe"] = lambda params, slot: model.gradient(params, 0, slot)
    elif data is None:
      jax.block_until_ready(model.gradient(model.params, 0, None))
    with coordinator.join(
      model.opt,
      **start,
      replica=job.replica,
      secret=job.secret,
      start_coordinator=False,
      **job.join,
    ) as replica:
      self._replica = replica
      self._say("joined")
      command = self._steps(replica, model, self._drawn(replica))
      if not deterministic:
        phases.reach("ending", job.replica)
        replica.finish()
      step = replica.global_step
      if deterministic and command != _LEAVE:
        seen["next"] = replica.progress_at(step).next
      self._say("step", members=[])
      seen["step"], seen["stats"] = step, replica.stats()
      if data is not None and not deterministic:
        seen["data"] = samples.plain(replica.report_data())

  def _initialize(self) -> None:
    job = self._job
    variables = environment.Environment(
      coordinator_address=job.join["coordinator_address"],
      secret=job.secret,
      num_replicas=job.join["total_num_replicas"],
    ).variables()
    variables |= environment.ProcessEnvironment(
      replica=job.replica,
      num_processes=job.processes,
      process_index=job.rank,
    ).variables()
    os.environ.update(variables)
    coordinator.initialize_processes()

  def _drawn(self, replica: Any) -> Iterator[Any]:
    """Samples or slots for one gradient after the other; None without data."""
    if not replica.has_data:
      return itertools.repeat(None)
    if self._job.join["data"].deterministic:
      return iter(replica.micro_batches())
    return iter(replica.batches())

  def _steps(self, replica: Any, model: models.Model, drawn: Any) -> int:
    """Trains; returns the command that has ended it, or `_GO_ON`."""
    job, seen = self._job, self._seen
    number, command, finished = 0, _GO_ON, False
    while not finished and replica.global_step < job.target:
      start = time.monotonic()
      try:
        own = next(drawn)
      except StopIteration:
        break
      seen["waited"] = max(seen["waited"], time.monotonic() - start)
      # Others may have taken the steps that this one had no part in.
      if replica.global_step not in seen["prints"]:
        self._say("step", members=[])
      while replica.global_step >= self._limit and self._commands.empty():
        time.sleep(0.002)
      if command := self._command():
        break
      time.sleep(job.pause)
      # Replicas differ, so a mean of others is another mean.
      grads = model.gradient(
        replica.params, 10 * job.replica + number % 100, own
      )
      seen["calls"].append(number)
      if isinstance(own, np.ndarray):
        seen["drawn"][str(number)] = own.tolist()
      keys = {}
      if own is None or isinstance(own, np.ndarray):
        keys["batch"] = [job.replica, job.incarnation, number]
      outcome = replica.step(jax.block_until_ready(grads), **keys)
      outcomes.note(seen, number, outcome)
      number, finished = number + 1, outcome.finished
      seen["waited"] = max(seen["waited"], outcome.waited)
      self._say("step", members=list(outcome.members))
      if job.checkpoints:
        checkpoint.save_if_due(job.checkpoints, replica, outcome, job.every)
      if job.saves and outcome.accepted and not outcome.global_step % 2:
        name = f"{job.replica}-{job.incarnation}-{outcome.global_step}"
        checkpoint.save(pathlib.Path(job.saves, name), replica)
    return command

  def _command(self) -> int:
    """What all processes of the replica do now."""
    command = _GO_ON if self._commands.empty() else self._commands.get()
    if self._job.processes > 1:
      command = int(multihost_utils.broadcast_one_to_all(np.int32(command)))
    return command

  def _say(self, event: str, **fields: Any) -> None:
    """Notes the state of this step, and says what it is."""
    replica = self._replica
    stats, at = replica.stats(), time.monotonic()
    moved = {way: stats[way] for way in ("bytes_in", "bytes_out")}
    step, digest = replica.global_step, replica.fingerprint()
    self._seen["prints"][step] = digest
    self._channel.say(event, at=at, step=step, print=digest, **moved, **fields)

  # The fault.

  def _arm(
    self, phase: str, skip: int, process: tuple[int, int] | None
  ) -> None:
    if process in (None, (self._job.replica, self._job.rank)):
      self._skip, self._phase = skip, phase

  def reached(self, phase: str, who: object) -> None:
    """Has the launcher decide what happens, if this is the phase for it."""
    with self._lock:
      if phase != self._phase:
        return
      self._skip -= 1
      if self._skip >= 0:
        return
      self._phase = ""
      self._channel.say("reached")
      reply = self._replies.get(timeout=_REPLY)
    if reply:
      self._inflict(**reply)

  def _inflict(
    self, fault: str, seconds: float, seed: int, coordinator: bool
  ) -> None:
    """Injects the fault into this process.

    Args:
      fault: what.
      seconds: of a delay.
      seed: of nonsense.
      coordinator: whether it is the connection to the coordinator that is hit;
        else it is that to the other replicas, or to all.
    """
    match fault:
      case "delay":
        time.sleep(seconds)
      case "disconnect":
        port = self._job.join["coordinator_address"].rpartition(":")[2]
        _drop_connections(int(port) if coordinator else None)
      case "corrupt" if self._replica is not None:
        _send_nonsense(self._replica, seed, coordinator)


def _drop_connections(port: int | None) -> None:
  """Cuts TCP connections of this process, as a network failure would.

  Args:
    port: only those to this port; None for all.
  """
  for name in os.listdir("/proc/self/fd"):
    try:
      if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
        continue
      with socket.socket(fileno=os.dup(int(name))) as result:
        if result.family not in (socket.AF_INET, socket.AF_INET6):
          continue
        if port is None or result.getpeername()[1] == port:
          result.shutdown(socket.SHUT_RDWR)
    except OSError:
      continue  # A listener, or already closed.


def _send_nonsense(replica: Any, seed: int, to_coordinator: bool) -> None:
  """Sends the coordinator, or all other replicas, invalid messages."""
  driver = replica._participant.driver
  rng = np.random.default_rng(seed)

  def send() -> None:
    for peer in driver._transport.peers():
      if (peer == endpoint.COORDINATOR) != to_coordinator:
        continue
      for size in rng.integers(200, size=4):
        driver._transport.send(peer, [rng.bytes(int(size))])

  driver.loop.call_soon(send)
