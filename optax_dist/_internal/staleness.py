"""The weight of a stale gradient.

It serves ``sync_replicas(staleness_weight=)``.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

Weight = Callable[[Any], Any]


def weight_function(weight: str | Weight | None) -> Weight | None:
  """Returns the weight of a gradient as a function of its staleness.

  Args:
    weight: None for 1, ``"inverse"`` for 1 / max(1, staleness), or a function.

  Returns:
    A function of an int32 array; None if every weight is 1.

  Raises:
    ValueError: if ``weight`` is something else.

  Example:
    >>> weight_function("inverse")(jnp.array([0, 1, 4]))
    Array([1.  , 1.  , 0.25], dtype=float32)

  References:
    Zhang et al. 2016, `Staleness-aware Async-SGD
    <https://arxiv.org/abs/1511.05950>`_.
  """
  if weight is None or callable(weight):
    return weight
  if weight != "inverse":
    raise ValueError(
      "`staleness_weight` must be None, 'inverse' or a function of the staleness,"
      f" got {weight!r}."
    )
  return lambda late: 1.0 / jnp.maximum(late, 1).astype(jnp.float32)
