"""A process that takes part in a run of the fault matrix."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import queue
import socket
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import outcomes
import workers

from optax_dist import coordinator
from optax_dist.coordinator import checkpoint, phases
from optax_dist.coordinator.runtime import endpoint
from tests.chaos import samples

_PERIOD = 0.01  # Shortest time of a gradient, in seconds.
_REPLY = 20.0


def main(channel: workers.Channel, job: dict[str, Any]) -> None:
  """Trains until told to finish, and reports its observations."""
  logging.basicConfig(
    level=logging.INFO, format="%(relativeCreated)d %(threadName)s %(message)s"
  )
  work = _Work(channel, job)
  channel.obey(work.obey)
  phases.listen(work.reached)
  channel.say("result", **work.run())


class _Work:
  """The process's work."""

  def __init__(self, channel: workers.Channel, job: dict[str, Any]):
    self._channel, self._job = channel, job
    self._fault = job.get("fault", {"phase": ""})
    self._finish = threading.Event()
    self._replies: queue.Queue[str] = queue.Queue()
    self._optimizer = optax.adam(0.01)
    width = job.get("width", 600)
    self._params = {
      "w": np.linspace(-1.0, 1.0, width, dtype=np.float32),
      "b": np.zeros(7, np.float32),
    }
    self._gradient = jax.jit(
      jax.grad(
        lambda p, x: (
          jnp.sum(jnp.sin(p["w"] * x) ** 2) + jnp.sum((p["b"] - x) ** 2)
        )
      )
    )
    self._gradient(self._params, 0.5)
    self._replica: Any = None
    self._lock = threading.Lock()
    self._over = False

  def obey(self, told: dict[str, Any]) -> None:
    """Does what the launcher says."""
    match told["do"]:
      case "finish":
        self._finish.set()
      case "inflict":
        threading.Thread(target=self._inflict, daemon=True).start()
      case "go" | "strike":
        self._replies.put(told["do"])
      case "disarm":
        self._fault["phase"] = ""

  # The run.

  def run(self) -> dict[str, Any]:
    """Trains; returns what it has seen."""
    seen: dict[str, Any] = {
      **outcomes.none_yet(),
      "prints": {},
      "drawn": {},
      "waited": 0.0,
      "error": None,
    }
    try:
      self._train(self._job, seen)
    except Exception as error:
      seen["error"] = f"{type(error).__name__}: {error}"
    self._over = True
    return seen

  def _train(self, job: dict[str, Any], seen: dict[str, Any]) -> None:
    data = job["join"].get("data") is not None
    try:
      with coordinator.join(
        self._optimizer,
        self._params,
        replica=job["replica"],
        secret=job["secret"],
        start_coordinator=False,
        **job["join"],
      ) as replica:
        self._replica = replica
        seen["prints"][replica.global_step] = replica.fingerprint()
        self._channel.say("joined", step=replica.global_step)
        number = 0
        while not (self._finish.is_set() or replica.finished):
          if data:
            start = time.monotonic()
            indices = next(replica.batches(), None)
            waited = time.monotonic() - start
            seen["waited"] = max(seen["waited"], waited)
            if indices is None:
              break
            seen["drawn"][str(number)] = indices.tolist()
          key = [job["replica"], job["incarnation"], number]
          number += 1
          time.sleep(job.get("pause", _PERIOD))
          # Replicas differ, so a mean of others is another mean.
          x = job["replica"] + 0.1 + 0.01 * (number % 17)
          grads = self._gradient(replica.params, x)
          seen["calls"].append(number - 1)
          outcome = replica.step(grads, batch=key)
          outcomes.note(seen, number - 1, outcome)
          seen["waited"] = max(seen["waited"], outcome.waited)
          seen["prints"][outcome.global_step] = replica.fingerprint()
          self._channel.say(
            "step",
            at=time.monotonic(),
            step=outcome.global_step,
            members=list(outcome.members),
          )
          if (
            job.get("checkpoints")
            and outcome.accepted
            and not outcome.global_step % 2
          ):
            step = f"step-{outcome.global_step}"
            with contextlib.suppress(FileExistsError):  # Another one has.
              checkpoint.save(pathlib.Path(job["checkpoints"], step), replica)
        phases.reach("ending", job["replica"])
        replica.finish()
        seen["prints"][replica.global_step] = replica.fingerprint()
        seen["step"] = replica.global_step
        if data:
          seen["data"] = samples.plain(replica.report_data())
        seen["stats"] = replica.stats()
    except coordinator.RunFinished:
      seen["error"] = "finished"

  # The fault.

  def reached(self, phase: str, who: object) -> None:
    """Has the launcher decide what happens, if this is the phase for it."""
    fault = self._fault
    if self._over or phase != fault["phase"] or not self._is_time():
      return
    with self._lock:
      self._channel.say("reached", phase=phase)
      reply = self._replies.get(timeout=_REPLY)
    if reply == "strike":
      self._inflict()

  def _is_time(self) -> bool:
    if self._fault["joins"]:
      return self._job["incarnation"] > 0 or self._replica is not None
    after = self._fault["after"]
    return self._replica is not None and self._replica.global_step >= after

  def _inflict(self) -> None:
    """Injects the fault into this process."""
    match self._fault["fault"]:
      case "delay":
        time.sleep(self._fault["seconds"])
      case "disconnect":
        port = self._job["join"]["coordinator_address"].rpartition(":")[2]
        _drop_connections(int(port) if self._is_of_coordinator else None)
      case "corrupt" if self._replica is not None:
        _send_nonsense(
          self._replica, self._fault["seed"], self._is_of_coordinator
        )

  @property
  def _is_of_coordinator(self) -> bool:
    return self._fault["who"] == "coordinator"


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
