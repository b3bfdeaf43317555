"""Tests of what the codecs share: rows, scales, and the check of a decay."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.extra import numpy as hnp

from optax_dist.compression import _codec


@pytest.mark.parametrize(("size", "rows"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_rows_are_padded_with_zeros(size, rows):
  x = jnp.arange(1.0, size + 1)
  got = _codec.rows_of(x, 4)
  assert got.shape == (rows, 4)
  np.testing.assert_array_equal(got.reshape(-1)[:size], x)
  assert not got.reshape(-1)[size:].any()


@jax.jit
def _by_scale(x):
  return _codec.by_scale(x, jnp.max(jnp.abs(x), axis=1, keepdims=True))


_FLOATS = np.finfo(np.float32)


@hypothesis.given(
  hnp.arrays(
    np.float32,
    (3, 4),
    elements=st.floats(-1, 1, width=32, allow_subnormal=False),
  ),
  hnp.arrays(
    np.int32, (3, 1), elements=st.integers(_FLOATS.minexp, _FLOATS.maxexp - 1)
  ),
)
def test_quotients_are_from_minus_one_to_one_at_every_scale(x, exponents):
  """From the smallest numbers to the largest ones that float32 has."""
  x = np.ldexp(x, exponents)
  x[np.abs(x) < _FLOATS.tiny] = 0.0
  largest = np.abs(x).max(axis=1, keepdims=True)
  quotients, scales = _by_scale(x)
  np.testing.assert_array_equal(scales, largest)
  assert np.abs(quotients).max() <= 1.0 + 1e-6
  want = np.float64(x) / np.where(largest > 0, np.float64(largest), 1.0)
  np.testing.assert_allclose(quotients, want, rtol=1e-6, atol=1e-30)


def test_a_block_of_zeros_stays_as_it_is():
  quotients, scales = _by_scale(jnp.array([[0.0, -0.0], [1.0, -4.0]]))
  np.testing.assert_array_equal(quotients, [[0.0, 0.0], [0.25, -1.0]])
  np.testing.assert_array_equal(scales, [[0.0], [4.0]])


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_sent_as_nan(bad):
  """Its block decodes to NaN, whatever the codes are; others are left alone."""
  scales = jnp.array([[bad], [2.0]])
  quotients, sent = _codec.by_scale(jnp.array([[1.0, 0.0], [1.0, 0.0]]), scales)
  assert np.isnan(sent[0]).all()
  np.testing.assert_array_equal(sent[1], [2.0])
  np.testing.assert_array_equal(quotients[1], [0.5, 0.0])


@pytest.mark.parametrize("decay", [None, 0, 1, 0.0, 0.95])
def test_decays(decay):
  _codec.check_error_feedback(decay)


@pytest.mark.parametrize("decay", [-0.1, 1.1, np.nan, True, "0.5", [0.5], 1j])
def test_invalid_decays_are_refused(decay):
  with pytest.raises(ValueError, match="must be None or a decay from 0 to 1"):
    _codec.check_error_feedback(decay)
