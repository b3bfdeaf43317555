"""The decisions of the log so far: equal for all that have read as far."""

from __future__ import annotations

import copy
import dataclasses
from typing import assert_never

from optax_dist.coordinator.protocol.entries import (
  Committed,
  Departed,
  Ended,
  Entry,
  Incarnation,
  Joined,
  Member,
  Process,
  Record,
  Removed,
  ReplicaId,
  Term,
  ViewState,
)
from optax_dist.ledger import Progress


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
  """A state from which a run can begin.

  Attributes:
    step: its step.
    digest: digest of its arrays.
    progress: the samples included in it; ignored in comparisons.
  """

  step: int
  digest: str
  progress: Progress = dataclasses.field(compare=False)


class View:
  """Leader, members and step, as of a position of the log.

  Attributes: those of `ViewState`, with `members` by incarnation and `departed`
    by id; `ended`, the entry that ended the run, or None; `latest`, which has
    `progress` after each step of the latest record; and `broken`, the first
    commit that does not follow the step before it, "" for none.
  """

  def __init__(self) -> None:
    self.term = -1
    self.leader: Process = ""
    self.leader_address = ""
    self.step = self.origin_step = 0
    self.origin_digest = ""
    self.next_incarnation: Incarnation = 0
    self.membership = -1
    self.members: dict[Incarnation, Member] = {}
    self.departed: dict[ReplicaId, bool] = {}
    self.terms: list[int] = []
    self.applied = 0
    self.dropped: tuple[tuple[str, int], ...] = ()
    self.saved = -1
    self.ended: Ended | None = None
    self.progress = Progress()
    self.latest: list[tuple[int, Progress]] = []
    self.broken = ""

  def copy(self) -> View:
    """An independent copy."""
    new = copy.copy(self)
    new.members, new.departed = dict(self.members), dict(self.departed)
    new.terms = list(self.terms)
    return new

  @property
  def untouched(self) -> bool:
    """Whether no step has been committed, so that all start states are equal."""
    return self.step == self.origin_step

  @property
  def origin(self) -> Start:
    """The state that the run began from."""
    return Start(self.origin_step, self.origin_digest, self.progress)

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

  def apply(self, position: int, record: Record) -> None:
    """Applies the record at this position."""
    self.latest = []
    for entry in record.entries:
      self._apply(position, entry)

  def _apply(self, position: int, entry: Entry) -> None:
    match entry:
      case Term():
        self.term = entry.term
        self.leader, self.leader_address = entry.leader, entry.address
        self.terms.append(position)
        if entry.fresh:
          self.broken = ""
          self.step = self.origin_step = entry.step
          self.origin_digest = entry.digest
          self.progress = entry.progress
          self.latest.append((self.step, self.progress))
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
        if entry.save:
          self.saved = self.step
        spans = [span for part in entry.parts for span in part.data]
        if entry.skipped:
          self.progress = self.progress.with_(spans, entry.skipped)
        elif spans:
          after = self.progress.followed_by(spans)
          self.progress = after or self.progress.with_(spans)
        self.latest.append((self.step, self.progress))
      case Ended():
        self.ended = entry
        self.dropped = entry.dropped
      case _:
        assert_never(entry)

  def _admit(self, position: int, member: Member) -> None:
    old = self.of_replica(member.replica)
    if old is not None:
      del self.members[old.incarnation]
    self.departed.pop(member.replica, None)
    self.members[member.incarnation] = member
    self.membership = position
    self.next_incarnation = max(self.next_incarnation, member.incarnation + 1)

  def dump(self) -> ViewState:
    """Serializes it, for a reader that starts here."""
    return ViewState(
      self.term,
      self.leader,
      self.leader_address,
      self.step,
      self.origin_step,
      self.origin_digest,
      self.next_incarnation,
      self.membership,
      tuple(self.members.values()),
      tuple(Departed(r, left) for r, left in self.departed.items()),
      tuple(self.terms),
      self.applied,
      self.dropped,
      self.saved,
      self.ended,
      self.progress,
    )

  @classmethod
  def load(cls, state: ViewState) -> View:
    """Restores the view from `dump`."""
    view = cls()
    view.term, view.leader = state.term, state.leader
    view.leader_address = state.leader_address
    view.step, view.origin_step = state.step, state.origin_step
    view.origin_digest = state.origin_digest
    view.next_incarnation = state.next_incarnation
    view.membership = state.membership
    view.members = {m.incarnation: m for m in state.members}
    view.departed = {d.replica: d.left for d in state.departed}
    view.terms = list(state.terms)
    view.applied, view.dropped = state.applied, state.dropped
    view.saved, view.ended = state.saved, state.ended
    view.progress = state.progress
    return view
