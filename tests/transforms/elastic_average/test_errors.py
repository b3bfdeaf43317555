"""Tests of what elastic_average refuses, and how it says so."""

import optax
import pytest

from optax_dist.transforms.elastic_average import elastic_average

N = 4


@pytest.mark.parametrize(
  ("name", "value", "what"),
  [
    ("num_replicas", 0, "positive integer, got 0"),
    ("communication_period", 0, "positive integer, got 0"),
    ("moving_rate", -0.1, "not negative, got -0.1"),
    ("learning_rate", 0.0, "positive, got 0.0"),
  ],
)
def test_invalid_arguments_are_refused(name, value, what):
  with pytest.raises(ValueError, match=f"`{name}` must be .*{what}"):
    elastic_average(optax.sgd(0.1), "i", **{name: value})


def test_unknown_learning_rate_is_refused():
  with pytest.raises(ValueError, match="give `learning_rate`, or `rho`"):
    elastic_average(optax.adam(0.1), "i", num_replicas=2)
  elastic_average(optax.adam(0.1), "i", num_replicas=2, rho=0.0)
