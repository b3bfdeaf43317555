"""Tests of lazy updates by stock transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import optimizers
from optax_dist.optimizers._internal.row_wise import decay_and_add
from optax_dist.sparse import indexed_slices
from optax_dist.sparse.indexed_slices import IndexedSlices

_ROWS = 5


@pytest.fixture(autouse=True)
def _standard_promotion():
  """Stock Adam raises a number to the power of its integer count."""
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.mark.parametrize(
  "stock",
  [
    optax.adam(0.1),
    optax.lion(0.1),
    optax.adamw(0.1),
    optax.chain(optax.clip(0.5), optax.sgd(0.1, 0.9)),
  ],
  ids=["adam", "lion", "adamw", "chain"],
)
def test_equals_the_stock_rule_on_the_rows_alone(stock):
  params = {"table": jnp.arange(10.0).reshape(_ROWS, 2), "b": jnp.ones(3)}
  rows = jnp.array([3, 1])
  lazy = optimizers.row_wise(stock)
  part = {"table": params["table"][rows], "b": params["b"]}
  state, part_state = lazy.init(params), stock.init(part)
  assert jax.tree.structure(state) == jax.tree.structure(stock.init(params))
  start = params["table"]
  for step in range(3):
    values = jnp.full((2, 2), 0.1 * (step + 1))
    slices = IndexedSlices(values, rows, (_ROWS, 2))
    grads = {"table": slices, "b": jnp.ones(3)}
    updates, state = lazy.update(grads, state, params)
    params = indexed_slices.apply_updates(params, updates)
    part_grads = {"table": values, "b": jnp.ones(3)}
    updates, part_state = stock.update(part_grads, part_state, part)
    part = optax.apply_updates(part, updates)
  np.testing.assert_allclose(params["table"][rows], part["table"], rtol=1e-6)
  np.testing.assert_allclose(params["b"], part["b"], rtol=1e-6)
  others = jnp.array([0, 2, 4])
  np.testing.assert_array_equal(params["table"][others], start[others])


def test_dense_gradients_go_through_as_they_are():
  stock = optax.adam(0.1)
  params = {"w": jnp.ones(3)}
  got = optimizers.row_wise(stock).update(params, stock.init(params), params)
  want = stock.update(params, stock.init(params), params)
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_unused_slots_change_nothing():
  lazy = optimizers.row_wise(optax.sgd(0.1, 0.9))
  params = jnp.ones((_ROWS, 2))
  unused = IndexedSlices(jnp.ones((2, 2)), jnp.array([5, 5]), (_ROWS, 2))
  updates, state = lazy.update(unused, lazy.init(params), params)
  assert not updates.values.any()
  assert not updates.to_dense().any()
  assert not jnp.any(optax.tree.get(state, "trace"))


def test_passes_extra_args_on():
  def update(updates, state, params=None, *, scale, **extra_args):
    return jax.tree.map(lambda x: scale * x, updates), state

  inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
  lazy = optimizers.row_wise(inner)
  slices = IndexedSlices(jnp.ones((1, 2)), jnp.array([2]), (_ROWS, 2))
  updates, _ = lazy.update(slices, lazy.init(jnp.ones((_ROWS, 2))), scale=3.0)
  assert updates.values.tolist() == [[3.0, 3.0]]


def test_casts_gradients_to_the_parameter():
  slices = IndexedSlices(jnp.ones((1, 2)), jnp.array([2]), (_ROWS, 2))
  params = jnp.ones((_ROWS, 2), jnp.bfloat16)
  lazy = optimizers.row_wise(optax.sgd(0.1, 0.9))
  updates, state = lazy.update(slices, lazy.init(params), params)
  assert updates.dtype == jnp.bfloat16
  assert optax.tree.get(state, "trace").dtype == jnp.bfloat16


def test_decay_and_add_counts_repeated_rows_each():
  slices = IndexedSlices(jnp.ones((3, 1)), jnp.array([1, 1, 2]), (2, 1))
  average = decay_and_add(
    jnp.array([[4.0], [8.0]]), 0.5, slices, 2 * slices.values
  )
  assert average.tolist() == [[2.0], [6.0]]
