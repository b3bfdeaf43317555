"""What replicas do together, as the rules need to know it.

Every strategy is a case of the same rules: so many gradients make a step, so
late may they be, and so many local steps are behind each of them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from optax_dist import quorum

# More steps than any run has.
UNBOUNDED = 2**62

Kind = Literal["gradient", "exchange", "change"]


class Strategy(NamedTuple):
  """A way to train together.

  Attributes:
    name: what it is called in tables and pictures.
    replicas_to_aggregate: contributions that make a step.
    max_staleness: steps by which a contribution may be late.
    local_steps: gradients that a replica computes for one contribution.
    cancel: whether a replica drops work that has become stale at once, rather
      than when it has finished it.
    kind: what a contribution is: a gradient, an exchange with the center, or the
      change of a replica's own parameters.
  """

  name: str
  replicas_to_aggregate: int
  max_staleness: int = 0
  local_steps: int = 1
  cancel: bool = False
  kind: Kind = "gradient"


def sync_replicas(
  replicas_to_aggregate: int, *, max_staleness: int = 0, cancel: bool = False
) -> Strategy:
  """Fresh gradients of so many replicas make a step; the others are backups.

  Args:
    replicas_to_aggregate: gradients that make a step.
    max_staleness: steps by which a gradient may be late and still count.
    cancel: whether late replicas drop their work at once.

  Returns:
    The strategy.

  Raises:
    TypeError, ValueError: a number is not what it must be.

  Example:
    >>> sync_replicas(3).name
    'sync, 3 of N'
  """
  k, _, late = quorum.check_sync_arguments(
    replicas_to_aggregate, None, max_staleness
  )
  bound = f", up to {late} late" if late else ""
  return Strategy(f"sync, {k} of N{bound}", k, late, 1, cancel)


def asynchronous() -> Strategy:
  """Every gradient is a step, however late it is; nobody waits.

  Example:
    >>> asynchronous().replicas_to_aggregate
    1
  """
  return Strategy("asynchronous", 1, UNBOUNDED)


def bounded_staleness(
  max_staleness: int, replicas_to_aggregate: int = 1
) -> Strategy:
  """As asynchronous, but a gradient that is too late is dropped.

  Args:
    max_staleness: steps by which a gradient may be late.
    replicas_to_aggregate: gradients that make a step.

  Returns:
    The strategy.

  Raises:
    TypeError, ValueError: a number is not what it must be.

  Example:
    >>> bounded_staleness(4).name
    'staleness up to 4'
  """
  k, _, late = quorum.check_sync_arguments(
    replicas_to_aggregate, None, max_staleness
  )
  return Strategy(f"staleness up to {late}", k, late)


def elastic_average(communication_period: int) -> Strategy:
  """Each replica exchanges with the center on its own clock.

  Args:
    communication_period: local steps between exchanges. An exchange is a step
      of its own, with one contribution.

  Returns:
    The strategy.

  Raises:
    ValueError: the period is not a positive integer.

  Example:
    >>> elastic_average(10).local_steps
    10
  """
  period = _period(communication_period)
  return Strategy(
    f"elastic, period {period}", 1, UNBOUNDED, period, kind="exchange"
  )


def local_updates(
  replicas: int, communication_period: int, backups: int = 0
) -> Strategy:
  """Replicas train alone for some steps, then their mean change is applied.

  Args:
    replicas: how many there are; all are waited for, but the backups.
    communication_period: local steps in a round.
    backups: replicas whose change is dropped when they are late.

  Returns:
    The strategy.

  Raises:
    ValueError: the period is not a positive integer, or nobody is left to
      wait for.

  Example:
    >>> local_updates(8, 10).replicas_to_aggregate
    8
  """
  period = _period(communication_period)
  k = replicas - backups
  quorum.check_sync_arguments(k)
  return Strategy(
    f"local updates, period {period}", k, 0, period, kind="change"
  )


def _period(value: int) -> int:
  if type(value) is not int or value < 1:
    raise ValueError(
      f"communication_period must be a positive integer, got {value!r}."
    )
  return value
