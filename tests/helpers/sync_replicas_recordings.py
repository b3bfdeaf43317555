"""Runs a recording of TensorFlow's SyncReplicasOptimizer on any system.

A system has `step(worker, gradients)`, `join`, `lost`, `close` and so on, which
return the errors by worker, and `see()`, which returns what it knows of what
is recorded. Ops that are not known are errors.
"""

import re

import numpy as np
import scenario_recordings as recorded

from tests.tensorflow1 import events as tf

_NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5}


def is_construction(recording):
  """Whether it is of errors of TensorFlow's constructor, not of steps."""
  return "R" not in recording["config"]


def two_optimizers(recording):
  return any(TWO_OPTIMIZERS.fullmatch(e["op"]) for e in recording["events"])


def steps():
  """The ids of the recordings of one optimizer's steps."""
  return [
    id
    for id in recorded.ids(*recorded.SYNC_REPLICAS)
    if not is_construction(recorded.RECORDINGS[id])
    and not two_optimizers(recorded.RECORDINGS[id])
  ]


def config_of(recording):
  return {
    "gs_init": 0,
    "inner": "GradientDescent",
    "total": recording["config"]["R"],
    **recording["config"],
  }


TWO_OPTIMIZERS = re.compile(r"w(\d+) opt([A-Z]) step")
_PUSH = re.compile(r"(w\d+(?:,w\d+)*) push(?: (-?[\d.]+))?")
_ALONE = re.compile(r"w(\d+)")
_OBSERVE = re.compile(r"w(\d+) obs")
_KILL = re.compile(r"after kill w(\d+)")
_RESTART = re.compile(r"w(\d+) restarted")
_ROUNDS = re.compile(r"(\w+) lock-step rounds with grads (-?[\d.]+)")
_REWIND = re.compile(r"assign global_step=(\d+); chief_init_op")
_EVENT = {"op", "expect", "worker", "grads", "var", "should_stop", "source"}


class Runner:
  """Feeds a recording's events to a system and compares what is recorded."""

  def __init__(self, recording, system):
    self.recording = recording
    self.config = config_of(recording)
    self.system = system
    self.workers = range(self.config["num_workers"])
    # What each worker's process has last said of its step, None if nothing yet.
    self.said = dict.fromkeys(self.workers)
    self.compared = 0

  def run(self):
    for event in self.recording["events"]:
      unknown = set(event) - _EVENT
      assert not unknown, f"unknown fields {unknown} in {event}"
      errors, observer = self.react(event)
      self.compare(event, errors, observer)
    return self.compared

  def step(self, worker, gradients=None):
    if gradients is None:
      gradients = [1.0] * len(self.config["init"])
    return self.system.step(worker, gradients)

  def react(self, event):
    """Executes an op; returns errors by worker and the workers to check."""
    op, worker = event["op"], event.get("worker")
    if op in ("observe_initial", "observe", "chief_state"):
      return {}, None
    if op == "worker_step":
      return self.step(worker, event.get("grads")), worker
    if op == "release_gate":
      return self.system.release_gate(worker, event["var"]), None
    if op == "restart_worker_new_session":
      return self.system.join(worker), None
    if op == "chief_close":
      return self.system.close(), None
    if op == "chief step":
      return self.step(0), 0
    if op == "chief restarted":  # With a checkpoint of every step.
      self.said[0] = None
      return self.system.restart_chief(keep=True), None
    if op == "chief_restart (no checkpoint)":
      return self.system.restart_chief(keep=False), None
    if result := _REWIND.fullmatch(op):
      return self.system.rewind(int(result[1])), None
    if result := _ROUNDS.fullmatch(op):
      for _ in range(_NUMBERS[result[1]]):
        for worker in self.workers:
          assert not self.step(worker, [float(result[2])])
      return {}, None
    if result := _KILL.fullmatch(op):
      self.said[int(result[1])] = None
      return self.system.lost(int(result[1])), 0
    if result := _RESTART.fullmatch(op):
      return self.system.join(int(result[1])), None
    if result := _OBSERVE.fullmatch(op):
      return {}, int(result[1])
    if result := _PUSH.fullmatch(op):
      errors = {}
      gradients = None if result[2] is None else [float(result[2])]
      for name in result[1].split(","):
        errors |= self.step(int(name[1:]), gradients)
      return errors, int(name[1:])
    if result := _ALONE.fullmatch(op):
      # A step, or a look at one that had not returned when it was last seen.
      worker = int(result[1])
      return {} if self.said[worker] is False else self.step(worker), worker
    raise AssertionError(f"unknown op {op!r} in {self.recording['id']}")

  def compare(self, event, errors, observer):
    """Compares all that an event says is to be seen."""
    see = self.system.see()
    expect = dict(event.get("expect") or {})
    if "should_stop" in event:
      self.same(not see["running"], event["should_stop"])
    if "obs" in expect:
      self.compare_process(event["op"], expect, see, observer)
      return
    named = expect.pop("errors", {})
    if "error" in expect:
      named = {str(observer): expect.pop("error")}
      named = {w: e for w, e in named.items() if e is not None}
    for key in [k for k in expect if re.fullmatch(r"w\d+_error", k)]:
      named[key[1:-6]] = expect.pop(key)
    # Only the class of the error is recorded for certain.
    first = lambda named: {str(w): e.split(":")[0] for w, e in named.items()}
    self.same(first(errors), first(named))
    if "done" in expect:
      self.same(observer not in see["blocked"], expect.pop("done"))
    if "num_accumulated" in expect and np.ndim(expect["num_accumulated"]) == 0:
      expect["num_accumulated"] = [expect["num_accumulated"]]
    for name in ("raw", "ready", "secs", "took_about_stop_grace_period"):
      expect.pop(name, None)  # Times of TensorFlow's processes.
    for name in ("vars", "ema"):
      for value, expected in self.pairs(see, name, expect.pop(name, None)):
        self.system.same_values(value, expected)
        self.compared += 1
    for name, value in expect.items():
      assert name in see, f"unknown expectation {name!r} in {event}"
      if see[name] is not NotImplemented:
        self.same(see[name], value)

  def pairs(self, see, name, expected):
    if expected is None:
      return []
    assert len(see[name]) == len(expected), (name, see[name], expected)
    return zip(see[name], expected, strict=True)

  def compare_process(self, op, expect, see, observer):
    """Compares what a process has printed: done, and its view of the system."""
    obs = expect["obs"]
    if not _OBSERVE.fullmatch(op) and not _KILL.fullmatch(op):
      self.said[observer] = observer not in see["blocked"]
      self.same(self.said[observer], expect["done"])
    elif _OBSERVE.fullmatch(op):
      self.same(self.said[observer], expect["done"])
    unknown = set(obs) - {
      *("global_step", "var", "queue", "acc", "local_step", "qclosed")
    }
    assert not unknown, f"unknown observations {unknown}"
    self.system.same_values(see["vars"][0], obs["var"])
    for name, key in (
      ("global_step", "global_step"),
      ("queue", "queue_size"),
      ("qclosed", "queue_closed"),
    ):
      if see[key] is not NotImplemented:
        self.same(see[key], obs[name])
    self.same(see["num_accumulated"], [obs["acc"]])
    if see["local_step"] is not NotImplemented:
      self.same(see["local_step"][str(observer)], obs["local_step"])

  def same(self, seen, expected):
    assert seen == expected, (self.recording["id"], seen, expected)
    self.compared += 1


class Dense:
  """A variable, and the sum of its gradients."""

  def __init__(self, value, dtype, config):
    self.start = recorded.array(value, dtype)
    self.value = self.start
    self.sum = tf.DenseSum(config["gs_init"])
    self.inner, self.lr = config["inner"], self.value.dtype.type(config["lr"])
    self.slots = [np.zeros_like(self.value), np.zeros_like(self.value)]
    self.updates = 0

  def push(self, gradient, local_step):
    self.sum.apply(recorded.array(gradient, self.value.dtype), local_step)

  def update(self):
    mean, one = self.sum.take(), self.value.dtype.type
    self.updates += 1
    if self.inner.startswith("GradientDescent"):
      self.value = self.value - self.lr * mean
    elif self.inner.startswith("Momentum"):
      self.slots[0] = self.slots[0] * one(0.9) + mean
      self.value = self.value - self.lr * self.slots[0]
    else:
      assert self.inner.startswith("Adam(lr=0.1")
      m, v = self.slots
      m = m + (mean - m) * (one(1) - one(0.9))
      v = v + (mean * mean - v) * (one(1) - one(0.999))
      # TensorFlow keeps the powers in variables and multiplies them up.
      b1, b2 = (
        np.multiply.reduce(np.full(self.updates, b), dtype=self.value.dtype)
        for b in (one(0.9), one(0.999))
      )
      rate = one(0.1) * np.sqrt(one(1) - b2) / (one(1) - b1)
      self.value = self.value - m * rate / (np.sqrt(v) + one(1e-8))
      self.slots = [m, v]

  def broken(self, gradient):
    return False


class Sparse:
  """A table, and the sum of the rows of its gradients."""

  def __init__(self, value, dtype, config):
    self.start = recorded.array(value, dtype)
    self.value = self.start
    self.sum = tf.SparseSum(config["gs_init"])
    self.lr = self.value.dtype.type(config["lr"])

  def push(self, gradient, local_step):
    indices, values = gradient
    self.sum.apply(
      indices, recorded.array(values, self.value.dtype), local_step
    )

  def update(self):
    self.value = self.value.copy()
    for row, value in zip(*self.sum.take(), strict=True):
      self.value[row] -= self.lr * value

  def broken(self, gradient):
    return max(gradient[0]) >= self.value.shape[0]


def variables_of(config):
  sparse = config.get("sparse_vars", config.get("sparse", ()))
  return [
    (Sparse if i in sparse else Dense)(
      value, config.get("dtype", "float32"), config
    )
    for i, value in enumerate(config["init"])
  ]


class StrictSystem:
  """TensorFlow's rules event by event, with its sums."""

  def __init__(self, config):
    self.config, self.dtype = config, config.get("dtype", "float32")
    self.variables = variables_of(config)
    self.system = tf.sync_replicas(
      config["R"],
      config["total"],
      num_tokens=config["num_tokens"],
      num_variables=len(self.variables),
      gated_variables=config.get("gate_vars", ()),
      global_step=config["gs_init"],
      workers=config.get("initially_started", range(config["num_workers"])),
    )
    self.gradients = {}
    self.averages = [v.value for v in self.variables]

  def step(self, worker, gradients):
    self.gradients[worker] = gradients
    pairs = zip(self.variables, gradients, strict=True)
    broken = [i for i, (v, g) in enumerate(pairs) if v.broken(g)]
    return self.follow(self.system.worker_step(worker, broken=broken))

  def release_gate(self, worker, variable):
    return self.follow(self.system.release_gate(worker, variable))

  def join(self, worker):
    return self.follow((self.system.join(worker), ()))

  def lost(self, worker):
    return self.follow((self.system.lost(worker), ()))

  def close(self):
    return self.follow(self.system.close())

  def restart_chief(self, *, keep):
    """Restarts the coordinator, with the checkpoint of the last step or none."""
    step = self.system.global_step if keep else 0
    if keep:
      self.join_anew(0)
    else:
      for variable in self.variables:
        variable.value = variable.start
    errors = self.rewind(step)
    errors |= self.follow(self.system.start_chief())
    if keep:
      errors |= self.follow(
        self.system.enqueue_tokens(self.config["num_tokens"])
      )
    return errors

  def join_anew(self, worker):
    self.lost(worker)
    self.join(worker)

  def rewind(self, step):
    errors = self.follow(self.system.chief_init(step))
    for variable in self.variables:
      variable.sum.step = step
    return errors

  def follow(self, moved):
    """Does with the values what the rules have decided; returns errors."""
    self.system, outcomes = moved
    errors = {}
    for outcome in outcomes:
      match outcome:
        case tf.Applied((worker, at), accepted, None, variable):
          self.applied(worker, at, accepted, variable)
        case tf.Taken(variable, _, members):
          self.taken(variable, members)
        case tf.Advanced():
          self.advanced()
        case tf.StepFailed("chief", _):
          pass
        case tf.StepFailed(worker, error):
          errors[worker] = error
    return errors

  def applied(self, worker, at, accepted, variable):
    target = self.variables[variable]
    before = target.sum.count
    target.push(self.gradients[worker][variable], at)
    assert target.sum.count == before + accepted

  def taken(self, variable, members):
    target = self.variables[variable]
    assert target.sum.count == len(members)
    target.update()

  def advanced(self):
    half = np.float32(0.5)
    self.averages = [
      a - (a - v.value) * half
      for a, v in zip(self.averages, self.variables, strict=True)
    ]

  def see(self):
    seen = self.system.observe()
    return {
      "global_step": seen.global_step,
      "queue_size": seen.queue_size,
      "queue_closed": self.system.queue.closed,
      "num_accumulated": list(seen.num_accumulated),
      "blocked": list(seen.blocked),
      "local_step": {str(r): step for r, step in seen.local_step.items()},
      "running": self.system.running,
      "vars": [v.value for v in self.variables],
      "ema": self.averages,
    }

  def same_values(self, value, expected):
    recorded.same(value, expected, self.dtype)
