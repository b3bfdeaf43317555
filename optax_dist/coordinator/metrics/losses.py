"""What losses have cost a run, from a journal's records.

A run without losses would have gone on as it did while all replicas were there and
nothing had happened: that pace is the measure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from optax_dist.coordinator import journal
from optax_dist.quorum.events import Replica

# What makes the step in which it happens, and the next one, no measure.
_HAPPENINGS = ("lost", "leave", "join", "coordinator")


class Losses(NamedTuple):
  """What has become of a run's replica-seconds, from its first commit to its last.

  Attributes:
    losses: how often a replica was lost.
    seconds: all replica-seconds, those of absent replicas included.
    kept: the share of the gradients that a run without losses had had by then.
    bound: the share that is left if nothing but the lost replicas' absence counts.
  """

  losses: int
  seconds: float
  kept: float
  bound: float

  @property
  def each(self) -> float:
    """Replica-seconds that a loss has cost."""
    return (1.0 - self.kept) * self.seconds / self.losses


def of(records: Iterable[journal.Record]) -> Losses | None:
  """What losses have cost a recorded run; for a resumed one, its last part counts.

  Args:
    records: the records from `journal.read`.

  Returns:
    None if no replica was lost, or no step was undisturbed.

  Example:
    >>> commit = lambda time, *who: {
    ...   "kind": "commit", "time": time,
    ...   "members": [{"replica": r, "count": 1} for r in who]}
    >>> found = of([
    ...   *({"kind": "join", "replica": r, "time": 0.0} for r in (0, 1)),
    ...   *(commit(float(t), 0, 1) for t in range(1, 5)),
    ...   {"kind": "lost", "replica": 1, "time": 4.5},
    ...   commit(5.0, 0),
    ...   {"kind": "join", "replica": 1, "time": 5.5},
    ...   commit(6.0, 0), commit(7.0, 0, 1),
    ... ])
    >>> print(f"{found.kept:.3f} {found.bound:.3f} {found.each:.1f}")
    0.833 0.917 2.0
  """
  there: set[Replica] = set()
  absent: dict[Replica, float] = {}
  most = losses = 0
  first = last = 0.0
  gone = gradients = 0.0
  # The steps of a pace, and their seconds, by the replicas that were there.
  paces: dict[int, tuple[float, float]] = {}
  disturbed = 2
  for record in records:
    kind, now = record["kind"], record["time"]
    if kind == "run":
      there, absent, paces = set(), {}, {}
      most = losses = 0
      first = last = gone = gradients = 0.0
    if kind in _HAPPENINGS:
      disturbed = 2
    match kind:
      case "join":
        there.add(record["replica"])
        most = max(most, len(there))
        if record["replica"] in absent:
          gone += now - max(first, absent.pop(record["replica"]))
      case "leave" | "lost":
        there.discard(record["replica"])
        if kind == "lost":
          losses += 1
          absent[record["replica"]] = now
      case "commit":
        count = sum(member["count"] for member in record["members"])
        if first:
          gradients += count
          if not disturbed:
            steps, seconds = paces.get(len(there), (0.0, 0.0))
            paces[len(there)] = steps + count, seconds + now - last
        first, last = first or now, now
        disturbed = max(0, disturbed - 1)
  steps, seconds = paces.get(most, (0.0, 0.0))
  if not losses or not steps:
    return None
  gone += sum(max(0.0, last - max(first, since)) for since in absent.values())
  total = last - first
  return Losses(
    losses,
    most * total,
    gradients / (steps / seconds * total),
    1.0 - gone / (most * total),
  )
