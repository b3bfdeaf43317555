"""Tests of hyper-parameters in float32."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist.optimizers._internal import hyperparameters


@hypothesis.given(st.floats(2.0**-20, 1.0))
def test_one_minus_a_rounded_number_is_that_of_float32(beta):
  want = np.float32(1) - np.float32(beta)
  assert np.float32(1 - hyperparameters.rounded(beta)) == want


def test_arrays_and_schedules_stay():
  array = jnp.float32(0.1)
  schedule = lambda count: 0.1
  assert hyperparameters.rounded(array) is array
  assert hyperparameters.rounded(schedule) is schedule
  assert hyperparameters.cast(array, jnp.bfloat16).dtype == jnp.bfloat16
  assert hyperparameters.cast(0.1, jnp.bfloat16) == float(np.float32(0.1))


def test_scalars_are_wide():
  assert hyperparameters.wide_dtype(jnp.dtype("bfloat16")) == jnp.float32
  assert hyperparameters.wide_dtype(jnp.dtype("float64")) == jnp.float64


def test_checks_name_the_argument_and_the_value():
  with pytest.raises(ValueError, match="x must be positive, got 0"):
    hyperparameters.check_positive(x=0)
  with pytest.raises(
    ValueError, match=r"y must be positive or zero, got -1\.5"
  ):
    hyperparameters.check_not_negative(x=0, y=-1.5)
  with pytest.raises(ValueError, match="positive, got nan"):
    hyperparameters.check_positive(x=float("nan"))
  hyperparameters.check_positive(x=jnp.float32(-1.0))  # Not a plain number.
