"""Training strategies, as parameters of the rules.

Every strategy is a case of the same rules: the number of contributions in a
step, and their largest staleness.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from optax_dist import quorum
from optax_dist._internal import checks

Kind = Literal["sync_replicas", "elastic_average", "local_updates"]


class Strategy(NamedTuple):
  """A way for replicas to train together.

  Attributes:
    replicas_to_aggregate: contributions in a step.
    max_staleness: largest staleness of a contribution, in steps.
    cancel: whether a replica drops stale work at once, instead of finishing it
      first.
    kind: its name in a journal; a contribution is a gradient, an exchange with
      the center, or the change of a replica's own parameters.
  """

  replicas_to_aggregate: int
  max_staleness: int = 0
  cancel: bool = False
  kind: Kind = "sync_replicas"


def sync_replicas(
  replicas_to_aggregate: int,
  *,
  max_staleness: int | None = 0,
  cancel: bool = False,
) -> Strategy:
  """A step takes fresh gradients of some replicas; the others are backups.

  Args:
    replicas_to_aggregate: gradients in a step.
    max_staleness: largest staleness, in steps, at which a gradient still
      counts; None for no limit. With that and one gradient in a step, replicas
      never wait: asynchronous training.
    cancel: whether late replicas drop their work at once.

  Returns:
    The strategy.

  Raises:
    ValueError: an argument is invalid.

  Example:
    >>> sync_replicas(3).replicas_to_aggregate
    3
  """
  k, _, late = quorum.check_sync_arguments(
    replicas_to_aggregate, None, max_staleness
  )
  checks.flag("cancel", cancel)
  return Strategy(k, late, bool(cancel))
