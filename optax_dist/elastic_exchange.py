"""The elastic exchange: replicas and their center move towards each other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = [
  "ElasticExchange",
  "elastic_exchange",
  "sequential_exchange",
  "simultaneous_exchange",
]


class ElasticExchange(NamedTuple):
  """The result of an exchange.

  Attributes:
    params: the parameters after it.
    center: the center after it.
    local_center: the center as the replica saw it, before its own pull.
    pull: the amount subtracted from the parameters.
  """

  params: Any
  center: Any
  local_center: Any
  pull: Any


def elastic_exchange(
  params: Any,
  center: Any,
  moving_rate: Any,
  sum_over_replicas: Callable[[list], list] | None = None,
) -> ElasticExchange:
  """Moves parameters and center towards each other, as if tied by a spring.

  ``pull = moving_rate * (params - center)`` is subtracted from the parameters
  and added to the center. For one replica at a time (like TensorFlow's
  asynchronous workers), the center gets that replica's pull::

    params, center, *_ = elastic_exchange(params, center, moving_rate)

  For all replicas at once, it gets the sum of the pulls: ``sum_over_replicas``
  computes it, inside a map, where ``params`` are one replica's. The two differ:
  the second of two sequential replicas sees a center that has moved.

  Works on NumPy arrays and JAX arrays. Leaves that are None in ``params`` do
  not take part.

  Args:
    params: a pytree of arrays.
    center: a pytree of arrays of the same shapes and dtypes.
    moving_rate: a number, or a scalar array.
    sum_over_replicas: maps a list of arrays to the list of their sums over the
      replicas; None for a single replica.

  Returns:
    An :class:`ElasticExchange` of trees like ``params``.

  Example:
    >>> exchange = elastic_exchange(4.0, 0.0, 0.25)
    >>> exchange.params, exchange.center
    (3.0, 1.0)

  References:
    Zhang, Choromanska and LeCun 2015, `Deep learning with Elastic Averaging SGD
    <https://arxiv.org/abs/1412.6651>`_; TensorFlow 1,
    ``tf.contrib.opt.ElasticAverageOptimizer``.
  """
  treedef: Any
  leaves, treedef = jax.tree.flatten(params)
  centers = treedef.flatten_up_to(center)
  pulls = [
    _times(moving_rate, x - c) for x, c in zip(leaves, centers, strict=True)
  ]
  totals = pulls if sum_over_replicas is None else sum_over_replicas(pulls)
  return ElasticExchange(
    *map(
      treedef.unflatten,
      (
        [x - pull for x, pull in zip(leaves, pulls, strict=True)],
        [c + total for c, total in zip(centers, totals, strict=True)],
        centers,
        pulls,
      ),
    )
  )


def simultaneous_exchange(
  params: Any, center: Any, moving_rate: Any
) -> ElasticExchange:
  """Exchanges all replicas at once: all see the same center.

  Args:
    params: a pytree of arrays with a leading replica axis.
    center: a pytree of arrays without it.
    moving_rate: a number, or a scalar array.

  Returns:
    An :class:`ElasticExchange`; all but its center have a leading replica axis.

  Example:
    >>> import jax.numpy as jnp
    >>> exchange = simultaneous_exchange(jnp.array([4.0, 8.0]), jnp.zeros(()), 0.25)
    >>> exchange.params.tolist(), exchange.center.tolist()
    ([3.0, 6.0], 3.0)
  """
  return jax.vmap(
    lambda own: elastic_exchange(
      own, center, moving_rate, lambda pulls: jax.lax.psum(pulls, "replicas")
    ),
    out_axes=ElasticExchange(0, None, 0, 0),
    axis_name="replicas",
  )(params)


def sequential_exchange(
  params: Any, center: Any, moving_rate: Any, order: Any = None
) -> ElasticExchange:
  """Exchanges the replicas in turn: each sees the center after the last one.

  Args:
    params: a pytree of arrays with a leading replica axis.
    center: a pytree of arrays without it.
    moving_rate: a number, or a scalar array.
    order: integers, each replica's index once, in the order of their turns;
      None to start with replica 0.

  Returns:
    An :class:`ElasticExchange`; all but its center have a leading replica axis.

  Example:
    >>> import jax.numpy as jnp
    >>> exchange = sequential_exchange(jnp.array([4.0, 8.0]), jnp.zeros(()), 0.25)
    >>> exchange.params.tolist(), exchange.center.tolist()
    ([3.0, 6.25], 2.75)
  """

  def turn(center: Any, own: Any) -> tuple[Any, ElasticExchange]:
    exchange = elastic_exchange(own, center, moving_rate)
    return exchange.center, exchange

  if order is None:
    center, exchanges = jax.lax.scan(turn, center, params)
    return exchanges._replace(center=center)
  order = jnp.asarray(order)
  at = lambda tree, index: jax.tree.map(lambda x: x[index], tree)
  center, exchanges = jax.lax.scan(turn, center, at(params, order))
  back = jnp.argsort(order)
  return at(exchanges._replace(center=()), back)._replace(center=center)


def _times(rate: Any, x: Any) -> Any:
  # A Python number adopts the dtype of `x`; others, NumPy's too, have to be cast.
  if hasattr(rate, "astype") and hasattr(x, "dtype"):
    rate = rate.astype(x.dtype)
  return x * rate
