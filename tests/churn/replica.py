"""A process that takes part in a run with churn."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any

import jax
import numpy as np
import orbax.checkpoint  # noqa: F401  What takes long is loaded before a job.
import workers

from optax_dist import coordinator, ledger
from optax_dist.coordinator import checkpoint, joining, phases  # noqa: F401
from optax_dist.coordinator.options import Options
from tests.churn import models, plans

# Seconds of a micro-batch, so that faults come in the middle of a step.
_PERIOD = 0.004
_CHECKPOINTS_EVERY = 3
_REPLY = 20.0


def main(channel: workers.Channel, job: dict[str, Any]) -> None:
  """Trains until the data ends, and says what it sees."""
  logging.basicConfig(
    level=logging.INFO, format="%(relativeCreated)d %(threadName)s %(message)s"
  )
  work = _Work(channel, job)
  channel.obey(work.obey)
  phases.listen(work.reached)
  try:
    work.train()
    error = None
  except Exception as caught:
    error = f"{type(caught).__name__}: {caught}"
  channel.say("result", error=error)


class _Work:
  """The process's work."""

  def __init__(self, channel: workers.Channel, job: dict[str, Any]):
    self._channel, self._job = channel, job
    # The first step that may not be computed yet.
    self._limit = job["limit"]
    self._leaves = False
    # The phase in which a fault is to hit it, and how often it comes before.
    self._phase, self._after = "", 0
    self._replies: queue.Queue[None] = queue.Queue()
    self._lock = threading.Lock()

  def obey(self, told: dict[str, Any]) -> None:
    """Does what the launcher says."""
    match told["do"]:
      case "limit":
        self._limit = told["step"]
      case "fault":
        self._after, self._phase = told["after"], told["phase"]
      case "go":
        self._replies.put(None)
      case "leave":
        self._leaves = True

  def train(self) -> None:
    """Takes part in a job, from its last checkpoint if there is one."""
    job = self._job
    setting = plans.Setting(**job["setting"])
    data = setting.data
    model = models.model(setting.model, setting.dtype, setting.width)
    optimizer = models.optimizer()

    def gradient(params: Any, slot: Any) -> Any:
      samples = ledger.read(model.samples, slot.indices)
      return model.gradient(params, samples, slot.key)

    start: dict[str, Any] = {"params": model.params}
    if job["checkpoints"]:
      start = checkpoint.resume(
        job["checkpoints"], model.params, optimizer.init(model.params)
      )
    try:
      with coordinator.join(
        optimizer,
        **start,
        data=data,
        probe=gradient,
        coordinator_address=job["address"],
        replica=job["replica"],
        total_num_replicas=job["replicas"],
        lower_on_loss=True,
        secret=job["secret"],
        run=job["run"],
        start_coordinator=False,
        inline_bytes=Options.inline_bytes if job["inline"] else 0,
        wire=setting.wire,
        journal=job["journal"],
        **job["deadlines"],
      ) as replica:
        self._says_step(replica)
        self._channel.say("joined", step=replica.global_step)
        last = replica.global_step
        for slot in replica.micro_batches():
          first = slot.step * data.global_batch
          first += slot.number * (data.micro_batch or 0)
          want = data.indices(((first, first + (data.micro_batch or 0)),))
          if not np.array_equal(slot.indices, want):
            raise AssertionError(f"slot {slot} has other samples")
          # Others may have taken the steps that this one had no slot in.
          if replica.global_step > last:
            last = replica.global_step
            self._says_step(replica)
          while slot.step >= self._limit and not self._leaves:
            time.sleep(0.002)
          if self._leaves:
            break
          grads = jax.block_until_ready(gradient(replica.params, slot))
          time.sleep(_PERIOD)
          outcome = replica.step(grads)
          if outcome.global_step > last:
            last = outcome.global_step
            self._says_step(replica)
          if job["checkpoints"]:
            checkpoint.save_if_due(
              job["checkpoints"], replica, outcome, _CHECKPOINTS_EVERY
            )
        self._says_step(replica)
        done = replica.progress_at(replica.global_step)
        self._channel.say("done", step=replica.global_step, next=done.next)
    except coordinator.RunFinished:
      pass

  def _says_step(self, replica: Any) -> None:
    self._channel.say(
      "step",
      step=replica.global_step,
      digest=replica.fingerprint(),
    )

  def reached(self, phase: str, who: object) -> None:
    """Waits for the fault, if this is the phase for it."""
    with self._lock:
      if phase != self._phase:
        return
      self._after -= 1
      if self._after >= 0:
        return
      self._phase = ""
      self._channel.say("reached")
      self._replies.get(timeout=_REPLY)
