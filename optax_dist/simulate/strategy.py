"""Training strategies, as parameters of the rules.

Every strategy is a case of the same rules: the number of gradients in a step,
their largest staleness, and the number of local steps in each of them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from optax_dist import quorum

# More steps than any run takes.
UNBOUNDED = 2**62

Kind = Literal["sync_replicas", "elastic_average", "local_updates"]


class Strategy(NamedTuple):
  """A way for replicas to train together.

  Attributes:
    name: its name in tables and plots.
    replicas_to_aggregate: contributions in a step.
    max_staleness: largest staleness of a contribution, in steps.
    local_steps: gradients that a replica computes for one contribution.
    cancel: whether a replica drops stale work at once, instead of finishing it
      first.
    kind: its name in a journal; a contribution is a gradient, an exchange with
      the center, or the change of a replica's own parameters.
  """

  name: str
  replicas_to_aggregate: int
  max_staleness: int = 0
  local_steps: int = 1
  cancel: bool = False
  kind: Kind = "sync_replicas"


def sync_replicas(
  replicas_to_aggregate: int, *, max_staleness: int = 0, cancel: bool = False
) -> Strategy:
  """A step takes fresh gradients of some replicas; the others are backups.

  Args:
    replicas_to_aggregate: gradients in a step.
    max_staleness: largest staleness, in steps, at which a gradient still
      counts. With one gradient in a step and `UNBOUNDED`, replicas never wait:
      asynchronous training.
    cancel: whether late replicas drop their work at once.

  Returns:
    The strategy.

  Raises:
    TypeError, ValueError: a number is invalid.

  Example:
    >>> sync_replicas(3).name
    'sync, 3 of N'
  """
  k, _, late = quorum.check_sync_arguments(
    replicas_to_aggregate, None, max_staleness
  )
  bound = f", up to {late} late" if late else ""
  bound = ", at any staleness" if late == UNBOUNDED else bound
  return Strategy(f"sync, {k} of N{bound}", k, late, 1, cancel)


def elastic_average(communication_period: int) -> Strategy:
  """Each replica exchanges with the center on its own clock.

  Args:
    communication_period: local steps between exchanges. Each exchange is a
      separate step, with one contribution.

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
    f"elastic, period {period}", 1, UNBOUNDED, period, kind="elastic_average"
  )


def local_updates(
  replicas: int, communication_period: int, backups: int = 0
) -> Strategy:
  """Replicas train locally for some steps; then their mean change is applied.

  Args:
    replicas: number of replicas; all but the backups are waited for.
    communication_period: local steps in a round.
    backups: replicas whose change is dropped if they are late.

  Returns:
    The strategy.

  Raises:
    ValueError: the period is not a positive integer, or there are no replicas
      left to wait for.

  Example:
    >>> local_updates(8, 10).replicas_to_aggregate
    8
  """
  period = _period(communication_period)
  k = replicas - backups
  quorum.check_sync_arguments(k)
  return Strategy(
    f"local updates, period {period}", k, 0, period, kind="local_updates"
  )


def _period(value: int) -> int:
  if type(value) is not int or value < 1:
    raise ValueError(
      f"communication_period must be a positive integer, got {value!r}."
    )
  return value
