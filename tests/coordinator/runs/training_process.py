"""A process that takes part in runs, as the tests of the old failures tell it.

The model is here for both sides: replaying a run needs its numbers.
"""

import logging
import os
import pathlib
import signal
import threading
import time

import worker_channel

# A hang ends by itself unless it is released.
_HANG = 120.0


def model(width=30):
  """The optimizer, the first parameters, and the gradient of a batch's key."""
  import jax
  import jax.numpy as jnp
  import optax

  params = {"b": jnp.linspace(-1.0, 1.0, 70), "w": jnp.ones((5, width))}

  @jax.jit
  def gradient(params, x):
    return jax.tree.map(lambda p: 0.1 * p + jnp.sin(x + p), params)

  def of_key(params, key):
    replica, incarnation, number = key
    x = 1000 * incarnation + 100 * replica + number
    return gradient(params, jnp.float32(x))

  return optax.sgd(0.1, momentum=0.9), params, of_key


class Member:
  """One replica of this process.

  Its job has `run`, `replica`, `incarnation`, `width` of its model and `join`,
  arguments of `coordinator.join`. It may have `gradients`, after which its data
  is used up; `period`, seconds that a gradient takes; `restore` and `save`
  (a step and a path) of checkpoints; and `fault`: a phase, the how-manieth time
  in it, and whether it is then killed, stopped, or hangs until released.
  """

  def __init__(self, channel, job):
    self.channel, self.job = channel, job
    self.begin, self.finish = threading.Event(), threading.Event()
    self.released = threading.Event()
    self._times = 0

  def say(self, event, **fields):
    self.channel.say(event, run=self.job["run"], **fields)

  def run(self):
    seen = {
      "calls": [],
      "accepted": [],
      "reasons": {},
      "prints": {},
      "waited": 0.0,
      "error": None,
    }
    try:
      self._train(seen)
    except Exception as error:
      seen["error"] = f"{type(error).__name__}: {error}"
    self.say("result", **seen)

  def _train(self, seen):
    from optax_dist import coordinator
    from optax_dist.coordinator import checkpoint

    job = self.job
    opt, params, gradient = model(job["width"])
    start = {"params": params}
    if job.get("restore"):
      start = checkpoint.restore(job["restore"], params, opt.init(params))
    with coordinator.join(opt, **start, **job["join"]) as replica:
      seen["prints"][replica.global_step] = replica.fingerprint()
      self.say("joined", step=replica.global_step)
      self.begin.wait(_HANG)
      number = 0
      while not (
        self.finish.is_set()
        or replica.finished
        or number == job.get("gradients")
      ):
        key = [job["replica"], job["incarnation"], number]
        time.sleep(job.get("period", 0.005))
        grads = gradient(replica.params, key)
        seen["calls"].append(number)
        outcome = replica.step(grads, batch=key)
        if outcome.accepted:
          seen["accepted"].append(number)
        else:
          seen["reasons"][str(number)] = outcome.reason
        number += 1
        seen["waited"] = max(seen["waited"], outcome.waited)
        seen["prints"][outcome.global_step] = replica.fingerprint()
        if job.get("save") and outcome.global_step == job["save"][0]:
          checkpoint.save(pathlib.Path(job["save"][1]), replica)
        self.say("step", step=outcome.global_step)
      if number == job.get("gradients"):
        replica.leave()
      else:
        replica.finish()
      seen["prints"][replica.global_step] = replica.fingerprint()
      seen |= {"step": replica.global_step, "stats": replica.stats()}

  def reached(self, phase):
    """Has the fault happen, if it is time for it."""
    fault = self.job.get("fault")
    if fault is None or phase != fault["phase"]:
      return
    self._times += 1
    if self._times != fault["time"]:
      return
    self.say("struck", phase=phase)
    if fault["what"] == "kill":
      os.kill(os.getpid(), signal.SIGKILL)
    elif fault["what"] == "stop":
      signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    else:
      self.released.wait(_HANG)


def main():
  channel = worker_channel.WorkerChannel()
  logging.basicConfig(
    level=logging.INFO, format="%(relativeCreated)d %(message)s"
  )
  from optax_dist.coordinator import phases

  # Imported and compiled before it is needed.
  optimizer, params, gradient = model()
  optimizer.init(params)
  gradient(params, [0, 0, 0])
  members = {}

  def reached(phase, replica):
    for member in list(members.values()):
      member.reached(phase)

  phases.listen(reached)
  while True:
    told = channel.receive()
    name = told.get("run")
    match told["do"]:
      case "run":
        members[name] = Member(channel, told)
        threading.Thread(target=members[name].run, daemon=True).start()
      case "begin":
        members[name].begin.set()
      case "release":
        members[name].released.set()
      case "finish":
        members[name].finish.set()


if __name__ == "__main__":
  raise SystemExit(main())
