"""Metrics of one replica: its own counts, regardless of who leads."""

from __future__ import annotations

from collections.abc import Mapping

from optax_dist.coordinator.metrics.metric import Metric, Sample


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
) -> list[Metric]:
  """Creates the metrics of a replica.

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
    >>> found[0].name, found[0].samples
    ('replica_step', (Sample(value=3, labels={'replica': '2'}),))
  """
  own = {"replica": str(replica)}
  only = lambda value: (Sample(value, own),)
  outcomes = tuple(
    Sample(count, own | {"outcome": outcome})
    for outcome, count in gradients.items()
  )
  moved = (
    Sample(bytes_in, own | {"direction": "in"}),
    Sample(bytes_out, own | {"direction": "out"}),
  )
  return [
    Metric(
      "replica_step",
      "gauge",
      "The step that the replica's parameters have.",
      only(step),
    ),
    Metric(
      "replica_leads",
      "gauge",
      "1 if the replica is the leader, who reports on the run.",
      only(int(leads)),
    ),
    Metric(
      "replica_gradients",
      "counter",
      "Gradients that the replica has computed, by outcome.",
      outcomes,
    ),
    Metric(
      "replica_moved_bytes",
      "counter",
      "Bytes of gradients, means and states that the replica has moved.",
      moved,
      "bytes",
    ),
    Metric(
      "replica_waited_seconds",
      "counter",
      "From its submissions until it could compute on.",
      only(waited),
      "seconds",
    ),
    Metric(
      "replica_rejoins",
      "counter",
      "How often the replica was readmitted.",
      only(rejoins),
    ),
  ]
