"""Tests of the wrappers of optax that fail around the transforms, put inside.

`docs/faq.md` has JAX's errors, which no code of this library sees.
"""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dist

N = 4
PARAMS = {"w": np.ones((3, 2), np.float32), "b": np.ones(2, np.float32)}
_LABELS = {"w": "train", "b": "freeze"}
_FAILING = {
  "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
  "mechanize": optax.contrib.mechanize,
  "partition": lambda tx: optax.partition(
    {"train": tx, "freeze": optax.set_to_zero()}, _LABELS
  ),
  "sam": lambda tx: optax.contrib.sam(
    tx, optax.chain(optax.contrib.normalize(), optax.sgd(0.1)), sync_period=2
  ),
}


def _gradients():
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: rng.normal(size=(N, *x.shape)).astype(np.float32), PARAMS
  )


def _run(tx):
  """Returns updates that all replicas have in common."""
  state = tx.init(PARAMS)
  specs = optax_dist.states.state_specs(state, maps.AXIS)
  run = jax.shard_map(
    lambda g, s, p: tx.update(jax.tree.map(lambda x: x[0], g), s, p)[0],
    mesh=maps.mesh(N),
    in_specs=(P(maps.AXIS), specs, P()),
    out_specs=P(),
  )
  return jax.jit(run)(_gradients(), state, PARAMS)


@jax.numpy_dtype_promotion("standard")
@pairwise.every_value(name=list(_FAILING), sync=[False, True])
def test_wrappers_work_inside(name, sync):
  inner = _FAILING[name](optax.sgd(0.1))
  mean = jax.tree.map(lambda x: x.mean(0), _gradients())
  expected, _ = inner.update(mean, inner.init(PARAMS), PARAMS)
  if sync:
    tx = optax_dist.sync_replicas(
      inner, maps.AXIS, replicas_to_aggregate=N, total_num_replicas=N
    )
  else:
    tx = optax.chain(optax_dist.cross_shard(maps.AXIS), inner)
  got = _run(tx)
  for key, x in expected.items():
    np.testing.assert_allclose(got[key], x, rtol=1e-5, atol=1e-6)


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("name", _FAILING)
def test_wrappers_around_cross_shard_are_refused_by_jax(name):
  """With the errors that the answers in the docs begin with."""
  tx = _FAILING[name](
    optax.chain(optax_dist.cross_shard(maps.AXIS), optax.sgd(0.1))
  )
  error = "must have equal output types|out_specs which require replication"
  with pytest.raises((TypeError, ValueError), match=error):
    _run(tx)


def test_unplaced_state_on_an_explicit_mesh_is_refused_with_the_remedy():
  """`shard_map` refuses it; `under_jit`, which calls it, says what to do."""
  mesh = jax.make_mesh((N,), (maps.AXIS,), axis_types=(AxisType.Explicit,))
  tx = optax_dist.under_jit(
    optax_dist.sync_replicas(
      optax.sgd(0.1),
      maps.AXIS,
      replicas_to_aggregate=N,
      total_num_replicas=N,
    ),
    maps.AXIS,
    mesh=mesh,
  )
  params = jax.device_put(jnp.ones(3), NamedSharding(mesh, P()))
  state = tx.init(params)
  gradients = jnp.ones((N, 3))
  with pytest.raises(
    ValueError, match=r"updates .* optax_dist.states.place\(updates"
  ):
    jax.jit(tx.update)(gradients, state, params)
  placed = optax_dist.states.place(gradients, mesh, P(maps.AXIS))
  unplaced = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
  with pytest.raises(
    ValueError, match=r"state.* optax_dist.states.place\(state"
  ):
    jax.jit(tx.update)(placed, unplaced, params)
  updates, _ = jax.jit(tx.update)(placed, state, params)
  np.testing.assert_allclose(updates, -0.1 * np.ones(3), rtol=1e-6)
