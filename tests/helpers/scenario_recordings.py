"""Recordings of TensorFlow 2.21 (tests/scenarios), and how to compare them.

`pytest --scenarios PATH`, or the environment variable OPTAX_DIST_SCENARIOS,
replays another file of the same format.
"""

import json
import os
import pathlib

import numpy as np

from tests.tensorflow1 import events

BUNDLED = pathlib.Path(__file__).parents[1] / "scenarios" / "scenarios.json"
PATH = pathlib.Path(os.environ.get("OPTAX_DIST_SCENARIOS") or BUNDLED)
FORMAT = "h3-scenarios/1"

ACCUMULATORS = ("conditional_accumulator", "conditional_accumulator+fifo_queue")
SPARSE_ACCUMULATORS = ("sparse_conditional_accumulator",)
SYNC_REPLICAS = ("sync_replicas",)
STALE_GRADIENTS = ("drop_stale_gradient",)
CROSS_SHARD = ("cross_shard",)
ELASTIC = ("elastic_average",)
AGN = ("agn",)
SYSTEMS = (
  *ACCUMULATORS,
  *SPARSE_ACCUMULATORS,
  *SYNC_REPLICAS,
  *STALE_GRADIENTS,
  *CROSS_SHARD,
  *ELASTIC,
  *AGN,
)


def recordings(path=PATH):
  """All recordings of a file, by id."""
  with path.open() as file:
    content = json.load(file)
  if content["format"] != FORMAT:
    raise ValueError(
      f"{path} must have the format {FORMAT!r}, got {content['format']!r}"
    )
  result = [*content.get("scenarios", ()), *content.get("traces", ())]
  by_id = {r["id"]: r for r in result}
  if len(by_id) != len(result):
    raise ValueError(f"{path} has several recordings of one id")
  unknown = {r["system"] for r in result} - set(SYSTEMS)
  if unknown:
    raise ValueError(f"{path} has recordings of unknown systems: {unknown}")
  return by_id


RECORDINGS = recordings()


def not_replayed(recording):
  """Why no test replays the recording, or None."""
  if recording["config"].get("nondeterministic"):
    return "TensorFlow itself is not deterministic here"
  if any(
    (event.get("expect") or {}).get("ready") == "ps"
    for event in recording["events"]
    if isinstance(event.get("expect"), dict)
  ):
    return (
      "the parameter server's process is killed, what was pushed before is not"
      " recorded, and TensorFlow's retries depend on time"
    )
  return None


def ids(*systems):
  """The ids of the recordings of some systems that are replayed."""
  return [
    id
    for id, recording in RECORDINGS.items()
    if recording["system"] in systems and not_replayed(recording) is None
  ]


def array(value, dtype):
  """A recorded value; non-finite numbers are recorded as strings."""
  return np.asarray(np.asarray(value, np.float64), dtype)


def same(actual, recorded, dtype):
  """Asserts that two arrays agree to the bit, but for which NaN they hold."""
  expected = array(recorded, dtype)
  actual = np.asarray(actual)
  assert actual.dtype == expected.dtype
  assert actual.shape == expected.shape
  np.testing.assert_array_equal(actual, expected)
  finite = ~np.isnan(expected)
  np.testing.assert_array_equal(
    np.signbit(actual)[finite], np.signbit(expected)[finite]
  )


class AccumulatorReplay:
  """Runs a recording of accumulators and a queue through the model of TensorFlow."""

  def __init__(self, recording):
    config = recording["config"]
    self.recording = recording
    self.dtype = config["dtype"]
    self.reduction = config.get("reduction_type", "MEAN")
    shapes = config.get("shapes", [config.get("shape")])
    step = config.get("initial_step", config.get("initial_accumulator_step", 0))
    self.accumulators = [
      events.Accumulator(shape=shape, step=step) for shape in shapes
    ]
    self.sums = [events.DenseSum(step) for _ in shapes]
    self.queue = events.TokenQueue(name="tq")
    self.several = "num_vars" in config

  def run(self):
    """Replays every event, comparing all that is recorded."""
    for event in self.recording["events"]:
      var = event.get("var", 0)
      completed, error = self.react(event, var)
      self.compare_completed(completed, event)
      assert error == event.get("error"), event
      self.compare_state(event["expect"])

  def react(self, event, var):
    """One event; returns what completed, and the error of the event itself."""
    op = event["op"]
    if op in ("enqueue_many", "dequeue", "close_queue"):
      self.queue, out = {
        "enqueue_many": lambda: self.queue.enqueue_many(event["tokens"]),
        "dequeue": lambda: self.queue.dequeue(event["id"]),
        "close_queue": self.queue.close,
      }[op]()
      return [(None, done) for done in out], None
    if op == "close_session":
      return self.close(), None
    books = self.accumulators[var]
    shape = np.shape(event["value"]) if op == "apply" else None
    self.accumulators[var], out = {
      "apply": lambda: books.apply(event["local_step"], id(event), shape),
      "take": lambda: books.take(event["id"], event["num_required"]),
      "take_with_timeout": lambda: books.take_with_timeout(
        "timed", event["num_required"]
      ),
      "set_global_step": lambda: books.set_global_step(event["value"]),
    }[op]()
    error = None
    if op == "apply":
      applied, *out = out
      error = applied.error
      if error is None:
        before = self.sums[var].count
        value = array(event["value"], self.dtype)
        self.sums[var].apply(value, event["local_step"])
        assert self.sums[var].count == before + applied.accepted
    if op == "set_global_step":
      self.sums[var].step = event["value"]
    if op == "take_with_timeout":
      out, error = (), out[0].error
    return [(var, done) for done in out], error

  def close(self):
    """Cancels all that waits; the recorded order of ids is by id."""
    completed = []
    for var, books in enumerate(self.accumulators):
      self.accumulators[var], out = books.close()
      completed += [(var, done) for done in out]
    for id in self.queue.pending:
      self.queue, out = self.queue.cancel(id)
      completed += [(None, done) for done in out]
    return sorted(completed, key=lambda item: item[1].id)

  def compare_completed(self, completed, event):
    recorded = event["completed"]
    assert [done.id for _, done in completed] == [r["id"] for r in recorded]
    for (var, done), expected in zip(completed, recorded, strict=True):
      assert done.kind == expected.get("kind", "take")
      if event["op"] == "close_session":
        # Whether the run or the op is named as cancelled is a matter of time.
        assert done.error.startswith("CancelledError")
        assert expected["error"].startswith("CancelledError")
        continue
      assert done.error == expected.get("error")
      if done.kind == "dequeue":
        assert done.value == expected.get("value")
      elif done.error is None:
        assert self.sums[var].count == len(done.value)
        mean = self.sums[var].take(self.reduction)
        assert self.sums[var].step == done.step + 1
        same(mean, expected["value"], self.dtype)

  def compare_state(self, expect):
    counts = [books.count for books in self.accumulators]
    waiting = [id for books in self.accumulators for id in books.pending]
    seen = {
      "num_accumulated": counts if self.several else counts[0],
      "pending": sorted([*waiting, *self.queue.pending]),
      "queue_size": self.queue.size,
    }
    assert {name: seen[name] for name in expect} == expect


def sparse_shape(values, event, config):
  """The shape of recorded values, which an empty list does not show."""
  if np.size(values) or "values_shape" in event:
    return tuple(event.get("values_shape", np.shape(values)))
  if np.ndim(values) and "width" in config:
    return (0, config["width"])
  return np.shape(values)


class SparseReplay:
  """Runs a recording of a sparse accumulator through the model of TensorFlow."""

  def __init__(self, recording):
    self.recording = recording
    self.config = recording["config"]
    shape = self.config["shape"]
    self.books = events.SparseAccumulator(shape=() if shape == "()" else shape)
    self.sum = events.SparseSum()

  def run(self):
    """Replays every event, comparing all that is recorded."""
    for event in self.recording["events"]:
      {"apply": self.apply, "take": self.take}[event["op"]](event)
      assert {"num_accumulated": self.books.count} == event["expect"]

  def apply(self, event):
    shape = sparse_shape(event["values"], event, self.config)
    self.books, out = self.books.apply_slices(
      event["local_step"],
      id(event),
      indices=event["indices"],
      values_shape=shape,
      dense_shape=event.get("dense_shape"),
    )
    assert out[0].error == event.get("error"), event
    malformed = np.ndim(event["indices"]) != 1
    if out[0].error is None and not malformed:
      before = self.sum.count
      values = array(event["values"], self.config["dtype"]).reshape(shape)
      self.sum.apply(event["indices"], values, event["local_step"])
      assert self.sum.count == before + out[0].accepted

  def take(self, event):
    self.books, (done,) = self.books.take("t", event["num_required"])
    assert done.error is None
    assert list(done.shape) == event["result"]["shape"]
    indices, values = self.sum.take(self.config.get("reduction_type", "MEAN"))
    assert self.sum.step == self.books.step
    assert indices.tolist() == event["result"]["indices"]
    values_recorded = np.reshape(event["result"]["values"], values.shape)
    same(values, values_recorded, self.config["dtype"])
