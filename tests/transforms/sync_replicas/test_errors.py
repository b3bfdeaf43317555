"""Tests of what sync_replicas refuses, when, and in which words."""

import functools

import every_transform
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest
import scattered
from flax.training.dynamic_scale import DynamicScale

import optax_dist

N = 4

_make = functools.partial(
  optax_dist.sync_replicas, optax.sgd(1.0), maps.AXIS, replicas_to_aggregate=2
)


@pytest.mark.parametrize(
  ("kwargs", "words"),
  [
    ({"variables_to_average": {}}, "needs `variable_averages`"),
    ({"num_updates": True}, "`num_updates` needs `variable_averages`"),
    (
      {"all_arrive": True, "sparse_capacity": lambda params: 8},
      "`all_arrive` is for dense gradients",
    ),
    (
      {"all_arrive": True, "staleness_weight": "inverse"},
      "`all_arrive` has no late gradients",
    ),
    # Their number travels as float32, which has no 2**24 + 1.
    ({"replicas_to_aggregate": 2**24 + 1}, "must be at most 16777216"),
  ],
)
def test_arguments_are_checked_at_construction(kwargs, words):
  with pytest.raises((TypeError, ValueError), match=words):
    _make(**kwargs)


def test_variables_to_average_must_have_the_structure_of_the_parameters():
  tx = _make(
    total_num_replicas=N,
    variable_averages=0.9,
    variables_to_average={"x": True},
  )
  with pytest.raises(ValueError, match="`mask` must be a pytree of boo"):
    tx.init(np.ones(2, np.float32))


@maps.tracked_map
def test_a_summed_gradient_can_not_be_dropped(map_name):
  tx = _make(total_num_replicas=N)
  step = lambda g: tx.update({"w": g}, tx.init({"w": g}))[0]
  with pytest.raises(
    ValueError, match=r"updates\['w'\].*already summed"
  ) as info:
    maps.run(map_name, step, maps.Replicated(np.float32(1.0)), size=N)
  assert "optax_dist.local_params(params, axis_name)" in str(info.value)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", ["sync_replicas", "sharded"])
def test_gradient_averaged_by_a_loss_scale_is_refused_by_name(name, scaled):
  """local_params, which was used, is no remedy."""
  tx = every_transform.make(name, optax.sgd(1.0), N)
  loss = lambda w, x: jnp.sum(w * x)

  def step(x):
    params = optax_dist.local_params(jnp.ones(2), maps.AXIS)
    if scaled:
      scaled_grad = DynamicScale().value_and_grad(loss, axis_name=maps.AXIS)
      _, _, _, gradient = scaled_grad(params, x)
    else:
      gradient = jax.lax.pmean(jax.grad(loss)(params, x), maps.AXIS)
    return tx.update(gradient, tx.init(params), params)[0]

  with pytest.raises(ValueError, match="DynamicScale") as info:
    maps.run("shard_map_vma", step, np.ones((N, 2), np.float32), size=N)
  assert "local_params" not in str(info.value)


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_of_a_summed_gradient_is_refused(check_vma):
  """It was averaged with the other replicas' shards, of other parameters."""
  tx = _make(total_num_replicas=N)
  with pytest.raises(ValueError, match=r"updates\['w'\] is one shard") as info:
    scattered.update(tx, N, check_vma)
  assert "cross_shard(..., param_specs=...)" in str(info.value)


@pytest.mark.parametrize(
  ("kwargs", "words"),
  [
    ({"arrived": np.ones(2, bool)}, r"`arrived` must be a scalar"),
    ({"arrived": 1.0}, r"`arrived` must be a scalar"),
    ({"local_step": 0.5}, r"`local_step` must be a scalar"),
  ],
)
def test_invalid_arguments_of_update_are_refused(kwargs, words):
  tx = _make(total_num_replicas=N)
  step = lambda g: tx.update(g, tx.init(0.0), **kwargs)[0]
  with pytest.raises(ValueError, match=words):
    maps.run("vmap", step, np.ones(N, np.float32), size=N)


def test_all_arrive_takes_no_mask():
  tx = _make(total_num_replicas=N, all_arrive=True)
  step = lambda g: tx.update(g, tx.init(0.0), arrived=True)[0]
  with pytest.raises(ValueError, match="neither `arrived` nor"):
    maps.run("vmap", step, np.ones(N, np.float32), size=N)


def test_all_arrive_takes_no_sparse_gradient():
  """A gradient with more rows than free slots was lost, and yet counted."""
  make = functools.partial(
    optax_dist.sync_replicas,
    optax_dist.optimizers.gradient_descent(1.0),
    maps.AXIS,
    replicas_to_aggregate=2 * N,
    total_num_replicas=N,
  )
  tx = make(all_arrive=True)
  # A state with slots, from a transformation that checks the gradients.
  state = make(sparse_capacity=2).init(np.zeros((9, 1), np.float32))
  state_axes = optax_dist.states.state_axes(state)

  def step(state, values):
    rows = optax_dist.IndexedSlices(values, jnp.array([0, 1]), (9, 1))
    return tx.update(rows, state)[0]

  run = jax.vmap(step, in_axes=(state_axes, 0), axis_name=maps.AXIS)
  with pytest.raises(ValueError, match="`all_arrive` is for dense gradients"):
    run(state, np.ones((N, 2, 1), np.float32))


def test_averages_need_the_parameters():
  tx = _make(total_num_replicas=N, variable_averages=0.9)
  step = lambda g: tx.update(g, tx.init(0.0))[0]
  with pytest.raises(ValueError, match="params_ema needs the parameters"):
    maps.run("vmap", step, np.ones(N, np.float32), size=N)
