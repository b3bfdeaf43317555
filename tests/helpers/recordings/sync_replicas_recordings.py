"""Runs a recording of TensorFlow's SyncReplicasOptimizer on a system.

A system has TensorFlow's `order` of events, `step(worker, gradients)`, `rewind`
and `restart_chief`, and `see()`, which returns all that is recorded. Ops that
are not known are errors.
"""

import re

_NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5}
_PUSH = re.compile(r"(w\d+(?:,w\d+)*) push(?: (-?[\d.]+))?")
_ALONE = re.compile(r"w(\d+)")
_OBSERVE = re.compile(r"w(\d+) obs")
_KILL = re.compile(r"after kill w(\d+)")
_RESTART = re.compile(r"w(\d+) restarted")
_ROUNDS = re.compile(r"(\w+) lock-step rounds with grads (-?[\d.]+)")
_REWIND = re.compile(r"assign global_step=(\d+); chief_init_op")
_EVENT = {"op", "expect", "worker", "grads"}


def config_of(recording):
  return {
    "gs_init": 0,
    "inner": "GradientDescent",
    "total": recording["config"]["R"],
    **recording["config"],
  }


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
      self.compare(event, self.react(event))
    return self.compared

  def step(self, worker, gradients=None):
    if gradients is None:
      gradients = [1.0] * len(self.config["init"])
    self.system.step(worker, gradients)

  def react(self, event):
    """Executes an op; returns the worker to check, if there is one."""
    op, worker = event["op"], event.get("worker")
    if op in ("observe_initial", "observe", "chief_state"):
      return None
    if op == "worker_step":
      self.step(worker, event.get("grads"))
      return worker
    if op == "restart_worker_new_session":
      self.system.order.join(worker)
      return worker
    if op == "chief restarted":  # With a checkpoint of every step.
      self.said[0] = None
      self.system.restart_chief()
      return None
    if result := _REWIND.fullmatch(op):
      self.system.rewind(int(result[1]))
      return None
    if result := _ROUNDS.fullmatch(op):
      for _ in range(_NUMBERS[result[1]]):
        for worker in self.workers:
          self.step(worker, [float(result[2])])
      return None
    if result := _KILL.fullmatch(op):
      self.said[int(result[1])] = None
      self.system.order.lost(int(result[1]))
      return 0
    if result := _RESTART.fullmatch(op):
      self.system.order.join(int(result[1]))
      return int(result[1])
    if result := _OBSERVE.fullmatch(op):
      return int(result[1])
    if result := _PUSH.fullmatch(op):
      gradients = None if result[2] is None else [float(result[2])]
      workers = [int(name[1:]) for name in result[1].split(",")]
      for worker in workers:
        self.step(worker, gradients)
      return workers[-1]
    if result := _ALONE.fullmatch(op):
      # A step, or a look at one that had not returned when it was last seen.
      worker = int(result[1])
      if self.said[worker] is not False:
        self.step(worker)
      return worker
    raise AssertionError(f"unknown op {op!r} in {self.recording['id']}")

  def compare(self, event, observer):
    """Compares all that an event says is to be seen."""
    see = self.system.see()
    expect = dict(event.get("expect") or {})
    if "obs" in expect:
      self.compare_process(event["op"], expect, see, observer)
      return
    if "done" in expect:
      self.same(observer not in see["blocked"], expect.pop("done"))
    for name in ("raw", "ready", "secs"):
      expect.pop(name, None)  # Times of TensorFlow's processes.
    for name in ("vars", "ema"):
      for value, expected in self.pairs(see, name, expect.pop(name, None)):
        self.system.same_values(value, expected)
        self.compared += 1
    for name, value in expect.items():
      assert name in see, f"unknown expectation {name!r} in {event}"
      self.same(see[name], value)

  def pairs(self, see, name, expected):
    if expected is None:
      return []
    assert len(see[name]) == len(expected), (name, see[name], expected)
    return zip(see[name], expected, strict=True)

  def compare_process(self, op, expect, see, observer):
    """Compares what a process has printed: done, and its view of the system."""
    obs = dict(expect["obs"])
    if not _OBSERVE.fullmatch(op) and not _KILL.fullmatch(op):
      self.said[observer] = observer not in see["blocked"]
      self.same(self.said[observer], expect["done"])
    elif _OBSERVE.fullmatch(op):
      self.same(self.said[observer], expect["done"])
    self.system.same_values(see["vars"][0], obs.pop("var"))
    seen = {
      "global_step": see["global_step"],
      "queue": see["queue_size"],
      "qclosed": False,
      "acc": see["num_accumulated"][0],
      "local_step": see["local_step"][str(observer)],
    }
    self.same(seen, obs)

  def same(self, seen, expected):
    assert seen == expected, (self.recording["id"], seen, expected)
    self.compared += 1
