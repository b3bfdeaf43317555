"""Replays TensorFlow's SyncReplicasOptimizer: strict rules, jitted sums.

The rules say which gradient counts where, and when a mean is taken; the
accumulators of `optax_dist` compute it under `jax.jit`; the update itself is
written out in numpy.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scenario_recordings as recorded

from optax_dist.sparse.indexed_slices import IndexedSlices
from optax_dist.tensorflow1 import accumulator, sparse_accumulator
from optax_dist.tensorflow1 import events as tf

_SLOTS = 4
_CAPACITY = 16
_PROSE = ("SR-ERR", "MP-A", "SR-CLOSE-RESTART", "SR-REWIND", "SR-TWO-OPT")

_apply = jax.jit(accumulator.apply)
_take = jax.jit(accumulator.take)
_apply_sparse = jax.jit(sparse_accumulator.apply)
_take_sparse = jax.jit(sparse_accumulator.take)


class Dense:
  """A variable, and the jitted accumulator of its gradients."""

  def __init__(self, value, dtype, config):
    self.value = recorded.array(value, dtype)
    self.state = accumulator.init(jnp.asarray(self.value), config["gs_init"])
    self.inner, self.lr = config["inner"], self.value.dtype.type(config["lr"])
    self.slots = [np.zeros_like(self.value), np.zeros_like(self.value)]
    self.updates = 0

  def push(self, gradient, local_step):
    gradient = jnp.asarray(recorded.array(gradient, self.value.dtype))
    self.state = _apply(self.state, gradient, local_step)

  def update(self, required):
    self.state, mean, taken = _take(self.state, required)
    assert taken
    mean, one = np.asarray(mean), self.value.dtype.type
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
  """A table, and the jitted accumulator of the rows of its gradients."""

  def __init__(self, value, dtype, config):
    self.value = recorded.array(value, dtype)
    self.state = sparse_accumulator.init(
      _CAPACITY,
      self.value.shape[1:],
      dtype,
      num_rows=sparse_accumulator.UNKNOWN_ROWS,
      global_step=config["gs_init"],
    )
    self.lr = self.value.dtype.type(config["lr"])

  def push(self, gradient, local_step):
    indices, values = gradient
    padded = np.full(_SLOTS, sparse_accumulator.UNKNOWN_ROWS, np.int32)
    padded[: len(indices)] = indices
    rows = np.zeros((_SLOTS, *self.value.shape[1:]), self.value.dtype)
    rows[: len(indices)] = recorded.array(values, self.value.dtype)
    slices = IndexedSlices(rows, padded, self.state.rows.dense_shape)
    self.state = _apply_sparse(self.state, slices, local_step)

  def update(self, required):
    self.state, mean, taken = _take_sparse(self.state, required)
    assert taken
    used = np.asarray(mean.indices) < sparse_accumulator.UNKNOWN_ROWS
    self.value = self.value.copy()
    for row, value in zip(
      np.asarray(mean.indices)[used], np.asarray(mean.values)[used], strict=True
    ):
      self.value[row] -= self.lr * value

  def broken(self, gradient):
    return max(gradient[0]) >= self.value.shape[0]


class Replay:
  """One system of replicas: rules, sums, and variables."""

  def __init__(self, config, **more):
    config = {"gs_init": 0, "inner": "GradientDescent", **config, **more}
    self.dtype = config.get("dtype", "float32")
    self.required = config["R"]
    sparse = config.get("sparse_vars", ())
    self.variables = [
      (Sparse if i in sparse else Dense)(value, self.dtype, config)
      for i, value in enumerate(config["init"])
    ]
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
    self.averaged = "variable_averages" in config

  def step(self, worker, gradients):
    self.gradients[worker] = gradients
    pairs = zip(self.variables, gradients, strict=True)
    broken = [i for i, (v, g) in enumerate(pairs) if v.broken(g)]
    return self.follow(self.system.worker_step(worker, broken=broken))

  def follow(self, moved):
    """Does with the values what the rules have decided; returns errors."""
    self.system, outcomes = moved
    errors = {}
    for outcome in outcomes:
      match outcome:
        case tf.Applied((worker, at), accepted, None, variable):
          target = self.variables[variable]
          before = int(target.state.count)
          target.push(self.gradients[worker][variable], at)
          assert int(target.state.count) == before + accepted
        case tf.Taken(variable, _, members):
          target = self.variables[variable]
          assert int(target.state.count) == len(members)
          target.update(self.required)
        case tf.Advanced():
          half = np.float32(0.5)
          self.averages = [
            a - (a - v.value) * half
            for a, v in zip(self.averages, self.variables, strict=True)
          ]
        case tf.StepFailed("chief", _):
          pass
        case tf.StepFailed(worker, error):
          errors[str(worker)] = error
    return errors

  def compare(self, expect, errors=()):
    seen = self.system.observe()
    got = {
      "global_step": seen.global_step,
      "queue_size": seen.queue_size,
      "num_accumulated": list(seen.num_accumulated),
      "blocked": list(seen.blocked),
      "local_step": {str(r): step for r, step in seen.local_step.items()},
      "errors": {r: error.split(":")[0] for r, error in dict(errors).items()},
    }
    expect = dict(expect)
    for value, expected in zip(
      [v.value for v in self.variables], expect.pop("vars", ()), strict=False
    ):
      recorded.same(value, expected, self.dtype)
    if self.averaged:
      for value, expected in zip(self.averages, expect.pop("ema"), strict=True):
        recorded.same(value, expected, self.dtype)
    named = expect.pop("errors", {})
    assert got.pop("errors") == {r: e.split(":")[0] for r, e in named.items()}
    assert {name: got[name] for name in expect} == expect


def _react(replay, event):
  """One event of a recording; returns the errors it caused."""
  worker = event.get("worker")
  match event["op"]:
    case "worker_step":
      ones = [1.0] * len(replay.variables)
      return replay.step(worker, event.get("grads", ones))
    case "release_gate":
      return replay.follow(replay.system.release_gate(worker, event["var"]))
    case "restart_worker_new_session":
      replay.system = replay.system.join(worker)
    case "chief_close":
      return replay.follow(replay.system.close())
    case op:
      assert op in ("observe_initial", "chief_state")
  return {}


@pytest.mark.parametrize(
  "id", [i for i in recorded.ids(*recorded.SYNC_REPLICAS) if i not in _PROSE]
)
def test_sync_replicas(id):
  recording = recorded.RECORDINGS[id]
  config = recording["config"]
  with jax.enable_x64(config.get("dtype") == "float64"):
    replay = Replay(config)
    for event in recording["events"]:
      errors = _react(replay, event)
      expect = event.get("expect")
      if event["op"] == "chief_state":
        assert event["should_stop"] == (not replay.system.running)
      elif event["op"] == "chief_close":
        assert expect["queue_closed"] == replay.system.queue.closed
      elif "done" in expect or set(expect) == {"error"}:
        # Only the class of the error is recorded here.
        (error,) = errors.values() if errors else (None,)
        assert (error and error.split(":")[0]) == expect["error"]
        assert expect.get("done", False) == (error is None)
        assert not replay.system.observe().blocked
      else:
        replay.compare(expect, errors)


def _expected(id):
  return [event.get("expect") for event in recorded.RECORDINGS[id]["events"]]


def test_a_worker_killed_while_it_waits():
  # MP-A: the death of its connection cancels its dequeue; its gradient stays.
  replay = Replay(recorded.RECORDINGS["MP-A"]["config"])
  replayed = 0
  for event in recorded.RECORDINGS["MP-A"]["events"]:
    op, expect = event["op"], event["expect"]
    if push := re.fullmatch(r"w(\d) push (\d+)", op):
      replay.step(int(push[1]), [float(push[2])])
    elif op == "after kill w1":
      replay.system = replay.system.lost(1)
    elif op == "w1 restarted":
      replay.system = replay.system.join(1)
    if "obs" not in expect:
      continue
    replayed += 1
    seen, obs = replay.system.observe(), expect["obs"]
    observer = 0 if "kill" in op else int(op[1])
    assert (seen.global_step, seen.queue_size, seen.num_accumulated) == (
      obs["global_step"],
      obs["queue"],
      (obs["acc"],),
    )
    assert seen.local_step[observer] == obs["local_step"]
    assert replay.system.queue.closed == obs["qclosed"]
    assert replay.variables[0].value == obs["var"]
    if expect["done"] is not None:
      assert (observer not in seen.blocked) == expect["done"]
  assert replayed == 8


def test_a_closed_queue_stays_closed_when_the_chief_restarts():
  # SR-CLOSE-RESTART.
  both, one, _, failed, restarted, last = _expected("SR-CLOSE-RESTART")
  replay = Replay(recorded.RECORDINGS["SR-CLOSE-RESTART"]["config"])
  replay.step(1, [1.0])
  replay.step(2, [1.0])
  replay.compare(both)
  replay.step(1, [1.0])
  assert [replay.system.observe().num_accumulated[0]] == [
    one["num_accumulated"]
  ]
  replay.follow(replay.system.close())
  errors = replay.step(2, [1.0])
  assert errors["2"].startswith(failed["w2_error"])
  # Without a checkpoint the variables and the step start anew.
  replay.variables[0].value = np.float32(0.0)
  replay.follow(replay.system.chief_init(0))
  replay.follow(replay.system.start_chief())
  assert restarted.pop("num_accumulated") == 0
  replay.compare({**restarted, "num_accumulated": [0]})
  errors = replay.step(0, [1.0])
  assert errors["0"].startswith(last["error"])


def test_a_rewound_step_lets_a_later_gradient_in():
  # SR-REWIND.
  rounds, rewound, early, last = _expected("SR-REWIND")
  replay = Replay(recorded.RECORDINGS["SR-REWIND"]["config"])
  for _ in range(3):
    replay.step(0, [1.0])
    replay.step(1, [1.0])
  replay.compare(rounds)
  replay.follow(replay.system.chief_init(0))
  for variable in replay.variables:
    variable.state = accumulator.set_global_step(variable.state, 0)
  replay.compare(rewound)
  replay.step(1, [10.0])
  replay.compare(early)
  replay.step(0, [20.0])
  replay.compare(last)


def test_two_optimizers_that_share_a_queue_block_each_other():
  # SR-TWO-OPT: TensorFlow names both queues "sync_token_q", so they are one.
  config = recorded.RECORDINGS["SR-TWO-OPT"]["config"]
  first, second = (tf.sync_replicas(config["R"], num_tokens=0) for _ in "ab")
  one, two = _expected("SR-TWO-OPT")
  first, _ = first.worker_step(0)
  assert list(first.observe().blocked) == one["blocked"]
  second, _ = second.with_queue(first.queue).worker_step(1)
  first = first.with_queue(second.queue)
  blocked = [*first.observe().blocked, *second.observe().blocked]
  assert blocked == two["blocked"]
  assert first.queue.waiting.size == len(blocked)
  assert first.global_step == second.global_step == two["global_step"]
