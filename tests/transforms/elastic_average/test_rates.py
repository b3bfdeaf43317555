"""Tests of what elastic_average pulls with, and on: rates, dtypes, sparsity."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import IndexedSlices
from optax_dist.transforms.elastic_average import elastic_average


def _pulls(tx, steps=3, params=3.0):
  """The updates of a lone replica that is held fast, with no gradient."""
  state = tx.init(jnp.float32(0.0))
  step = jax.jit(
    jax.vmap(
      lambda state: tx.update(jnp.float32(0.0), state, jnp.float32(params)),
      axis_name="i",
      axis_size=1,
      in_axes=None,
      out_axes=(0, None),
    )
  )
  updates = []
  for _ in range(steps):
    update, state = step(state)
    updates.append(float(update[0]))
  return updates


_SCHEDULE = optax.linear_schedule(0.0, 0.3, 3)


def test_rho_follows_a_schedule():
  """At every step the pull moves by moving_rate, but where nothing moves."""
  tx = elastic_average(
    optax.sgd(_SCHEDULE),
    "i",
    num_replicas=1,
    moving_rate=0.25,
    learning_rate=_SCHEDULE,
  )
  np.testing.assert_allclose(_pulls(tx), [0, -0.75, -0.75], rtol=1e-6)


@pytest.mark.parametrize("kind", [float, np.float64, jnp.float32])
def test_rates_may_be_numbers_and_arrays(kind):
  for tx in (
    elastic_average(
      optax.sgd(0.1),
      "i",
      num_replicas=1,
      moving_rate=kind(0.5),
      learning_rate=kind(0.1),
    ),
    elastic_average(optax.sgd(0.1), "i", num_replicas=1, rho=kind(5.0)),
  ):
    np.testing.assert_allclose(_pulls(tx), [-1.5] * 3, rtol=1e-6)


def test_a_changed_learning_rate_counts_at_once():
  tx = optax.inject_hyperparams(
    lambda learning_rate: elastic_average(
      optax.sgd(learning_rate),
      "i",
      num_replicas=1,
      moving_rate=0.5,
      learning_rate=learning_rate,
    )
  )(learning_rate=0.1)
  step = jax.jit(
    jax.vmap(
      lambda state, g: tx.update(g, state, jnp.float32(3.0)),
      axis_name="i",
      in_axes=(None, 0),
    )
  )
  state = tx.init(jnp.float32(0.0))
  state = optax.tree.set(state, learning_rate=jnp.float32(0.2))
  updates, _ = step(state, jnp.ones(1))
  np.testing.assert_allclose(updates, [-0.2 - 0.5 * 3.0], rtol=1e-6)


def test_sparse_gradients_with_a_scheduled_learning_rate():
  gradient = IndexedSlices(jnp.ones((2, 1)), jnp.array([1, 1]), (3, 1))
  table, center = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[0.0], [2], [3]])
  schedule = optax.linear_schedule(1.0, 0.0, 10)
  tx = elastic_average(
    optax.sgd(schedule),
    "i",
    num_replicas=1,
    moving_rate=0.5,
    learning_rate=schedule,
  )
  state = tx.init(center)

  def step(**extra_args):
    update = lambda state: tx.update(gradient, state, table, **extra_args)
    mapped = jax.vmap(update, in_axes=None, axis_size=1, axis_name="i")
    return jax.jit(mapped)(state)

  updates, _ = step()
  np.testing.assert_allclose((table + updates[0])[:, 0], [0.5, 0, 3])
  with pytest.raises(TypeError, match="unexpected keyword argument 'valeu'"):
    step(valeu=1.0)
