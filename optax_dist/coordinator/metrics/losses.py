"""The cost of a run's losses, from a journal's records.

The measure is the useful share of the time in which no replica was missing and nothing
happened: a run without losses would have had this share all the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from optax_dist.coordinator import journal
from optax_dist.coordinator.metrics.time_ledger import TimeLedger
from optax_dist.quorum.events import Replica

# Events after which the current step, and the next one, don't count for the measure.
_HAPPENINGS = ("lost", "leave", "join", "coordinator")


class Losses(NamedTuple):
  """The use of a run's replica-seconds, from its first commit to its last.

  Attributes:
    losses: how often a replica was lost.
    seconds: all replica-seconds, those of lost replicas until they are back
      included.
    kept: the share of the useful computing that a run without losses had had by
      then. It is above 1 if the others have waited for what was lost, or if with
      k of N more of their gradients counted without it.
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


class _Time:
  """Replica-seconds: all, those of absence after a loss, and useful ones."""

  def __init__(self) -> None:
    self.all = self.absent = self.useful = 0.0

  def add(self, other: _Time) -> None:
    self.all += other.all
    self.absent += other.absent
    self.useful += other.useful


class _Count:
  """Counts the time of a run, commit by commit."""

  def __init__(self) -> None:
    self.total, self.undisturbed = _Time(), _Time()
    # Losses up to the last commit: later ones cost no counted time.
    self.losses = 0
    self._ledger = TimeLedger()
    self._members: set[Replica] = set()
    self._lost: set[Replica] = set()
    self._has_begun = False
    self._disturbed = 2
    # Times since the last commit, and the useful time up to that commit.
    self._since, self._new_losses = _Time(), 0
    self._now = self._useful = 0.0

  def update(self, record: journal.Record) -> None:
    self._ledger.update(record)
    kind = record["kind"]
    if kind not in (*_HAPPENINGS, "commit"):
      return
    seconds = max(0.0, record["time"] - self._now)
    self._now += seconds
    self._since.all += seconds * len(self._members | self._lost)
    self._since.absent += seconds * len(self._lost)
    if kind == "commit":
      self._commit()
      return
    self._disturbed = 2
    if kind != "coordinator":
      self._change(kind, record["replica"])

  def _change(self, kind: str, replica: Replica) -> None:
    self._members.discard(replica)
    if kind == "lost":
      self._lost.add(replica)
      self._new_losses += 1
    else:
      self._lost.discard(replica)
    if kind == "join":
      self._members.add(replica)

  def _commit(self) -> None:
    useful = self._ledger.booked()["useful"]
    since, self._since = self._since, _Time()
    since.useful, self._useful = useful - self._useful, useful
    if self._has_begun:
      self.losses += self._new_losses
      self.total.add(since)
      if not self._disturbed and not since.absent:
        self.undisturbed.add(since)
    else:
      # A replica that was lost and is back by now is missing in no counted second.
      self.losses, self._has_begun = len(self._lost), True
    self._new_losses = 0
    self._disturbed = max(0, self._disturbed - 1)


def of(records: Iterable[journal.Record]) -> Losses | None:
  """What losses have cost a recorded run; for a resumed one, its last part counts.

  Args:
    records: the records from `journal.read`.

  Returns:
    None if no replica was lost, or no step was undisturbed.

  Example:
    >>> commit = lambda time, *who: {
    ...   "kind": "commit", "time": time, "members": [
    ...     {"replica": r, "count": 1, "compute": 0.9, "age": 0.0} for r in who]}
    >>> cost = of([
    ...   *({"kind": "join", "replica": r, "time": 0.0} for r in (0, 1)),
    ...   *(commit(float(t), 0, 1) for t in range(1, 5)),
    ...   {"kind": "lost", "replica": 1, "time": 4.5},
    ...   commit(5.0, 0),
    ...   {"kind": "join", "replica": 1, "time": 5.5},
    ...   commit(6.0, 0), commit(7.0, 0, 1),
    ... ])
    >>> print(f"{cost.kept:.3f} {cost.bound:.3f} {cost.each:.1f}")
    0.833 0.917 2.0
  """
  count = _Count()
  for record in records:
    if record["kind"] == "run":
      count = _Count()
    count.update(record)
  total, usual = count.total, count.undisturbed
  if not count.losses or not usual.useful:
    return None
  return Losses(
    count.losses,
    total.all,
    total.useful / (usual.useful / usual.all * total.all),
    1.0 - total.absent / total.all,
  )
