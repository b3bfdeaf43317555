"""Replicas that train on their own for some steps, and the same by hand."""

import embedded_runs as runs
import jax
import jax.numpy as jnp
import numpy as np
import optax

PERIOD = 3
INNER = optax.sgd(0.1)


def local_steps(params, replica, first):
  """A replica's local steps between two exchanges."""
  for number in range(first, first + PERIOD):
    batch = jnp.asarray(runs.batch_of(replica, number))
    grads = runs.gradient(params, batch)
    params = jax.tree.map(lambda x, g: x - np.float32(0.1) * g, params, grads)
  return params


def close(got, expected):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
    got,
    expected,
  )


def rounds(number):
  def train(replica, result):
    for _ in range(PERIOD * number):
      grads, batch = runs.compute(replica, result.computed)
      result.computed += 1
      outcome = replica.step(grads, batch=batch)
      assert outcome.accepted
      result.outcomes.append(outcome)
    return jax.tree.map(np.asarray, replica.params)

  return train
