"""Tests of the dtypes of sums, averages and centers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist._internal.leaves import precision


@pytest.mark.parametrize(
  ("like", "given", "want"),
  [
    ("float8_e4m3fn", None, "float32"),
    ("float16", None, "float32"),
    ("float32", None, "float32"),
    ("float64", None, "float64"),
    ("complex64", None, "complex64"),
    ("complex128", None, "complex128"),
    ("int8", None, "int8"),
    ("bool", None, "bool"),
    # What the caller asks for counts, even if it is narrower.
    ("float32", "bfloat16", "bfloat16"),
    ("bfloat16", jnp.float64, "float64"),
    ("complex64", "bfloat16", "complex64"),
    ("complex64", "float64", "complex128"),
    ("complex128", "float32", "complex64"),
    ("float32", "complex64", "float32"),
    ("bfloat16", "complex128", "float64"),
    # Of a counter there is no average.
    ("int32", "float32", "int32"),
    ("bool", "float64", "bool"),
  ],
)
def test_sums_have_a_wide_dtype(like, given, want):
  with jax.enable_x64(True):
    x = jnp.zeros(2, like)
    assert precision.wide_dtype(x, given) == want
    (wide,) = jax.tree.leaves(precision.widen([x, None], given))
    assert wide.dtype == want


def test_a_number_of_python_is_a_float32_without_a_weak_type():
  """Its weak type would change after the first update."""
  wide = precision.widen({"x": 2.0})["x"]
  assert wide.dtype == np.float32
  assert not wide.weak_type
