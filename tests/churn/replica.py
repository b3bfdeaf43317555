"""A process that takes part in one run with churn after another."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Any

import worker_channel

from optax_dist.coordinator.options import Options

# Seconds of a micro-batch, so that faults come in the middle of a step.
_PERIOD = 0.004
_CHECKPOINTS_EVERY = 3


def main() -> int:
  """Runs jobs from the launcher until it says "end"."""
  channel = worker_channel.WorkerChannel()
  logging.basicConfig(
    level=logging.INFO, format="%(relativeCreated)d %(threadName)s %(message)s"
  )
  work = _Work(channel)
  channel.say("ready")
  while True:
    message = channel.receive()
    match message["do"]:
      case "run":
        work.limit = message["limit"]
        # In its own thread, since this one continues to receive.
        threading.Thread(target=work.run, args=(message,), daemon=True).start()
      case "limit":
        work.limit = message["step"]
      case "fault":
        work.arm(message)
      case "leave":
        work.leaves = True
      case "end":
        return 0


class _Work:
  """The process's work; one run at a time.

  Attributes:
    limit: the first step that may not be computed yet.
    leaves: whether the replica is to leave.
  """

  def __init__(self, channel: worker_channel.WorkerChannel):
    # What takes seconds is loaded before there is a job.
    import orbax.checkpoint  # noqa: F401

    from optax_dist import coordinator  # noqa: F401
    from optax_dist.coordinator import checkpoint, joining, phases  # noqa: F401
    from tests.churn import models

    for name in models.MODELS:
      models.model(name, "float32")

    self.channel = channel
    self.limit = 0
    self.leaves = False
    self._fault: dict[str, Any] | None = None
    self._lock = threading.Lock()
    phases.listen(self._reached)

  def run(self, job: dict[str, Any]) -> None:
    """Trains until the data ends, and says what it sees."""
    self.leaves, self._fault = False, None
    try:
      self._train(job)
      error = None
    except Exception as caught:
      error = f"{type(caught).__name__}: {caught}"
    self.channel.say("result", error=error)

  def _train(self, job: dict[str, Any]) -> None:
    import jax
    import numpy as np

    from optax_dist import coordinator, ledger
    from optax_dist.coordinator import checkpoint
    from tests.churn import models, plans

    setting = plans.Setting(**job["setting"])
    data = setting.data
    model = models.model(setting.model, setting.dtype)
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
        start_store=False,
        inline_bytes=Options.inline_bytes if job["inline"] else 0,
        wire=setting.wire,
        journal=job["journal"],
        **job["deadlines"],
      ) as replica:
        self._says_step(replica)
        self.channel.say("joined", step=replica.global_step)
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
          while slot.step >= self.limit and not self.leaves:
            time.sleep(0.002)
          if self.leaves:
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
        self.channel.say("done", step=replica.global_step, next=done.next)
    except coordinator.RunFinished:
      pass

  def _says_step(self, replica: Any) -> None:
    self.channel.say(
      "step",
      step=replica.global_step,
      digest=replica.fingerprint(),
      leader=replica.is_leader,
    )

  # Faults.

  def arm(self, fault: dict[str, Any]) -> None:
    """Has this process killed or stopped in a phase, or does it at once."""
    self._fault = fault
    if not fault["phase"]:
      self._strike()

  def _reached(self, phase: str, who: object) -> None:
    fault = self._fault
    if fault is None or phase != fault["phase"]:
      return
    with self._lock:
      fault["after"] -= 1
      if fault["after"] < 0:
        self._strike()

  def _strike(self) -> None:
    fault, self._fault = self._fault, None
    if fault is None:
      return
    if fault["kind"] == "stop":
      self.channel.say("stopped")
      os.kill(os.getpid(), signal.SIGSTOP)
    else:
      os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
  raise SystemExit(main())
