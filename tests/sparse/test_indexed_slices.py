"""Tests of the sparse gradients."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pairwise
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_dist import sparse
from optax_dist.sparse import IndexedSlices

ROWS, SLOTS = 6, 5


@st.composite
def _slices(draw):
  """Slices of fixed sizes, with repeats and unused slots, exact in float32."""
  indices = draw(st.lists(st.integers(0, ROWS), min_size=SLOTS, max_size=SLOTS))
  values = draw(
    st.lists(st.integers(-8, 8), min_size=2 * SLOTS, max_size=2 * SLOTS)
  )
  values = np.array(values, np.float32).reshape(SLOTS, 2)
  indices = np.array(indices, np.int32)
  values[indices == ROWS] = 0.0
  return IndexedSlices(values, indices, (ROWS, 2))


def _numpy_dense(slices):
  dense = np.zeros(slices.dense_shape, np.float32)
  for index, value in zip(slices.indices, slices.values, strict=True):
    if index < slices.dense_shape[0]:
      dense[index] += value
  return dense


@hypothesis.settings(max_examples=25)
@hypothesis.given(_slices())
def test_to_dense_adds_repeated_rows(slices):
  np.testing.assert_array_equal(slices.to_dense(), _numpy_dense(slices))


@hypothesis.settings(max_examples=25)
@hypothesis.given(_slices(), st.permutations(range(SLOTS)))
def test_sum_duplicates_adds_repeated_rows(slices, order):
  order = np.array(order)
  summed = jax.jit(sparse.sum_duplicates)(slices)
  used = np.asarray(summed.indices)[np.asarray(summed.indices) < ROWS]
  assert len(set(used.tolist())) == len(used)
  assert (np.diff(summed.indices) >= 0).all()
  assert not np.asarray(summed.values)[np.asarray(summed.indices) == ROWS].any()
  np.testing.assert_array_equal(summed.to_dense(), slices.to_dense())
  shuffled = IndexedSlices(
    slices.values[order], slices.indices[order], slices.dense_shape
  )
  again = jax.jit(sparse.sum_duplicates)(shuffled)
  np.testing.assert_array_equal(again.indices, summed.indices)
  np.testing.assert_array_equal(again.values, summed.values)


def test_sum_duplicates_drops_what_unused_slots_hold():
  slices = IndexedSlices(
    jnp.array([jnp.nan, 1.0]), jnp.array([ROWS, 2]), (ROWS,)
  )
  summed = sparse.sum_duplicates(slices)
  assert summed.values.tolist() == [1.0, 0.0]
  assert summed.indices.tolist() == [2, ROWS]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("batched", [False, True])
def test_columns_may_be_sharded(kind, batched):
  """The same numbers, in the same shards, under jit and a vmap in it."""
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
  put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
  values = np.arange(12.0, dtype=np.float32).reshape(3, 4)
  indices = np.array([4, 1, 4], np.int32)
  rows = ()
  if batched:
    values, indices, rows = values[None], indices[None], (None,)

  def run(values, indices):
    slices = IndexedSlices.unchecked(values, indices, (ROWS, 4))
    summed = sparse.sum_duplicates(slices)
    return slices.to_dense(), summed.values, summed.to_dense()

  run = jax.jit(jax.vmap(run) if batched else run)
  sharded = run(put(values, *rows, None, "model"), put(indices))
  for x, expected in zip(sharded, run(values, indices), strict=True):
    np.testing.assert_array_equal(x, expected)
    if kind == AxisType.Explicit:
      assert x.sharding.spec == P(*rows, None, "model")


@pytest.mark.parametrize("check_vma", [False, True])
def test_columns_may_be_sharded_inside_a_map(check_vma):
  """Of a mesh with one manual axis, the other one is still Explicit."""
  mesh = jax.make_mesh(
    (2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2
  )
  put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))

  def run(values, indices):
    slices = IndexedSlices.unchecked(values, indices, (ROWS, 4))
    return sparse.sum_duplicates(slices).to_dense()

  run = jax.jit(
    jax.shard_map(
      run,
      mesh=mesh,
      in_specs=P("data"),
      out_specs=P("data"),
      axis_names={"data"},
      check_vma=check_vma,
    )
  )
  dense = run(
    put(np.ones((4, 4), np.float32), "data", "model"),
    put(np.array([1, 1, 2, 3]), "data"),
  )
  assert dense.sharding.spec == P("data", "model")
  expected = np.zeros((2 * ROWS, 1))
  expected[[1, ROWS + 2, ROWS + 3]] = [[2], [1], [1]]
  np.testing.assert_array_equal(dense, np.repeat(expected, 4, axis=1))


def _explicit(x, *spec):
  mesh = jax.make_mesh(
    (2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2
  )
  return jax.device_put(x, NamedSharding(mesh, P(*spec)))


_SPECS = [(None, "model"), ("data", None), ("data", "model"), (None, None)]
_EVERY_SPEC = pytest.mark.parametrize("spec", _SPECS)
_EAGER_AND_JIT = {"eager": lambda f: f, "jit": jax.jit}


@pairwise.every_value(spec=_SPECS, wrap=_EAGER_AND_JIT)
def test_duplicates_are_summed_on_an_explicit_mesh(spec, wrap):
  """Whatever is sharded: slots, columns, both or none."""
  values = np.arange(16.0, dtype=np.float32).reshape(4, 4)
  indices = np.array([4, 1, 4, ROWS], np.int32)

  def run(values, indices):
    slices = IndexedSlices.unchecked(values, indices, (ROWS, 4))
    summed = sparse.sum_duplicates(slices)
    return slices.to_dense(), summed.to_dense()

  expected, _ = run(values, indices)
  for slots in (spec[0], None):
    inputs = _explicit(values, *spec), _explicit(indices, slots)
    for dense in wrap(run)(*inputs):
      assert dense.sharding.spec == P(None, spec[1])
      np.testing.assert_array_equal(dense, expected)


@pairwise.every_pair(spec=_SPECS, wrap=_EAGER_AND_JIT, columns=[None, "model"])
def test_tables_on_an_explicit_mesh_are_updated(spec, wrap, columns):
  table = np.ones((4, 4), np.float32)
  update = IndexedSlices(
    _explicit(2 * table, None, columns), np.array([1, 3, 1, 4]), (4, 4)
  )
  new = wrap(sparse.apply_updates)(_explicit(table, *spec), update)
  assert new.sharding.spec == P(*spec)
  np.testing.assert_array_equal(np.asarray(new)[:, 0], [1, 5, 1, 3])


@_EVERY_SPEC
@pytest.mark.parametrize("of_ids", [None, "data"])
def test_tables_on_an_explicit_mesh_are_looked_up(spec, of_ids):
  table = _explicit(np.ones((4, 4), np.float32), *spec)
  ids = _explicit(np.array([[1, 3], [3, 9]]), of_ids, None)
  square = lambda x: jnp.sum(x**2)

  @jax.jit
  def grads(table, ids):
    run = sparse.lookup_value_and_grad(square)
    return run(table, ids)[1].to_dense()

  result = np.asarray(grads(table, ids))
  np.testing.assert_array_equal(result[:, 0], [0, 2, 0, 4])


def test_indices_that_are_known_under_jit_are_checked():
  for rows, fits in (([0, 1], True), ([0, 9], False)):
    indices = jnp.array(rows)
    run = jax.jit(lambda x, i=indices: IndexedSlices(x, i, (5, 2)).to_dense())
    if fits:
      assert run(jnp.ones((2, 2)))[:, 0].tolist() == [1, 1, 0, 0, 0]
    else:
      with pytest.raises(ValueError, match="got values from 0 to 9"):
        run(jnp.ones((2, 2)))


def test_sum_duplicates_accepts_no_rows():
  empty = IndexedSlices(jnp.zeros((0, 2)), jnp.zeros(0, jnp.int32), (ROWS, 2))
  assert sparse.sum_duplicates(empty).indices.shape == (0,)
  assert not empty.to_dense().any()


@hypothesis.settings(max_examples=25)
@hypothesis.given(_slices())
def test_apply_updates_equals_the_dense_update(slices):
  params = {"table": jnp.ones((ROWS, 2)), "b": jnp.ones(3)}
  updates = {"table": slices, "b": jnp.full(3, 2.0)}
  dense = {"table": slices.to_dense(), "b": jnp.full(3, 2.0)}
  got = sparse.apply_updates(params, updates)
  want = optax.apply_updates(params, dense)
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_apply_updates_keeps_dtypes_and_passes_none():
  params = {"a": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.ones(2), "c": None}
  update = IndexedSlices(jnp.ones((1, 2)), jnp.array([1]), (3, 2))
  got = sparse.apply_updates(params, {"a": update, "b": None, "c": None})
  assert got["a"].dtype == jnp.bfloat16
  assert got["a"][1].tolist() == [2.0, 2.0]
  assert got["b"] is params["b"]
  assert got["c"] is None


@pytest.mark.parametrize("apply", [sparse, optax])
def test_apply_updates_takes_numpy_parameters(apply):
  params = np.ones((3, 2), np.float32)
  update = IndexedSlices(jnp.ones((1, 2)), jnp.array([2]), (3, 2))
  got = apply.apply_updates({"t": params}, {"t": update})["t"]
  assert got.dtype == jnp.float32
  assert got.tolist() == [[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]]
  with pytest.raises(ValueError, match=r"met a parameter of shape \(4, 2\)"):
    apply.apply_updates(np.ones((4, 2), np.float32), update)


def test_apply_updates_checks_the_shape():
  update = IndexedSlices(jnp.ones((1, 2)), jnp.array([1]), (3, 2))
  with pytest.raises(ValueError, match=r"\(3, 2\) met a parameter of shape"):
    sparse.apply_updates(jnp.ones((4, 2)), update)


def test_lookup_gradient_equals_the_dense_gradient():
  table = jax.random.normal(jax.random.key(0), (ROWS, 2))
  params = {"table": table, "w": jnp.array([1.0, -2.0])}
  ids = jnp.array([[1, 4], [4, 0]])

  def loss(rows, weights, scale):
    return jnp.sum(scale * jnp.tanh(rows @ weights) ** 2)

  def dense_loss(p, scale):
    return loss(p["table"][ids], p["w"], scale)

  @jax.jit
  def looked_up(params, lookups, scale):
    fun = lambda p, scale: (loss(p["table"], p["w"], scale), p["table"])
    return sparse.lookup_value_and_grad(fun, has_aux=True)(
      params, lookups, scale
    )

  (value, rows), grads = looked_up(params, {"table": ids, "w": None}, 2.0)
  want_value, want = jax.value_and_grad(dense_loss)(params, 2.0)
  np.testing.assert_allclose(value, want_value, rtol=1e-6)
  np.testing.assert_array_equal(rows, table[ids])
  assert grads["table"].values.shape == (4, 2)
  np.testing.assert_allclose(
    grads["table"].to_dense(), want["table"], rtol=1e-5
  )
  np.testing.assert_allclose(grads["w"], want["w"], rtol=1e-5)


def test_lookup_gradient_never_builds_the_dense_one():
  rows = 123_457
  fun = sparse.lookup_value_and_grad(lambda p: jnp.sum(p["table"] ** 2))
  jaxpr = jax.make_jaxpr(fun)(
    {"table": jnp.ones((rows, 2))}, {"table": jnp.array([3, 5])}
  )
  made = [out.aval.shape for eqn in jaxpr.eqns for out in eqn.outvars]
  assert made
  assert not [shape for shape in made if rows in shape]


def test_lookup_outside_of_the_table_is_zero_and_without_gradient():
  fun = sparse.lookup_value_and_grad(lambda p: jnp.sum(p + 1.0))
  value, grads = fun(jnp.ones((3, 1)), jnp.array([-1, 2, 3]))
  assert value == 1.0 + 2.0 + 1.0
  assert grads.to_dense().tolist() == [[0.0], [0.0], [1.0]]


@pytest.mark.parametrize("index", [2**32 + 1, -(2**32) + 1])
def test_the_upper_bits_of_an_index_count(index):
  """JAX takes the lower 32 of NumPy's int64, which may be a row of the table."""
  indices = np.array([index])
  with pytest.raises(ValueError, match=rf"from {index} to {index}"):
    IndexedSlices(jnp.ones((1, 1)), indices, (3, 1))
  fun = sparse.lookup_value_and_grad(jnp.sum)
  value, grads = fun(jnp.ones((3, 1)), indices)
  assert value == 0.0
  assert not grads.to_dense().any()


def test_lookups_must_be_integers():
  fun = sparse.lookup_value_and_grad(jnp.sum)
  with pytest.raises(TypeError, match="lookups must be integers, got bool"):
    fun(jnp.ones((3, 1)), np.array([True]))


def test_indexed_slices_are_a_pytree_of_two_arrays():
  slices = IndexedSlices(jnp.ones((2, 3)), jnp.array([0, 1]), (4, 3))
  paths = jax.tree_util.tree_leaves_with_path(slices)
  assert [jax.tree_util.keystr(p) for p, _ in paths] == [".values", ".indices"]
  stacked = jax.vmap(lambda s: sparse.map_values(lambda x: 2 * x, s))(
    jax.tree.map(lambda x: jnp.stack([x, x]), slices)
  )
  assert stacked.values.shape == (2, 2, 3)
  assert stacked.dense_shape == (4, 3)
  assert (stacked.values == 2.0).all()
  assert slices.shape == (4, 3)
  assert slices.dtype == jnp.float32
  assert "dense_shape=(4, 3)" in repr(slices)


@pytest.mark.parametrize(
  ("values", "indices", "shape", "error", "message"),
  [
    (np.ones((2, 3)), np.array([0.0, 1.0]), (4, 3), TypeError, "integers"),
    (np.ones((2, 3)), np.array([0, 1]), (4, 2), ValueError, "dense_shape"),
    (np.ones((2, 3)), np.array([[0], [1]]), (4, 3), ValueError, "indices"),
    (np.ones(2), np.array([0, 1]), (), ValueError, "with the rows first, got"),
    (np.ones(2), np.array([0, 5]), (4,), ValueError, "from 0 to 5"),
    (np.ones(2), np.array([-1, 1]), (4,), ValueError, "from -1 to 1"),
  ],
)
def test_invalid_slices_are_refused(values, indices, shape, error, message):
  with pytest.raises(error, match=message):
    IndexedSlices(values.astype(np.float32), indices, shape)
