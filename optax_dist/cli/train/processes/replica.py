"""The process of a replica of ``optax-dist train --launch processes``."""

from __future__ import annotations

import json
import os
import pathlib
import signal
from typing import Any

from optax_dist.cli.train.processes import plan as process_plan
from optax_dist.coordinator.launch import channel as channels
from optax_dist.coordinator.launch.environment import Environment


def main() -> int:
  """Trains as the replica assigned by the launcher, until the run is over."""
  channel = channels.Channel()
  told = json.loads(os.environ[process_plan.VARIABLE])
  # Slow imports follow.
  import numpy as np

  from optax_dist import coordinator
  from optax_dist.cli.train import digits, model
  from optax_dist.cli.train.processes import checkpoints

  config = told["config"]
  with np.load(told["data"]) as arrays:
    train = digits.Batch(arrays["images"], arrays["labels"])
    test = digits.Batch(arrays["test_images"], arrays["test_labels"])
  params = model.init(config["seed"])
  opt = process_plan.make_optimizer(config)
  gradient = process_plan.make_gradient(
    config, params, train.images, train.labels
  )
  place = Environment.read()
  assert place.replica is not None
  replica, incarnation = place.replica, place.restarts or 0
  start: dict[str, Any] = {"params": params}
  if told["checkpoint"]:
    like = process_plan.first_state(config, params)
    start = checkpoints.load(pathlib.Path(told["checkpoint"]), like)
  try:
    with coordinator.join(
      opt,
      **process_plan.join_arguments(config),
      **start,
      start_store=False,
      lower_on_loss=False,
      config=config,
      fingerprint_every=told["fingerprint_every"],
      timeout=told["timeout"],
      attempt_timeout=told["attempt_timeout"],
      leader_timeout=told["leader_timeout"],
    ) as joined:
      # On SIGTERM, all replicas save first.
      signal.signal(signal.SIGTERM, lambda *_: joined.save_soon())
      _Training(joined, channel, told, test, gradient).run(replica, incarnation)
  except coordinator.RunFinished:
    channel.say("finished")
  return 0


class _Training:
  """The training loop."""

  def __init__(
    self,
    joined: Any,
    channel: channels.Channel,
    told: dict[str, Any],
    test: Any,
    gradient: Any,
  ):
    import jax

    from optax_dist.cli.train import model

    self._replica, self._channel, self._told = joined, channel, told
    self._config = told["config"]
    self._gradient = gradient
    self._test = test
    count = jax.jit(model.count_correct)
    self._count = count.lower(joined.center, test).compile()
    self._losses: list[float] = []
    self._evaluated = joined.global_step

  def run(self, number: int, incarnation: int) -> None:
    config, replica = self._config, self._replica
    last = config["commits"]
    # A resumed run goes on with the batches that one without a stop would have.
    batches = replica.global_step * config["local_steps"] // last
    while not replica.finished and replica.global_step < last:
      key = [number, incarnation, batches]
      batches += 1
      loss, grads = self._gradient(replica.params, key)
      self._losses.append(float(loss))
      outcome = replica.step(grads, batch=key)
      self._tell(outcome)
    replica.finish()
    self._channel.say(
      "finished",
      step=replica.global_step,
      accuracy=self._accuracy(),
      fingerprint=replica.fingerprint(),
      gradients=replica.stats()["gradients"],
    )

  def _tell(self, outcome: Any) -> None:
    from optax_dist.cli.train.processes import checkpoints

    if outcome.accepted and not outcome.members:
      return  # It stopped alone.
    fields: dict[str, Any] = {}
    step = outcome.global_step
    if step > self._evaluated and self._ends_epoch(self._evaluated, step):
      fields["accuracy"] = self._accuracy()
      self._evaluated = step
    self._channel.say(
      "step",
      step=step,
      accepted=outcome.accepted,
      reason=outcome.reason,
      loss=sum(self._losses) / len(self._losses),
      waited=outcome.waited,
      **fields,
    )
    self._losses = []
    every = self._told["checkpoint_every"]
    if every and step and (step % every == 0 or outcome.save):
      folder = pathlib.Path(self._told["checkpoints"])
      try:
        checkpoints.save(folder, self._replica)
      except OSError as error:
        # One line, which the launcher passes on.
        raise SystemExit(
          f"the checkpoint of step {step:,} can't be written in {folder}:"
          f" {error.strerror}."
        ) from error

  def _ends_epoch(self, before: int, step: int) -> bool:
    commits = self._config["commits"]
    epochs = self._config["local_steps"] / self._config["steps_per_epoch"]
    epoch = lambda n: int(n * epochs / commits)
    return epoch(before) < epoch(step)

  def _accuracy(self) -> float:
    correct = self._count(self._replica.center, self._test)
    return int(correct) / len(self._test.labels)


if __name__ == "__main__":
  raise SystemExit(main())
