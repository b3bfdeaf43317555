"""Rates that follow the samples in a step, as optax takes them."""

import jax.numpy as jnp
import optax
import pytest

from optax_dist import ledger


@pytest.mark.parametrize(
  ("rule", "expected"), [("linear", 0.4), ("square_root", 0.2)]
)
def test_a_rate_follows_the_batch(rule, expected):
  grows = lambda count: jnp.where(count < 2, 64.0, 256.0)
  rate = ledger.scaled_by_batch(
    optax.constant_schedule(0.1), grows, reference=64, rule=rule
  )
  opt = optax.sgd(rate)
  params = jnp.zeros(())
  state = opt.init(params)
  steps = []
  for _ in range(3):
    updates, state = opt.update(jnp.ones(()), state, params)
    steps.append(float(-updates))
  assert steps == pytest.approx([0.1, 0.1, expected])
