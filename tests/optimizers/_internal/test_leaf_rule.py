"""Tests of the base for one's own optimizer."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import optimizers
from optax_dist.sparse import IndexedSlices


def _sign(grad, param, slots, step):
  del param
  return -step.learning_rate * jnp.sign(grad), slots


def test_rule_may_have_slots_and_scalars():
  def rule(grad, param, slots, step):
    largest = jnp.maximum(slots["largest"], jnp.abs(grad))
    update = step.scalars["factor"] * param * largest
    return update, {"largest": largest}

  optimizer = optimizers.base_custom(
    rule,
    learning_rate=1.0,
    slots={"largest": 0.5},
    scalars={
      "factor": optimizers.ScalarRule(1.0, lambda value, step: value / 2)
    },
    needs_params=True,
  )
  params = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}
  state = optimizer.init(params)
  grads = {"a": jnp.array([-2.0, 0.1]), "b": jnp.array(1.0)}
  updates, state = optimizer.update(grads, state, params)
  assert updates["a"].tolist() == [2.0, 1.0]
  updates, state = optimizer.update(grads, state, params)
  assert updates["a"].tolist() == [1.0, 0.5]
  assert updates["b"] == 1.5
  assert optax.tree.get(state, "global_step") == 2
  assert optax.tree.get(state, "factor") == 0.25
  assert optax.tree.get(state, "largest")["a"].tolist() == [2.0, 0.5]
  with pytest.raises(ValueError, match="reads the parameters"):
    optimizer.update(grads, state)


def test_repeated_rows_are_applied_in_turn_or_summed():
  slices = IndexedSlices(
    jnp.array([[3.0], [-1.0], [1.0]]), jnp.array([1, 1, 0]), (3, 1)
  )
  for summed, want in ((False, 0.0), (True, -1.0)):
    optimizer = optimizers.base_custom(_sign, 1.0, sum_duplicates=summed)
    state = optimizer.init(jnp.zeros((3, 1)))
    updates, _ = optimizer.update(slices, state)
    assert updates.to_dense()[:, 0].tolist() == [-1.0, want, 0.0]


def test_a_sparse_rule_sees_the_whole_table():
  def sparse_rule(slices, param, slots, step):
    total = slots["total"] + slices.to_dense()
    return -step.learning_rate * total, {"total": total}

  optimizer = optimizers.base_custom(
    _sign, 0.5, slots={"total": 1.0}, sparse_apply_rule=sparse_rule
  )
  params = jnp.zeros((3, 1))
  slices = IndexedSlices(jnp.ones((2, 1)), jnp.array([1, 1]), (3, 1))
  updates, state = optimizer.update(slices, optimizer.init(params), params)
  assert updates[:, 0].tolist() == [-0.5, -1.5, -0.5]
  assert optax.tree.get(state, "total")[:, 0].tolist() == [1.0, 3.0, 1.0]


def test_the_rule_gets_extra_args_and_the_count():
  def rule(grad, param, slots, step):
    count = step.count.astype(grad.dtype)
    return grad * step.extra_args["scale"] + count, slots

  optimizer = optimizers.base_custom(rule, 1.0)
  state = optimizer.init(jnp.zeros(2))
  _, state = optimizer.update(jnp.ones(2), state, scale=2.0)
  updates, _ = optimizer.update(jnp.ones(2), state, scale=2.0)
  assert updates.tolist() == [3.0, 3.0]


def test_masked_leaves_are_left_out():
  params = {"a": jnp.ones(2), "b": jnp.ones(2)}
  optimizer = optax.masked(optimizers.adam(0.1), {"a": True, "b": False})
  state = optimizer.init(params)
  updates, state = optimizer.update(params, state, params)
  assert updates["b"] is params["b"]
  np.testing.assert_allclose(updates["a"], -0.1, rtol=1e-5)
