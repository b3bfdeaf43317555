"""Tests that the residual changes only by contributions known to count."""

import numpy as np
import pytest

from optax_dist.coordinator.aggregation.error_feedback import ErrorFeedback


def kept(*values):
  return np.asarray(values, np.float32)


def owed(feedback):
  return feedback.owed(2).tolist()


def test_the_first_residual_is_zero():
  assert owed(ErrorFeedback()) == [0.0, 0.0]


def test_residuals_are_of_counted_gradients():
  feedback = ErrorFeedback(decay=0.5)
  feedback.left_out(kept(2, 4), number=1)
  assert owed(feedback) == [0.0, 0.0]
  feedback.settle(1, True)
  assert owed(feedback) == [1.0, 2.0]
  # It is owed until a contribution that includes it counts.
  feedback.left_out(kept(8, 8), number=2)
  feedback.settle(2, False)
  assert owed(feedback) == [1.0, 2.0]
  feedback.left_out(kept(6, 6), number=3)
  feedback.settle(3, True)
  assert owed(feedback) == [3.0, 3.0]


def test_no_residual_is_kept_without_an_outcome():
  feedback = ErrorFeedback()
  feedback.left_out(kept(1, 1), number=1)
  feedback.settle(1, True)
  feedback.lose()
  # No contribution was in flight.
  assert owed(feedback) == [1.0, 1.0]
  feedback.left_out(kept(2, 2), number=2)
  feedback.lose()
  assert owed(feedback) == [0.0, 0.0]
  feedback.settle(2, True)  # Said too late.
  assert owed(feedback) == [0.0, 0.0]


@pytest.mark.parametrize("counts", [1, 2])
def test_of_overlapping_sums_one_counts(counts):
  feedback = ErrorFeedback()
  feedback.left_out(kept(1, 1), number=1)
  feedback.left_out(kept(2, 2), number=2, extends=1)
  feedback.settle(counts, True)
  feedback.settle(3 - counts, True)
  assert owed(feedback) == [counts, counts]


def test_the_outcome_of_a_rewritten_gradient_is_ignored():
  feedback = ErrorFeedback()
  feedback.left_out(kept(1, 1), number=1)
  feedback.left_out(kept(2, 2), number=2)
  feedback.settle(1, True)
  assert owed(feedback) == [0.0, 0.0]


def test_a_returned_residual_is_a_copy():
  feedback = ErrorFeedback()
  feedback.left_out(kept(1, 1), number=1)
  feedback.settle(1, True)
  feedback.owed(2)[:] = 7
  assert owed(feedback) == [1.0, 1.0]
