"""Tests of the checks of arguments."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_dist
from optax_dist import compression

SGD = optax.sgd(0.1)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_of_numpy_are_integers(value):
  optax_dist.elastic_average(
    optax.sgd(0.1), "data", communication_period=value, rho=0.0
  )
  optax_dist.local_sgd(optax.sgd(0.1), "data", communication_period=value)


@pytest.mark.parametrize(
  "make",
  [
    lambda **most: optax_dist.local_sgd(SGD, "data", **most),
    lambda **most: optax_dist.elastic_average(SGD, "data", rho=0.0, **most),
    lambda **most: optax_dist.streaming_updates(
      SGD, SGD, "data", fragments=1, **most
    ),
  ],
)
def test_counts_are_limited_to_32_bits(make):
  make(communication_period=2**31 - 1)
  with pytest.raises(
    ValueError, match=r"`communication_period` must be at most"
  ):
    make(communication_period=2**31)


def test_seeds_are_limited_to_those_of_jax():
  for method in (
    lambda seed: compression.power_sgd(1, seed=seed),
    lambda seed: compression.quantize(8, stochastic=True, seed=seed),
  ):
    method(2**63 - 1).init([jnp.ones(3)])
    for seed in (2**63, -1, 1.0, "0", True):
      with pytest.raises(ValueError, match="`seed` must be"):
        method(seed)


def test_elastic_averaging_has_no_meaning_under_plain_jit():
  tx = optax_dist.elastic_average(
    optax.sgd(0.1), "data", num_replicas=2, rho=0.0
  )
  state = tx.init(jnp.zeros(2))
  with pytest.raises(
    optax_dist.UnboundAxisError, match="no replica that trains its own"
  ) as caught:
    tx.update(jnp.zeros(2), state, jnp.zeros(2))
  assert "not needed" not in str(caught.value)
