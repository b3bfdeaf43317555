"""Tests of Keras's clipping arguments, against their formulas in numpy."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import optimizers
from optax_dist.optimizers.keras import clipping as keras_clipping
from optax_dist.sparse.indexed_slices import IndexedSlices

_LIMIT = 0.75
_INDICES = np.array([2, 0, 2], np.int32)


def _norm(*arrays):
  return np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in arrays))


def _want(name, table, bias):
  """Clipped values of the sparse gradient, and the clipped dense one."""
  if name == "clipvalue":
    return [np.clip(x, -_LIMIT, _LIMIT) for x in (table, bias)]
  norms = [_norm(table), _norm(bias)]
  if name == "global_clipnorm":
    norms = [_norm(table, bias)] * 2
  pairs = zip((table, bias), norms, strict=True)
  return [x * _LIMIT / max(norm, _LIMIT) for x, norm in pairs]


@jax.jit
def _clip_all(table, bias):
  """Clips in each way, with one program."""
  grads = {
    "table": IndexedSlices(table, jnp.asarray(_INDICES), (4, 2)),
    "bias": bias,
    "none": None,
  }
  results = {}
  for name in ("clipvalue", "clipnorm", "global_clipnorm"):
    transformation = keras_clipping.clipped(optax.identity(), **{name: _LIMIT})
    results[name] = transformation.update(grads, transformation.init(grads))[0]
  return results


@hypothesis.given(
  hnp.arrays(np.float32, (3, 2), elements=st.floats(-9, 9, width=16)),
  hnp.arrays(np.float32, (3,), elements=st.floats(-9, 9, width=16)),
)
def test_formulas(table, bias):
  for name, got in _clip_all(table, bias).items():
    want_table, want_bias = _want(name, table, bias)
    # Repeated indices are not added up before: the values as given count.
    np.testing.assert_array_equal(got["table"].indices, _INDICES)
    np.testing.assert_allclose(
      got["table"].values, want_table, rtol=1e-5, atol=1e-12
    )
    np.testing.assert_allclose(got["bias"], want_bias, rtol=1e-5, atol=1e-12)
    assert got["none"] is None


def test_an_infinite_global_norm_makes_all_nan():
  got = _clip_all(np.ones((3, 2), np.float32), np.float32([1, np.inf, 0]))
  got = got["global_clipnorm"]
  assert np.isnan(got["bias"]).all()
  assert np.isnan(got["table"].values).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtypes_stay(dtype):
  with jax.enable_x64(dtype == "float64"):
    grads = {"a": jnp.ones(3, dtype), "b": jnp.full(2, 3.0, np.float32)}
    for name in ("clipvalue", "clipnorm", "global_clipnorm"):
      for limit in (0.5, jnp.float32(0.5)):
        inner = optax.identity()
        transformation = keras_clipping.clipped(inner, **{name: limit})
        got = transformation.update(grads, transformation.init(grads))[0]
        assert {key: x.dtype for key, x in got.items()} == {
          key: x.dtype for key, x in grads.items()
        }


def test_the_state_is_that_without_clipping():
  params = jnp.ones(3)
  structures = [
    jax.tree.structure(optimizers.keras("Adam", **clipping).init(params))
    for clipping in ({}, {"clipnorm": 1.0})
  ]
  assert structures[0] == structures[1]


def test_keras_clips_but_not_where_iterations_are_frozen():
  grads = jnp.array([3.0, 4.0])
  for frozen, want in ((False, [-0.6, -0.8]), (True, [-3.0, -4.0])):
    optimizer = optimizers.keras(
      "SGD", learning_rate=1.0, clipnorm=1.0, frozen_iterations=frozen
    )
    got = optimizer.update(grads, optimizer.init(grads))[0]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_errors():
  with pytest.raises(ValueError, match="clipvalue must be positive or zero"):
    optimizers.keras("SGD", clipvalue=-1.0)
  with pytest.raises(ValueError, match=r"must not both be given, got 1\.0 and"):
    optimizers.keras("Adam", clipnorm=1.0, global_clipnorm=2.0)


@pytest.mark.parametrize("name", ["clipvalue", "clipnorm", "global_clipnorm"])
def test_invalid_numbers_are_refused(name):
  for value, error in (
    ("0.1", TypeError),
    (True, TypeError),
    (float("nan"), ValueError),
    (np.array([0.1, 0.2]), ValueError),
  ):
    with pytest.raises(error, match=f"^{name} must be a finite number or"):
      optimizers.keras("SGD", **{name: value})


def test_clipping_by_value_refuses_complex_gradients():
  optimizer = optimizers.keras("SGD", clipvalue=1.0)
  gradient = jnp.ones(2, jnp.complex64)
  with pytest.raises(TypeError, match="clipvalue has no meaning for complex"):
    optimizer.update(gradient, optimizer.init(gradient))
