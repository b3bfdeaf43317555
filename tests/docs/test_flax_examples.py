"""Flax models, as in docs/flax_and_orbax.md: nnx.Optimizer, linen's TrainState.

However the model is written, the parameters after some steps are those of one
device that has the whole batch.
"""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import optax_dist

N = 4
_STEPS = 3
_STRATEGIES = {
  "cross_shard": lambda inner: optax.chain(
    optax_dist.cross_shard("data"), inner
  ),
  "sync_replicas": lambda inner: optax_dist.sync_replicas(
    inner, "data", replicas_to_aggregate=N - 1, total_num_replicas=N
  ),
}
_each = pytest.mark.parametrize("name", _STRATEGIES)


class Nnx(nnx.Module):
  def __init__(self, rngs):
    self.hidden = nnx.Linear(5, 8, rngs=rngs)
    self.out = nnx.Linear(8, 3, rngs=rngs)

  def __call__(self, x):
    return self.out(nnx.relu(self.hidden(x)))


class Linen(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(3)(nn.relu(nn.Dense(8)(x)))


def _inner():
  return optax.sgd(0.1, momentum=0.9)


def _loss(logits, labels):
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return jnp.mean(losses)


def _batches():
  rng = np.random.default_rng(0)
  for _ in range(_STEPS):
    yield (
      rng.normal(size=(4 * N, 5)).astype(np.float32),
      rng.integers(3, size=4 * N).astype(np.int32),
    )


def _mesh():
  return jax.make_mesh((N,), ("data",), devices=jax.devices()[:N])


def _place(tree, specs):
  return optax_dist.states.place(tree, _mesh(), specs)


def _of_those_who_come(batch, arrived):
  """Returns the part of the batch whose gradients count."""
  if arrived is None:
    return batch
  keep = np.repeat(arrived, 4)
  return tuple(x[keep] for x in batch)


def _arrived(name):
  return np.array([True, True, False, True]) if "sync" in name else None


@_each
def test_nnx_optimizer(name):
  arrived = _arrived(name)
  model = Nnx(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, _STRATEGIES[name](_inner()), wrt=nnx.Param)
  specs = jax.tree.map(lambda _: P(), optimizer)
  specs.opt_state = optax_dist.states.state_specs(optimizer.opt_state, "data")

  def loss_of(model, x, labels):
    return _loss(model(x), labels)

  def train_step(model, optimizer, x, labels, arrived):
    grads = nnx.grad(loss_of)(optax_dist.local_params(model, "data"), x, labels)
    kwargs = {} if arrived is None else {"arrived": arrived[0]}
    optimizer.update(model, grads, **kwargs)
    return model, optimizer

  mapped = jax.jit(
    jax.shard_map(
      train_step,
      mesh=_mesh(),
      in_specs=(P(), specs, P("data"), P("data"), P("data")),
      out_specs=(P(), specs),
    )
  )
  alone = nnx.Optimizer(Nnx(nnx.Rngs(0)), _inner(), wrt=nnx.Param)
  alone_model = Nnx(nnx.Rngs(0))
  model, optimizer = _place(model, P()), _place(optimizer, specs)
  for batch in _batches():
    shares = _place((*batch, arrived), P("data"))
    model, optimizer = mapped(model, optimizer, *shares)
    few = _of_those_who_come(batch, arrived)
    alone.update(alone_model, nnx.grad(loss_of)(alone_model, *few))
  assert int(optimizer.step[...]) == _STEPS
  chex.assert_trees_all_close(
    *(
      jax.device_get(nnx.to_pure_dict(nnx.state(m, nnx.Param)))
      for m in (model, alone_model)
    ),
    rtol=1e-5,
    atol=1e-6,
  )
  if arrived is not None:
    report = optax_dist.sync_report(optimizer.opt_state)
    assert report.accepted.tolist() == [_STEPS, _STEPS, 0, _STEPS]
    assert report.absent.tolist() == [0, 0, _STEPS, 0]


def _apply_gradients(state, grads, **kwargs):
  """As ``TrainState.apply_gradients``, which has no arguments for the update."""
  updates, opt_state = state.tx.update(
    grads, state.opt_state, state.params, **kwargs
  )
  return state.replace(
    step=state.step + 1,
    params=optax.apply_updates(state.params, updates),
    opt_state=opt_state,
  )


@_each
def test_linen_train_state(name):
  arrived = _arrived(name)
  params = Linen().init(jax.random.key(0), jnp.zeros((1, 5)))["params"]
  # One array each: TrainState starts with a Python integer as its step.
  state = TrainState.create(
    apply_fn=Linen().apply, params=params, tx=_STRATEGIES[name](_inner())
  ).replace(step=jnp.int32(0))
  specs = jax.tree.map(lambda _: P(), state)
  specs = specs.replace(
    opt_state=optax_dist.states.state_specs(state.opt_state, "data")
  )

  def loss_of(params, x, labels):
    return _loss(state.apply_fn({"params": params}, x), labels)

  def train_step(state, x, labels, arrived):
    own = optax_dist.local_params(state.params, "data")
    grads = jax.grad(loss_of)(own, x, labels)
    if arrived is None:
      return state.apply_gradients(grads=grads)
    return _apply_gradients(state, grads, arrived=arrived[0])

  mapped = jax.jit(
    jax.shard_map(
      train_step,
      mesh=_mesh(),
      in_specs=(specs, P("data"), P("data"), P("data")),
      out_specs=specs,
    )
  )
  alone = TrainState.create(apply_fn=state.apply_fn, params=params, tx=_inner())
  state = _place(state, specs)
  for batch in _batches():
    state = mapped(state, *_place((*batch, arrived), P("data")))
    few = _of_those_who_come(batch, arrived)
    alone = alone.apply_gradients(grads=jax.grad(loss_of)(alone.params, *few))
  assert int(state.step) == _STEPS
  chex.assert_trees_all_close(
    jax.device_get(state.params),
    jax.device_get(alone.params),
    rtol=1e-5,
    atol=1e-6,
  )
  if arrived is not None:
    assert optax_dist.sync_report(state.opt_state).absent.sum() == _STEPS


def test_elastic_averaging_of_an_nnx_model():
  """Replicas with separate models, around a center that can be called."""
  model = Nnx(nnx.Rngs(0))
  tx = optax_dist.elastic_average(
    _inner(), "data", num_replicas=N, communication_period=1, rho=0.0
  )
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  specs = jax.tree.map(lambda _: P(), optimizer)
  specs.opt_state = optax_dist.states.state_specs(optimizer.opt_state, "data")
  replicas = jax.tree.map(lambda x: jnp.stack([x] * N), model)

  def train_step(replicas, optimizer, x, labels):
    own = jax.tree.map(lambda x: x[0], replicas)
    grads = nnx.grad(lambda m: _loss(m(x), labels))(own)
    optimizer.update(own, grads)
    return jax.tree.map(lambda x: x[None], own), optimizer

  mapped = jax.jit(
    jax.shard_map(
      train_step,
      mesh=_mesh(),
      in_specs=(P("data"), specs, P("data"), P("data")),
      out_specs=(P("data"), specs),
    )
  )
  replicas, optimizer = _place(replicas, P("data")), _place(optimizer, specs)
  for batch in _batches():
    replicas, optimizer = mapped(replicas, optimizer, *_place(batch, P("data")))
  kernels = jax.device_get(replicas.out.kernel[...])
  spread = np.abs(kernels - kernels.mean(0)).max(axis=(1, 2))
  assert (spread > 1e-4).all()  # Each replica went its own way.
  center = nnx.clone(model)
  nnx.update(center, nnx.as_pure(optax_dist.center_params(optimizer.opt_state)))
  moved = jax.device_get(center.out.kernel[...] - model.out.kernel[...])
  assert np.abs(moved).max() > 1e-3
  assert center(np.zeros((2, 5), np.float32)).shape == (2, 3)
