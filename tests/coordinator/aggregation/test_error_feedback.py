"""Tests that the residual changes only by gradients that are known to count."""

import numpy as np
import pytest

from optax_dist.coordinator.aggregation import encoder
from optax_dist.coordinator.aggregation.error_feedback import ErrorFeedback


def made(decay=1.0):
  return encoder.Encoder([np.zeros(2, np.float32)], "int2", decay)


def send(one, number, left_out, extends=-1):
  """Sends a gradient of which so much is left out, besides the residual."""
  raw = np.zeros(one.place.nbytes, np.uint8)
  assert one.write([np.asarray([8, left_out], "f4")], raw, number, extends)


def residual(one):
  first, second = one._feedback.residual(0, 2)
  assert first == 0.0
  return float(second)


def test_the_first_residual_is_zero():
  assert residual(made()) == 0.0


def test_residuals_are_of_counted_gradients():
  one = made(decay=0.5)
  send(one, 1, 2.0)
  assert residual(one) == 0.0
  one.settle(1, True)
  assert residual(one) == 1.0
  # It is pending until a gradient that includes it counts.
  send(one, 2, 2.0)
  one.settle(2, False)
  assert residual(one) == 1.0
  send(one, 3, 2.0)
  one.settle(3, True)
  assert residual(one) == 1.5


def test_no_residual_is_kept_without_an_outcome():
  one = made()
  send(one, 1, 1.0)
  one.settle(1, True)
  send(one, 2, 1.0)
  assert residual(one) == 1.0
  one.settle(2, None)
  assert residual(one) == 0.0
  one.settle(2, True)  # Too late.
  assert residual(one) == 0.0


@pytest.mark.parametrize("counts", [1, 2])
def test_of_overlapping_sums_one_counts(counts):
  one = made()
  send(one, 1, 1.0)
  send(one, 2, 2.0, extends=1)
  one.settle(counts, True)
  one.settle(3 - counts, True)
  assert residual(one) == counts


def test_the_outcome_of_a_rewritten_gradient_is_ignored():
  one = made()
  send(one, 1, 1.0)
  send(one, 2, 2.0)
  one.settle(1, True)
  assert residual(one) == 0.0


def test_a_returned_residual_is_a_copy():
  feedback = ErrorFeedback(2)
  feedback.keep(np.ones(2, np.float32), 0)
  feedback.residual(0, 2)[:] = 7
  assert feedback.residual(0, 2).tolist() == [1.0, 1.0]
