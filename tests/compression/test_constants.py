"""The constants by which convergence is proved, for arrays of many kinds.

A method that is right on average needs no error feedback; one that leaves out at
most a share ``1 - delta`` of the squared norm converges with it (Karimireddy et
al. 2019, https://arxiv.org/abs/1901.09847, definition A).
"""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressing import received
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from optax_dist import compression

_SIZE = 40
_NUMBERS = st.floats(-1e6, 1e6, width=32).map(
  # The squares of smaller ones are no float32.
  lambda x: 0.0 if abs(x) < 1e-6 else x
)
_ARRAYS = hnp.arrays(np.float32, _SIZE, elements=_NUMBERS)
_settings = hypothesis.settings(max_examples=40, deadline=None)


def _left_out(method, x):
  """The share of the squared norm that is not sent."""
  left = np.asarray(received(method, jnp.asarray(x)), np.float64)
  x = x.astype(np.float64)
  norm = np.sum(x**2)
  return np.sum((x - left) ** 2) / norm if norm else 0.0


def _delta(name, x):
  """What each method is known to send, of a block or chunk of this size."""
  n = x.size
  match name:
    case "top_k":  # k / n: the largest have at least the mean square.
      return 10 / n
    case "sign" | "one bit":  # |x|_1^2 / (n |x|_2^2)
      x = x.astype(np.float64)
      norm = np.sum(x**2)
      return np.sum(np.abs(x)) ** 2 / (n * norm) if norm else 0.0
    case "8 bits":  # Each number is off by at most s / 254, s^2 <= |x|_2^2.
      return 1 - n / 254**2
    case "4 bits":  # By s / 14; and nothing is off by more than itself.
      return max(0.0, 1 - n / 14**2)
    case _:  # Rounding to the nearest never does more harm than sending zero.
      return 0.0


METHODS = {
  "top_k": compression.top_k(0.25),
  "sign": compression.sign(error_feedback=1.0),
  "one bit": compression.quantize(1),
  "8 bits": compression.quantize(8),
  "4 bits": compression.quantize(4),
  "2 bits": compression.quantize(2),
}


# One for all arrays, which is compiled once.
_PROJECTION = compression.power_sgd(2)


@pytest.mark.parametrize("name", METHODS)
def test_the_residual_is_bounded(name):
  @_settings
  @hypothesis.given(_ARRAYS)
  def check(x):
    assert _left_out(METHODS[name], x) <= 1 - _delta(name, x) + 1e-4

  check()


@_settings
@hypothesis.given(hnp.arrays(np.float32, (8, 6), elements=_NUMBERS))
def test_projection_error_is_at_most_the_gradient(x):
  """PowerSGD sends a projection onto the columns of its first factor."""
  assert _left_out(_PROJECTION, x) <= 1 + 1e-4


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_stochastic_rounding_is_right_on_average_for_any_array(bits):
  draws = 256
  method = compression.quantize(bits, stochastic=True, error_feedback=None)

  @jax.jit
  def mean(x):
    """Of many replicas with one gradient, each with a rounding of its own."""
    replicas = jnp.broadcast_to(x, (draws, _SIZE))
    reduce = lambda x: method.reduce(x, method.init(x), ("data",))[0]
    return jax.vmap(reduce, axis_name="data")(replicas)[0]

  @_settings
  @hypothesis.given(_ARRAYS)
  def check(x):
    scale = np.max(np.abs(x))
    step = 2 * scale if bits == 1 else scale / (2 ** (bits - 1) - 1)
    # A number between two levels has a variance of at most step^2 / 4; six
    # standard errors, for thousands of numbers.
    bound = 6 * 0.5 * step / np.sqrt(draws) + 1e-5 * scale
    assert np.max(np.abs(np.asarray(mean(jnp.asarray(x))) - x)) <= bound

  check()
