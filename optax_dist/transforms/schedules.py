"""Schedules for the length of the rounds of local updates."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_dist._internal import checks

__all__ = [
  "SettablePeriod",
  "adacomm_period",
  "post_local_period",
]


def post_local_period(
  communication_period: int, switch_step: int
) -> Callable[[Any], jax.Array]:
  """Rounds of one step at first, as in synchronous training; longer ones later.

  Args:
    communication_period: steps in a round from ``switch_step`` on.
    switch_step: steps taken with rounds of one step; the paper switches at the
      first decay of the learning rate.

  Returns:
    A schedule for the ``communication_period`` of
    :func:`optax_dist.local_updates`.

  Raises:
    ValueError: if an argument is not a positive integer.

  Example:
    >>> import optax_dist
    >>> period = optax_dist.transforms.schedules.post_local_period(16, switch_step=100)
    >>> int(period(99)), int(period(100))
    (1, 16)

  References:
    Lin, Stich, Patel and Jaggi 2018, `Don't Use Large Mini-Batches, Use Local SGD
    <https://arxiv.org/abs/1808.07217>`_.
  """
  checks.count("communication_period", communication_period)
  checks.count("switch_step", switch_step)

  def period(step: Any) -> jax.Array:
    long = jnp.asarray(communication_period, jnp.int32)
    return jnp.where(jnp.asarray(step) < switch_step, 1, long)

  return period


class SettablePeriod(NamedTuple):
  """A period that stays constant until the caller sets another one.

  For values that only the caller knows, such as the loss, or how long a round
  takes. Pass it as the ``communication_period`` of
  :func:`optax_dist.local_updates`, and set ``period`` in the state between
  steps; it takes effect at once.

  Attributes:
    initial: steps in a round at the start; a positive integer.

  Example:
    >>> import jax.numpy as jnp, optax, optax_dist
    >>> tx = optax_dist.local_sgd(
    ...   optax.sgd(0.1), "data", num_replicas=4,
    ...   communication_period=SettablePeriod(16),
    ... )
    >>> state = tx.init(jnp.zeros(2))
    >>> state = optax.tree.set(state, period=jnp.asarray(8, jnp.int32))
  """

  initial: int


def adacomm_period(
  initial_period: int,
  initial_loss: float,
  loss: float,
  last_period: int | None = None,
) -> int:
  """Rounds that get shorter as the loss falls, for :class:`SettablePeriod`.

  Args:
    initial_period: steps in a round at the start; a positive integer.
    initial_loss: the training loss at the start; a positive number.
    loss: the training loss now; not negative.
    last_period: the current period. If the loss does not require a shorter one,
      half of it is used, so that the period decreases in any case. None to
      disable this rule.

  Returns:
    The new period, at least 1: ``ceil(sqrt(loss / initial_loss) *
    initial_period)``.

  Raises:
    ValueError: if an argument is invalid.

  Example:
    >>> import optax_dist
    >>> optax_dist.transforms.schedules.adacomm_period(16, 2.0, 0.5)
    8
    >>> optax_dist.transforms.schedules.adacomm_period(16, 2.0, 0.5, last_period=8)
    4

  References:
    Wang and Joshi 2018, `Adaptive Communication Strategies to Achieve the Best
    Error-Runtime Trade-off in Local-Update SGD <https://arxiv.org/abs/1810.08313>`_.
  """
  checks.count("initial_period", initial_period)
  checks.count_or_none("last_period", last_period)
  if not (math.isfinite(initial_loss) and initial_loss > 0):
    raise ValueError(f"`initial_loss` must be positive, got {initial_loss!r}.")
  if not (math.isfinite(loss) and loss >= 0):
    raise ValueError(f"`loss` must be finite and not negative, got {loss!r}.")
  period = math.ceil(math.sqrt(loss / initial_loss) * initial_period)
  if last_period is not None and period >= last_period:
    period = last_period // 2
  return max(1, period)
