"""Metrics of one replica: its own counts, regardless of who leads."""

from __future__ import annotations

from collections.abc import Mapping

from optax_dist.coordinator.metrics import table


def metrics(
  replica: int | str,
  *,
  step: int,
  leads: bool,
  gradients: Mapping[str, int],
  bytes_in: int,
  bytes_out: int,
  waited: float,
  rejoins: int,
) -> table.Values:
  """The values of a replica.

  Args:
    replica: its index.
    step: the step of its parameters.
    leads: whether it is the leader.
    gradients: number of gradients it has computed, by outcome.
    bytes_in: bytes of means and states received.
    bytes_out: bytes of gradients, means and states sent.
    waited: seconds from its submissions until it could continue.
    rejoins: how often it was readmitted.

  Example:
    >>> found = metrics(2, step=3, leads=False, gradients={"applied": 3},
    ...                 bytes_in=8, bytes_out=4, waited=0.5, rejoins=0)
    >>> found["replica_step"], found["replica_gradients"]
    ({('2',): 3}, {('2', 'applied'): 3})
  """
  own = str(replica)
  found: dict[str, table.Cells] = {
    "replica_step": {(own,): step},
    "replica_leads": {(own,): int(leads)},
    "replica_gradients": {(own, str(k)): v for k, v in gradients.items()},
    "replica_moved_bytes": {(own, "in"): bytes_in, (own, "out"): bytes_out},
    "replica_waited_seconds": {(own,): waited},
    "replica_rejoins": {(own,): rejoins},
  }
  return found
