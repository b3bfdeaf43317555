"""A recording of SyncReplicasOptimizer through the `sync_replicas` transform.

TensorFlow's tokens say which gradient comes when, and at which local step; the
transform accepts or drops it, adds up, steps and averages by itself. Each push
is a tick at which one replica has arrived.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scenario_recordings as recorded
import sync_replicas_recordings as sync

import optax_dist
from optax_dist import optimizers
from optax_dist.sparse.indexed_slices import IndexedSlices

_SLOTS = 4
_CAPACITY = 16


def not_replayed(recording):
  """Why a transform cannot do what the recording has, or None."""
  config = recording["config"]
  if config.get("gate_vars"):
    return "replicas push one variable at a time; a tick has whole gradients"
  if any(e["op"].startswith("chief_close") for e in recording["events"]):
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


class TransformSystem(sync.StrictSystem):
  """TensorFlow's order of events, and the transform's everything else."""

  def __init__(self, config):
    sparse = config.get("sparse_vars", ())
    self.params = [
      jnp.asarray(recorded.array(v, config.get("dtype", "float32")))
      for v in config["init"]
    ]
    self.size = config["num_workers"]
    self.tx, run, runs = _program(
      config["inner"],
      config["lr"],
      self.size,
      config["R"],
      tuple(i in sparse for i in range(len(config["init"]))),
      "variable_averages" in config,
      config.get("dtype", "float32"),
    )
    state = self.tx.init(self.params)
    self.state = self.set_step(state, config["gs_init"])
    axes = optax_dist.states.state_axes(state)
    self.run = runs.setdefault(repr(axes), run(axes))
    super().__init__(config)

  def set_step(self, state, step):
    own = state.replica.value
    own = own._replace(local_step=jnp.full_like(own.local_step, step))
    return state._replace(
      global_step=jnp.full_like(state.global_step, step),
      replica=type(state.replica)(own),
    )

  def gradient(self, i, value):
    param = self.params[i]
    if not isinstance(self.variables[i], sync.Sparse):
      return jnp.asarray(recorded.array(value, param.dtype))
    indices, rows = value
    padded = np.full(_SLOTS, param.shape[0], np.int32)
    padded[: len(indices)] = indices
    values = np.zeros((_SLOTS, *param.shape[1:]), param.dtype)
    values[: len(indices)] = recorded.array(rows, param.dtype)
    return IndexedSlices(values, padded, param.shape)

  def applied(self, worker, at, accepted, variable):
    if variable != len(self.variables) - 1:
      return  # The last variable's push completes the gradient.
    gradients = [
      self.gradient(i, g) for i, g in enumerate(self.gradients[worker])
    ]
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

  def taken(self, variable, members):
    pass

  def advanced(self):
    pass

  def rewind(self, step):
    self.state = self.set_step(self.state, step)
    return super().rewind(step)

  def see(self):
    own = self.state.replica.value
    count = int(np.sum(own.num_accumulated))
    seen = super().see()
    averaged = None
    if "variable_averages" in self.config:
      averaged = optax_dist.averaged_params(self.state, self.params)
    return {
      **seen,
      "global_step": int(self.state.global_step),
      "num_accumulated": [count] * len(self.variables),
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
