"""Tests of the results of a simulation."""

import numpy as np
import pytest

from optax_dist.simulate import strategy, timing


def _made():
  return timing.make(
    strategy.elastic_average(5),
    np.array([2.0, 4.0]),
    np.array([2, 1]),
    np.array([0, 1]),
    {"useful": np.array([4.0, 1.5]), "stale": np.array([0.0, 2.0])},
    np.array([1, 0, 2]),
  )


def test_rates_count_local_steps():
  made = _made()
  assert made.replicas == 2
  assert made.steps_per_second == 0.5
  assert made.gradients_per_second == 3 * 5 / 4
  assert made.dropped_share == 0.25
  assert made.mean_staleness == pytest.approx(4 / 3)


def test_what_is_not_said_is_unfinished():
  made = _made()
  np.testing.assert_allclose(made.seconds["unfinished"], [0.0, 0.5])
  assert made.shares() == {
    "useful": 5.5 / 8,
    "waiting": 0,
    "stale": 0.25,
    "communication": 0,
    "lost": 0,
    "down": 0,
    "unfinished": 0.5 / 8,
  }
