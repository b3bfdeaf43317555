"""A recording of SyncReplicasOptimizer through the `sync_replicas` transform.

TensorFlow's tokens say which gradient comes when, and at which local step; the
transform accepts or drops it, adds up, steps and averages by itself. Each push
is a tick at which one replica has arrived.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import scenario_recordings as recorded

import optax_dist
from optax_dist import optimizers
from optax_dist.sparse import IndexedSlices

_TWO_OPTIMIZERS = re.compile(r"w\d+ opt[A-Z] step")
_SLOTS = 4
_CAPACITY = 16


def not_replayed(recording):
  """Why a transform cannot do what the recording has, or None."""
  config, ops = recording["config"], [e["op"] for e in recording["events"]]
  if "R" not in config:
    return "errors of TensorFlow's constructor: tokens, graphs, names, devices"
  if any(_TWO_OPTIMIZERS.fullmatch(op) for op in ops):
    return "TensorFlow names both queues alike, and so they block each other"
  if config.get("gate_vars"):
    return "replicas push one variable at a time; a tick has whole gradients"
  if any(op.startswith("chief_close") for op in ops):
    return "the chief ends and workers go on; a transform has no chief"
  for event in recording["events"]:
    for i in config.get("sparse_vars", ()):
      if not event.get("grads"):
        continue
      indices = event["grads"][i][0]
      if sorted(set(indices)) != indices:
        return (
          "TensorFlow does not add up repeated or unsorted rows; the transform"
          " does"
        )
      if max(indices) >= len(config["init"][i]):
        return "a row that is not there kills TensorFlow's chief"
  return None


def _inner(config):
  name, lr = config["inner"], config["lr"]
  if name.startswith("GradientDescent"):
    return optimizers.gradient_descent(lr)
  if name.startswith("Momentum(lr=1,momentum=0.9)"):
    return optimizers.momentum(lr, 0.9)
  assert name.startswith("Adam(lr=0.1,b1=0.9,b2=0.999,eps=1e-8")
  return optimizers.adam(0.1, 0.9, 0.999, 1e-8)


@functools.cache
def _program(inner, lr, size, needed, sparse, averages, dtype):
  tx = optax_dist.sync_replicas(
    _inner({"inner": inner, "lr": lr}),
    "data",
    replicas_to_aggregate=needed,
    total_num_replicas=size,
    reject_nonfinite=False,
    accumulator_dtype=dtype,  # TensorFlow sums in the gradient's own.
    variable_averages=0.5 if averages else None,
    sparse_capacity=[_CAPACITY if s else None for s in sparse]
    if any(sparse)
    else None,
  )

  def step(state, params, gradients, arrived, local_step):
    updates, state = tx.update(
      gradients, state, params, arrived=arrived, local_step=local_step
    )
    return optax_dist.apply_updates(params, updates), state

  def run(axes):
    mapped = jax.vmap(
      step,
      in_axes=(axes, None, None, 0, None),
      out_axes=(0, axes),
      axis_name="data",
    )
    return jax.jit(mapped)

  return tx, run, {}


class Order:
  """TensorFlow's order of events: which worker pushes at which step, and which waits.

  A step takes gradients of its own step or later ones, and gives each replica a
  token of the next one; the tokens wait in a queue for whoever dequeues first.
  """

  def __init__(self, config):
    self.needed = config["R"]
    self.each = max(config["total"], self.needed)
    self.global_step, self.count = config["gs_init"], 0
    self.tokens, self.waiting = [], []
    self.local_step = {}
    # The session of each worker; the token of an abandoned one is lost.
    self.sessions, self.started = {}, 0
    for worker in config.get("initially_started", range(config["num_workers"])):
      self.join(worker)
    self.enqueue_first(config["num_tokens"])

  @property
  def blocked(self):
    """The workers whose step has not returned."""
    waiting = sorted(self.waiting)
    return [w for w, session in waiting if self.sessions.get(w) == session]

  def join(self, worker):
    """Starts a session of a worker, also if an earlier one still waits."""
    self.started += 1
    self.sessions[worker] = self.started
    self.local_step[worker] = self.global_step

  def lost(self, worker):
    """Kills a worker: it waits no longer, and its gradients stay."""
    del self.local_step[worker]
    mine = worker, self.sessions.pop(worker)
    self.waiting = [one for one in self.waiting if one != mine]

  def push(self, worker):
    """A gradient; returns its step, and whether it counts."""
    assert worker in self.local_step
    assert worker not in self.blocked
    at = self.local_step[worker]
    accepted = at >= self.global_step
    self.count += accepted
    if self.count == self.needed:
      self.count = 0
      self.global_step += 1
      self.enqueue(self.each)
    self.waiting.append((worker, self.sessions[worker]))
    self.serve()
    return at, accepted

  def enqueue_first(self, number):
    """The initial tokens; -1 for as many as a step takes gradients."""
    self.enqueue(self.needed if number == -1 else number)

  def enqueue(self, number):
    self.tokens += [self.global_step] * number
    self.serve()

  def serve(self):
    while self.tokens and self.waiting:
      worker, session = self.waiting.pop(0)
      token = self.tokens.pop(0)
      if self.sessions.get(worker) == session:
        self.local_step[worker] = token


class TransformSystem:
  """TensorFlow's order of events, and the transform's everything else."""

  def __init__(self, config):
    self.config, self.dtype = config, config.get("dtype", "float32")
    self.order = Order(config)
    self.sparse = config.get("sparse_vars", ())
    self.params = [
      jnp.asarray(recorded.array(v, self.dtype)) for v in config["init"]
    ]
    self.size = config["num_workers"]
    self.tx, run, runs = _program(
      config["inner"],
      config["lr"],
      self.size,
      config["R"],
      tuple(i in self.sparse for i in range(len(config["init"]))),
      "variable_averages" in config,
      self.dtype,
    )
    state = self.tx.init(self.params)
    self.state = self.set_step(state, config["gs_init"])
    axes = optax_dist.states.state_axes(state)
    self.run = runs.setdefault(repr(axes), run(axes))

  def set_step(self, state, step):
    own = state.replica.value
    own = own._replace(local_step=jnp.full_like(own.local_step, step))
    return state._replace(
      global_step=jnp.full_like(state.global_step, step),
      replica=type(state.replica)(own),
    )

  def gradient(self, i, value):
    param = self.params[i]
    if i not in self.sparse:
      return jnp.asarray(recorded.array(value, param.dtype))
    indices, rows = value
    padded = np.full(_SLOTS, param.shape[0], np.int32)
    padded[: len(indices)] = indices
    values = np.zeros((_SLOTS, *param.shape[1:]), param.dtype)
    values[: len(indices)] = recorded.array(rows, param.dtype)
    return IndexedSlices(values, padded, param.shape)

  def step(self, worker, gradients):
    at, accepted = self.order.push(worker)
    gradients = [self.gradient(i, g) for i, g in enumerate(gradients)]
    before = optax_dist.sync_report(self.state)
    arrived = np.arange(self.size) == worker
    params, self.state = self.run(
      self.state, self.params, gradients, arrived, np.int32(at)
    )
    for x in params:  # Equal on all replicas.
      np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
    self.params = [x[0] for x in params]
    after = optax_dist.sync_report(self.state)
    moved = np.sum(after.accepted) - np.sum(before.accepted)
    assert moved == accepted, (
      "the transform and TensorFlow differ in what counts"
    )
    stale = np.sum(after.dropped["stale"]) - np.sum(before.dropped["stale"])
    assert stale == (not accepted)

  def restart_chief(self):
    """Restarts the coordinator, with the checkpoint of the last step."""
    self.order.lost(0)
    self.order.join(0)
    self.rewind(self.order.global_step)
    self.order.enqueue_first(self.config["num_tokens"])

  def rewind(self, step):
    """Sets the global step and worker 0's; what is accumulated stays."""
    self.order.global_step = self.order.local_step[0] = step
    self.state = self.set_step(self.state, step)

  def see(self):
    own = self.state.replica.value
    averaged = None
    if "variable_averages" in self.config:
      averaged = optax_dist.averaged_params(self.state, self.params)
    count = int(np.sum(own.num_accumulated))
    return {
      "global_step": int(self.state.global_step),
      "queue_size": len(self.order.tokens),
      "num_accumulated": [count] * len(self.params),
      "blocked": self.order.blocked,
      "local_step": {str(w): s for w, s in self.order.local_step.items()},
      "vars": self.params,
      "ema": averaged,
    }

  def same_values(self, value, expected):
    # The transform adds up by replica first, TensorFlow in order of arrival.
    rtol = {"float16": 2e-3, "float64": 1e-15}.get(self.dtype, 1e-6)
    np.testing.assert_allclose(
      np.asarray(value, np.float64),
      recorded.array(expected, np.float64),
      rtol=rtol,
      atol=rtol,
    )
