"""Tests of what elastic_average refuses, and how it says so."""

import optax
import pytest

from optax_dist.transforms.elastic_average import elastic_average

N = 4


def test_unknown_learning_rate_is_refused():
  with pytest.raises(ValueError, match="give `learning_rate`, or `rho`"):
    elastic_average(optax.adam(0.1), "i", num_replicas=2)
  elastic_average(optax.adam(0.1), "i", num_replicas=2, rho=0.0)
