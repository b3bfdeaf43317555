"""What the log says, so far."""

from __future__ import annotations

import dataclasses
from typing import assert_never

from optax_dist.coordinator.protocol.codec import Codec
from optax_dist.coordinator.protocol.entries import (
  Began,
  Committed,
  Compacted,
  Departed,
  Ended,
  Entry,
  Epoch,
  Incarnation,
  Job,
  Joined,
  Member,
  Process,
  Record,
  Removed,
  ReplicaId,
  Start,
)
from optax_dist.ledger import NOTHING_DONE, Progress

# How many commits are kept for members that have missed some.
RECENT = 64


@dataclasses.dataclass
class History:
  """All decisions of the log: what a coordinator knows when it starts again.

  Attributes:
    epoch: the number of the last coordinator; -1 for none.
    nonce: the nonce of the first coordinator.
    starts: the step at which each coordinator started, by epoch. If the log has lost
      its last entries, a member may know of later steps of a coordinator
      (`has_lost`).
    beginnings: how often the run has begun.
    job: what replicas have in common; None before the run has begun.
    origin: the state that the run began from, the last time.
    step: how many steps were committed since step 0.
    next_incarnation: incarnation of the next membership.
    members: the current members, by incarnation.
    departed: former members by id.
    applied: how many gradients were part of commits.
    dropped: how many were dropped, by reason, as of the last commit.
    changes: the number of the last `Change` of each process that was committed.
    progress: which samples are in committed steps.
    recent: the last commits, in order and without a gap, at most `RECENT`.
    ended: how the run has ended; None if it hasn't.
  """

  epoch: int = -1
  nonce: str = ""
  starts: dict[int, int] = dataclasses.field(default_factory=dict)
  beginnings: int = 0
  job: Job | None = None
  origin: Start = dataclasses.field(default_factory=Start)
  step: int = 0
  next_incarnation: Incarnation = 0
  members: dict[Incarnation, Member] = dataclasses.field(default_factory=dict)
  departed: dict[ReplicaId, Departed] = dataclasses.field(default_factory=dict)
  applied: int = 0
  dropped: tuple[tuple[str, int], ...] = ()
  changes: dict[Process, int] = dataclasses.field(default_factory=dict)
  progress: Progress = NOTHING_DONE
  recent: list[Committed] = dataclasses.field(default_factory=list)
  ended: Ended | None = None

  @property
  def has_no_commits(self) -> bool:
    """Whether no step has been committed, so that all start states are equal."""
    return self.step == self.origin.step

  def since(self, step: int) -> list[Committed] | None:
    """The commits from a step on; None if some are not kept any more."""
    if step == self.step:
      return []
    later = [commit for commit in self.recent if commit.round.step >= step]
    whole = later and later[0].round.step == step
    return later if whole and step < self.step else None

  def lost(self) -> list[Departed]:
    """The replicas that may come back."""
    return [
      departed for departed in self.departed.values() if not departed.left
    ]

  @property
  def has_committed(self) -> bool:
    """Whether the last coordinator has committed a step."""
    return self.step != self.starts[self.epoch]

  def has_lost(self, epoch: int, step: int) -> bool:
    """Whether the log has lost steps that a coordinator sent to a member.

    Args:
      epoch: the coordinator's epoch.
      step: how many steps the member knows of.
    """
    later = [s for number, s in self.starts.items() if number > epoch]
    return step > min([self.step, *later[:1]])

  def apply(self, record: Record) -> None:
    """Applies a record.

    Raises:
      ValueError: the record can't follow the earlier ones.
    """
    for entry in record.entries:
      self.add(entry)

  def add(self, entry: Entry) -> None:
    """Applies an entry."""
    match entry:
      case Epoch(number, nonce):
        self.nonce = self.nonce or nonce
        if number <= self.epoch:
          raise ValueError(f"epoch {number} follows epoch {self.epoch}")
        self.epoch, self.starts[number] = number, self.step
      case Began(start, job):
        self.beginnings += 1
        if self.ended is not None or self.job != job:
          # This is another run, so nothing of the earlier one counts.
          self.departed.clear()
          self.applied, self.dropped = 0, ()
        self.ended = None
        self.job, self.origin = job, start
        self.step, self.progress = start.step, start.progress
        self.starts[self.epoch] = start.step
        ended = [(old.member, old.left) for old in self.departed.values()]
        ended += [(member, False) for member in self.members.values()]
        for member, left in ended:
          self.departed[member.replica] = Departed(member, left, -1)
        self.members.clear()
        self.recent.clear()
      case Joined(member):
        self.departed.pop(member.replica, None)
        self.members[member.incarnation] = member
        self.next_incarnation = member.incarnation + 1
      case Removed(incarnation, left):
        former = self.members.pop(incarnation, None)
        if former is not None:
          self.departed[former.replica] = Departed(former, left, self.step)
      case Committed():
        step = entry.round.step
        if step != self.step:
          raise ValueError(f"step {step} is committed, and {self.step} is next")
        self.step = step + 1
        self.applied += sum(part.count for part in entry.parts)
        self.dropped = entry.dropped
        for change in entry.changes:
          self.changes[change.process] = change.number
        self.progress = after(self.progress, entry)
        self.recent.append(entry)
        del self.recent[:-RECENT]
      case Ended():
        self.ended = entry
        self.dropped = entry.dropped
      case Compacted():
        vars(self).update(vars(_HISTORIES.decode(entry.history)))
      case _:
        assert_never(entry)

  def compacted(self) -> Compacted:
    """The whole history, as one entry."""
    return Compacted(_HISTORIES.encode(self))


_HISTORIES: Codec[History] = Codec(History)


def after(progress: Progress, commit: Committed) -> Progress:
  """The samples in committed steps, after another one."""
  spans = [span for part in commit.parts for span in part.data]
  if commit.skipped:
    return progress.with_(spans, commit.skipped)
  if not spans:
    return progress
  return progress.followed_by(spans) or progress.with_(spans)
