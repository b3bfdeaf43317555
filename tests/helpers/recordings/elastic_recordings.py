"""Recordings of TensorFlow's ElasticAverageOptimizer: which, and their form."""

import numpy as np
from scenario_recordings import BUNDLED, RECORDINGS, recordings

ELASTIC = {
  id: recording
  for id, recording in RECORDINGS.items()
  if recording["system"] == "elastic_average"
}
# Workers that take one step after the other; every number of every step is in
# the recording.
STEPS = tuple(
  id
  for id, recording in ELASTIC.items()
  if {e["op"] for e in recording["events"]}
  <= {"observe_initial", "worker_step"}
)
# Each has a test of its own, so they are of the file that the tests come with.
OF_FACTS = recordings(BUNDLED)
# Single facts: the defaults, a variable without a gradient, an embedding. Some
# are of errors in TensorFlow; their tests ask for what is right.
FACTS = {
  "ctor",
  "run",
  "compute_gradients",
  "assign b=7 then compute_gradients",
  "step",
  "3 steps",
  "save",
  "locals:=100, global_x:=-5, restore",
  "init",
  "get_init_op",
  "start both, no device scope",
  "start both, MonitoredTrainingSession under /job:ps",
  "restart w1",
  "variable not created through the getter",
  "get_variable(trainable=False) with default collections under the getter",
  "get_init_op with no trainable variables",
  "all grads None",
  "swapping_saver with empty map",
  "resource global_step passed",
  # Which machine TensorFlow's placer puts a variable on; here the sharding of
  # an array is the caller's.
  "v,w with 2 ps",
}
# Of EA-17, the events with a counterpart; the others are errors of TensorFlow's
# graph collections and of its variable getter, which are not there.
EVENTS_OF_EA_17 = (
  "get_init_op with no trainable variables",
  "swapping_saver with empty map",
)


class Replay:
  """A recording of steps: its start, the gradient of each, what follows.

  Attributes:
    period, rate, rho, lr: the arguments that were in effect.
    start: the variables at the start.
    workers: how many there are.
  """

  def __init__(self, id):
    recording = ELASTIC[id]
    config = recording["config"]
    self.events = recording["events"]
    first = self.events[0]["expect"]
    self.start = self.variables(first["global_center"])
    self.workers = len(first["local"])
    self.period = config.get("period", config.get("communication_period"))
    self.rate = config["effective_moving_rate"]
    self.lr = config["lr"]
    # Gradients that are fed do not pass through TensorFlow's compute_gradients,
    # where the distance is added.
    fed = any("grads" in event for event in self.events)
    self.rho = 0.0 if fed else config["effective_rho"]
    self.counts_exchanges = config.get("use_gs", True)
    # The loss is of the first variable only where the second one's target is
    # fed, and TensorFlow's description says so.
    self.only_first = "only v0 appears in the loss" in recording["description"]

  @staticmethod
  def variables(values):
    return [np.asarray(value, np.float32) for value in values]

  def gradients(self, event, params):
    """The gradients of a step: fed, or of the squared distance to what is."""
    if "grads" in event:
      return self.variables(event["grads"])
    targets = self.variables(event.get("feeds", event.get("x_feed")))
    gradients = [
      np.asarray(x) - t for x, t in zip(params, targets, strict=True)
    ]
    if self.only_first:  # The loss is of the first variable only.
      gradients[1:] = [np.zeros_like(g) for g in gradients[1:]]
    return gradients

  def steps(self):
    """The events in which a worker takes a step."""
    assert self.events[0]["op"] == "observe_initial"
    for event in self.events[1:]:
      assert event["op"] == "worker_step", f"unknown op {event['op']!r}"
      yield event["worker"], event

  def check_start(self, compare, **seen):
    """Compares every worker's start state, and the center's."""
    for worker in range(self.workers):
      self.check(self.events[0], worker, compare, **seen)

  def check(self, event, worker, compare, **seen):
    """Compares what is seen of a worker, and of the center, with the recording."""
    expect = event["expect"]
    known = {"local", "local_center", "local_step"}
    known |= {"global_center", "global_step"}
    assert set(expect) <= known, f"unknown expectations in {event}"
    for name in ("local", "local_center"):
      for got, recorded in zip(
        seen[name], expect[name][str(worker)], strict=True
      ):
        compare(got, np.asarray(recorded, np.float32))
    for got, recorded in zip(
      seen["center"], expect["global_center"], strict=True
    ):
      compare(got, np.asarray(recorded, np.float32))
    assert seen["local_step"] == expect["local_step"][str(worker)]
    if self.counts_exchanges and expect["global_step"] is not None:
      assert seen["global_step"] == expect["global_step"]
