"""The decisions of the log so far: equal for all that have read as far."""

from __future__ import annotations

import copy
import dataclasses
from typing import assert_never

import msgspec

from optax_dist.coordinator.protocol.codec import Integer, Natural
from optax_dist.coordinator.protocol.entries import (
  Committed,
  Ended,
  Entry,
  Incarnation,
  Joined,
  Lineage,
  Member,
  Process,
  Record,
  Removed,
  ReplicaId,
  Term,
)
from optax_dist.ledger import NOTHING_DONE, Progress


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
  """A state from which a run can begin.

  Attributes:
    step: its step.
    digest: digest of its arrays.
    progress: the samples included in it; ignored in comparisons.
    lineage: the runs that it comes from; ignored in comparisons.
  """

  step: int
  digest: str
  progress: Progress = dataclasses.field(compare=False)
  lineage: Lineage = dataclasses.field(default=(), compare=False)


class View(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
  """All decisions of the log up to a position; `Welcome` has it whole.

  Attributes:
    term: term of the last leader; -1 for none.
    leader: its process.
    leader_address: address of its transport.
    step: how many steps were committed since step 0.
    origin_step: the step that the run started from.
    origin_digest: digest of the state that it started from.
    next_incarnation: incarnation of the next membership.
    membership: the position of the last change of membership; -1 for none.
    members: the current members, by incarnation.
    departed: former members by id, and whether they left gracefully.
    terms: positions of records with a `Term`, which trimming must keep.
    applied: how many gradients were part of commits.
    dropped: how many were dropped, by reason, as of the last commit.
    changes: the number of the last `Change` of each process that was committed.
    ended: how the run has ended; None if it hasn't.
    progress: which samples are in committed steps.
    lineage: the runs that this one continues.
    broken: the first commit that does not follow the step before it, "" for none.
  """

  term: Integer = -1
  leader: Process = ""
  leader_address: str = ""
  step: Natural = 0
  origin_step: Natural = 0
  origin_digest: str = ""
  next_incarnation: Incarnation = 0
  membership: Integer = -1
  members: dict[Incarnation, Member] = {}
  departed: dict[ReplicaId, bool] = {}
  terms: list[Natural] = []
  applied: Natural = 0
  dropped: tuple[tuple[str, Natural], ...] = ()
  changes: dict[Process, Natural] = {}
  ended: Ended | None = None
  progress: Progress = NOTHING_DONE
  lineage: Lineage = ()
  broken: str = ""

  def copy(self) -> View:
    """An independent copy."""
    new = copy.copy(self)
    new.members, new.departed = dict(self.members), dict(self.departed)
    new.terms, new.changes = list(self.terms), dict(self.changes)
    return new

  @property
  def untouched(self) -> bool:
    """Whether no step has been committed, so that all start states are equal."""
    return self.step == self.origin_step

  @property
  def origin(self) -> Start:
    """The state that the run began from."""
    return Start(
      self.origin_step, self.origin_digest, self.progress, self.lineage
    )

  def of_process(self, process: Process) -> Member | None:
    """The membership of a process."""
    for member in self.members.values():
      if member.process == process:
        return member
    return None

  def of_replica(self, replica: ReplicaId) -> Member | None:
    """The membership of a replica."""
    for member in self.members.values():
      if member.replica == replica:
        return member
    return None

  def apply(self, position: int, record: Record) -> list[tuple[int, Progress]]:
    """Applies the record at this position.

    Returns:
      The steps that it begins or takes, and the samples in all up to each.
    """
    steps: list[tuple[int, Progress]] = []
    for entry in record.entries:
      if self._apply(position, entry):
        steps.append((self.step, self.progress))
    return steps

  def _apply(self, position: int, entry: Entry) -> bool:
    """Applies one entry; returns whether the step is another one."""
    match entry:
      case Term():
        self.term = entry.term
        self.leader, self.leader_address = entry.leader, entry.address
        self.terms.append(position)
        if entry.fresh:
          self.broken = ""
          self.step = self.origin_step = entry.step
          self.origin_digest = entry.digest
          self.progress, self.lineage = entry.progress, entry.lineage
          for member in self.members.values():
            self.departed[member.replica] = False
          self.members.clear()
        if entry.incarnation not in self.members:
          self._admit(
            position,
            Member(
              entry.incarnation, entry.replica, entry.leader, entry.address
            ),
          )
        return entry.fresh
      case Joined(member):
        self._admit(position, member)
      case Removed(incarnation, left):
        member_ = self.members.pop(incarnation, None)
        if member_ is not None:
          self.membership = position
          self.departed[member_.replica] = left
      case Committed():
        if entry.attempt.step != self.step and not self.broken:
          self.broken = (
            f"record {position} of the log commits step {entry.attempt.step},"
            f" and the next one is {self.step}"
          )
        self.step = entry.attempt.step + 1
        self.applied += sum(part.count for part in entry.parts)
        self.dropped = entry.dropped
        for change in entry.changes:
          self.changes[change.process] = change.number
        spans = [span for part in entry.parts for span in part.data]
        if entry.skipped:
          self.progress = self.progress.with_(spans, entry.skipped)
        elif spans:
          after = self.progress.followed_by(spans)
          self.progress = after or self.progress.with_(spans)
        return True
      case Ended():
        self.ended = entry
        self.dropped = entry.dropped
      case _:
        assert_never(entry)
    return False

  def _admit(self, position: int, member: Member) -> None:
    old = self.of_replica(member.replica)
    if old is not None:
      del self.members[old.incarnation]
    self.departed.pop(member.replica, None)
    self.members[member.incarnation] = member
    self.membership = position
    self.next_incarnation = max(self.next_incarnation, member.incarnation + 1)
