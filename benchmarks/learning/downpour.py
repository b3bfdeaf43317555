"""DOWNPOUR, for comparison: replicas that push all they have learned, and pull.

A reference implementation, in lock step; the library does not offer it, since it
does not bear long periods. Each replica makes ``communication_period`` steps,
adds the sum of its steps to the center, and goes on from the center.

Dean et al. 2012, `Large Scale Distributed Deep Networks`_; in the form in which
Zhang, Choromanska and LeCun 2015 compare with it (their algorithm 3).

.. _Large Scale Distributed Deep Networks:
   https://research.google/pubs/large-scale-distributed-deep-networks
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class DownpourState(NamedTuple):
  """State of :func:`downpour`.

  Attributes:
    ticks: steps since the last exchange (int32 scalar).
    center: the center, equal on all replicas.
    inner_state: state of the inner transformation.
  """

  ticks: jax.Array
  center: Any
  inner_state: Any


def downpour(
  inner: optax.GradientTransformation,
  axis_name: str,
  *,
  communication_period: int,
) -> optax.GradientTransformation:
  """Adds the replicas' steps to the center, all of them.

  Args:
    inner: the transformation that updates each replica's parameters.
    axis_name: the axis that the replicas lie along.
    communication_period: steps from exchange to exchange.

  Returns:
    A transformation; ``init`` takes parameters that are equal on all replicas.
  """

  def init_fn(params):
    return DownpourState(jnp.zeros([], jnp.int32), params, inner.init(params))

  def update_fn(updates, state, params):
    steps, inner_state = inner.update(updates, state.inner_state, params)

    def exchange():
      # A replica started its steps from the center, which has not moved.
      learned = jax.tree.map(
        lambda x, u, c: x + u - c, params, steps, state.center
      )
      center = jax.tree.map(
        jnp.add, state.center, jax.lax.psum(learned, axis_name)
      )
      return jax.tree.map(jnp.subtract, center, params), center

    ticks = state.ticks + 1
    exchanges = ticks >= communication_period
    steps, center = jax.lax.cond(
      exchanges, exchange, lambda: (steps, state.center)
    )
    ticks = jnp.where(exchanges, 0, ticks)
    return steps, DownpourState(ticks, center, inner_state)

  return optax.GradientTransformation(init_fn, update_fn)
