"""Tests of the properties of every optimizer."""

import functools
import pathlib
import re

import every_optimizer
import hypothesis
import hypothesis.strategies as st
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from optax_dist import optimizers
from optax_dist.sparse import IndexedSlices, apply_updates, map_values
from optax_dist.states import slots

_PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/optimizers.md"
ROWS = 7
_PARAMS = {
  "table": np.linspace(-1, 1, 2 * ROWS, dtype=np.float32).reshape(ROWS, 2),
  "bias": np.array([0.5, -2.0, 3.0], np.float32),
}
_GRADS = {
  "table": np.sin(np.arange(2 * ROWS, dtype=np.float32)).reshape(ROWS, 2),
  "bias": np.array([0.1, 0.2, -0.3], np.float32),
}

# Sparse gradients: "lazy" changes touched rows and their slots alone, "moves"
# decays the averages of all rows but moves the touched ones alone, "dense" is
# the dense rule on the dense gradient.
_SPARSE = {
  "adadelta": "lazy",
  "adagrad": "lazy",
  "adagrad_da": "lazy",
  "adam": "dense",
  "amsgrad": "lazy",
  "custom_adam": "lazy",
  "custom_gradient_descent": "lazy",
  "ftrl": "lazy",
  "grad_variance_scaled": "moves",
  "gradient_descent": "lazy",
  "keras_sgd": "lazy",
  "keras_rmsprop": "moves",
  "keras_adagrad": "lazy",
  "keras_adam": "dense",
  "keras_nadam": "moves",
  "keras_adamax": "lazy",
  "momentum": "lazy",
  "nadam": "moves",
  "neural_optimizer1": "moves",
  "normalized_sgd": "lazy",
  "proximal_adagrad": "lazy",
  "proximal_gradient_descent": "lazy",
  "rmsprop": "lazy",
}
# Where an untouched row is one with a zero gradient, lazy is dense.
_LAZY_IS_DENSE = (
  "adagrad",
  "custom_gradient_descent",
  "gradient_descent",
  "keras_sgd",
  "keras_adagrad",
)
# Repeated indices are not added up first.
_ONE_BY_ONE = ("grad_variance_scaled", "neural_optimizer1", "normalized_sgd")


def test_tables_cover_every_optimizer():
  assert set(_SPARSE) == set(every_optimizer.BY_NAME)
  functions = {
    "keras" if name.startswith("keras_") else name
    for name in every_optimizer.BY_NAME
  }
  others = {
    "base_custom",
    "from_returnn_config",
    "returnn_class_names",
    "returnn_learning_rates",
  }
  assert functions == {x for x in optimizers.__all__ if x.islower()} - others


def test_page_lists_the_same_sparse_semantics():
  """The last column but one of the page's table of rules, and Keras's last."""
  text = _PAGE.read_text("utf-8")
  kinds = {
    "lazy": "lazy",
    "norm of the values as given": "lazy",
    "equal to dense": "dense",
    "all rows' averages decay": "moves",
    "as `neural_optimizer1`": "moves",
    "μ ≠ 0: lazy; else all rows' averages decay": "moves",
  }
  for name, kind in _SPARSE.items():
    code = f'`"{name[6:]}", ' if name.startswith("keras_") else f"`{name}("
    rows = [x for x in text.splitlines() if x.lower().startswith(f"| {code}")]
    assert len(rows) == 1, name
    # The rows of Keras end without a source.
    place = -2 if name.startswith("keras_") else -3
    cell = re.split(r"(?<!\\)\|", rows[0])[place].strip()
    said = next(x for x in sorted(kinds, reverse=True) if cell.startswith(x))
    assert kinds[said] == kind, name
    assert name in _LAZY_IS_DENSE or "= dense" not in cell, name


@functools.cache
def _program(name):
  """One jitted function for all that is compared: compiling takes longest.

  It applies a dense gradient, and then another one: sparse, as the dense array
  that it stands for, and without the other parameter's gradient.
  """
  optimizer = every_optimizer.BY_NAME[name](0.1)

  def step(carry, grads):
    params, state = carry
    updates, state = optimizer.update(grads, state, params)
    return apply_updates(params, updates), state

  def run(sparse):
    first = step((_PARAMS, optimizer.init(_PARAMS)), _GRADS)
    bias = _GRADS["bias"]
    return {
      "first": first,
      "sparse": step(first, {"table": sparse, "bias": bias}),
      "dense": step(first, {"table": sparse.to_dense(), "bias": bias}),
      "none": step(first, {"table": sparse, "bias": None}),
    }

  return jax.jit(run)


def _sparse(indices):
  """A sparse gradient whose values depend on the row and the repetition."""
  indices = np.array(indices, np.int32)
  values = np.cos(np.arange(2 * len(indices), dtype=np.float32) + 1)
  values = values.reshape(-1, 2)
  values[indices == ROWS] = 0.0
  return IndexedSlices(values, indices, (ROWS, 2))


@pytest.mark.parametrize("name", _SPARSE)
def test_sparse_semantics_are_as_listed(name):
  results = _program(name)(_sparse([4, 1, 4, ROWS]))
  before, state_before = results["first"]
  params, state = results["sparse"]
  want, want_state = results["dense"]
  close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-7)
  touched = np.array([1, 4])
  untouched = np.array([row for row in range(ROWS) if row not in (1, 4)])
  close(params["bias"], want["bias"])
  assert not np.array_equal(params["table"][touched], before["table"][touched])
  if name not in _ONE_BY_ONE:
    close(params["table"][touched], want["table"][touched])
  if _SPARSE[name] == "dense" or name in _LAZY_IS_DENSE:
    close(params["table"], want["table"])
  else:
    np.testing.assert_array_equal(
      params["table"][untouched], before["table"][untouched]
    )
  for slot in slots.slot_names(state):
    got = slots.get_slot(state, "table", slot)
    if _SPARSE[name] == "lazy":
      old = slots.get_slot(state_before, "table", slot)
      np.testing.assert_array_equal(got[untouched], old[untouched])
    elif name not in _ONE_BY_ONE:
      close(got, slots.get_slot(want_state, "table", slot))


@hypothesis.settings(max_examples=6)
@hypothesis.given(
  st.lists(st.integers(0, ROWS), min_size=4, max_size=4),
  st.permutations(range(4)),
)
@pytest.mark.parametrize("name", _SPARSE)
def test_the_order_of_rows_does_not_matter(name, indices, order):
  first = _sparse(indices)
  order = np.array(order)
  second = IndexedSlices(
    first.values[order], first.indices[order], first.dense_shape
  )
  results = [_program(name)(s)["sparse"][0]["table"] for s in (first, second)]
  np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", _SPARSE)
def test_none_leaves_parameter_and_slots(name):
  results = _program(name)(_sparse([1, 1, 3, ROWS]))
  (before, state_before), (params, state) = results["first"], results["none"]
  np.testing.assert_array_equal(params["bias"], before["bias"])
  np.testing.assert_allclose(
    params["table"], results["sparse"][0]["table"], rtol=1e-6
  )
  for slot in slots.slot_names(state):
    np.testing.assert_array_equal(
      slots.get_slot(state, "bias", slot),
      slots.get_slot(state_before, "bias", slot),
    )


@pytest.mark.parametrize("name", _SPARSE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtypes_are_kept(name, dtype):
  with jax.enable_x64(dtype == "float64"):
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), _PARAMS)
    optimizer = every_optimizer.BY_NAME[name](
      optax.linear_schedule(0.1, 0.2, 9)
    )
    state = optimizer.init(params)
    grads = jax.tree.map(lambda x: jnp.asarray(x, dtype), _GRADS)
    sparse = map_values(
      lambda x: x.astype(dtype), grads | {"table": _sparse([1, 4, 1])}
    )
    with jax.numpy_dtype_promotion("standard"):  # For the schedule of optax.
      for grad in (grads, sparse):
        updates, new = jax.eval_shape(optimizer.update, grad, state, params)
        kind = lambda x: (x.shape, x.dtype)
        assert jax.tree.map(kind, new) == jax.tree.map(kind, state)
        leaves = map_values(lambda x: x.dtype, updates)
        assert leaves["bias"] == dtype


def test_runs_under_vmap_and_shard_map():
  for name in ("adagrad", "ftrl", "nadam", "keras_adamax"):
    optimizer = every_optimizer.BY_NAME[name](0.1)
    params = jnp.asarray(_PARAMS["table"])
    sparse = _sparse([1, 4, 1])

    def step(params, gradient, optimizer=optimizer):
      state = optimizer.init(params)
      updates, _ = optimizer.update(gradient, state, params)
      return apply_updates(params, updates)

    stack = lambda x: jnp.stack([x] * 8)
    want = stack(step(params, sparse))
    stacked = stack(params), jax.tree.map(stack, sparse)
    got = jax.jit(jax.vmap(step))(*stacked)
    np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=name)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=auto)
    per_device = jax.shard_map(
      jax.vmap(step), mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    got = jax.jit(per_device)(*stacked)
    np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=name)


def test_updates_do_not_recompile():
  for name in ("momentum", "ftrl", "nadam"):
    optimizer = every_optimizer.BY_NAME[name](0.1)
    update = jax.jit(optimizer.update)
    state = optimizer.init(_PARAMS)
    for indices in ([1, 4], [2, 2], [ROWS, 0]):
      grads = {"table": _sparse(indices), "bias": _GRADS["bias"]}
      _, state = update(grads, state, _PARAMS)
    assert update._cache_size() == 1


def test_sparse_update_changes_only_its_rows():
  """No operation is of the table's size but reads and writes of rows."""
  rows = 50_021
  table = jnp.ones((rows, 2))
  sparse = IndexedSlices(jnp.ones((3, 2)), jnp.array([5, 7, 5]), (rows, 2))
  for name, kind in _SPARSE.items():
    if kind != "lazy":
      continue
    optimizer = every_optimizer.BY_NAME[name](0.1)
    state = jax.eval_shape(optimizer.init, table)
    jaxpr = jax.make_jaxpr(optimizer.update)(sparse, state, table)
    made = {
      equation.primitive.name
      for equation in _equations(jaxpr.jaxpr)
      for out in equation.outvars
      if rows in out.aval.shape
    }
    assert made <= {"scatter", "jit", "pjit"}, name


def _equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for sub in jax.extend.core.jaxprs_in_params(equation.params):
      yield from _equations(sub)
