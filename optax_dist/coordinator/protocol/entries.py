"""What must be decided once: the log's entries, and the store's other values.

The log is a row of keys in the store, `log/0`, `log/1` and so on. A record is
only ever put where none is, so of two processes that believe to be leader one
succeeds: the store decides what is committed. Everything else that replicas
tell each other is in `messages`.

Two rules make deleting old records safe. Records are deleted by blocks, and a
block's marker is written before anything of it is deleted: a process that has found
a record, or put one to become leader, looks for the marker *afterwards*. And a
record with a `Term` is never deleted: a leader's next put after it was replaced
is where that `Term` stands, so it always conflicts.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, TypeAlias

from optax_dist.coordinator.protocol.codec import AtLeast, Codec
from optax_dist.ledger import NOTHING_DONE, Progress, Spans

Natural: TypeAlias = Annotated[int, AtLeast(0)]
Positive: TypeAlias = Annotated[int, AtLeast(1)]
# A replica's id, as its user chose it.
ReplicaId: TypeAlias = int | str
# A process's name, taken anew whenever it starts; the transport's name of it.
Process: TypeAlias = str
# The number of a membership: unique in a run, and higher for later ones.
Incarnation: TypeAlias = Natural


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
  """A replica that takes part.

  Attributes:
    incarnation: the number of this membership.
    replica: the replica's id; one membership per id.
    process: the name of its process.
    address: where its transport listens.
  """

  incarnation: Incarnation
  replica: ReplicaId
  process: Process
  address: str


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptId:
  """Names one aggregation in the whole run.

  A replica gives at most one gradient under an id, so all who finish an
  aggregation of the same id hold the same mean.

  Attributes:
    term: of the leader.
    step: the step that is being made.
    number: counts the leader's attempts at the step from 1; 0 is the optimistic
      one, which members begin by themselves.
    membership: the log position of the latest change of membership, so that an
      optimistic attempt is one of the same members.
  """

  term: Natural
  step: Natural
  number: Natural
  membership: Natural


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
  """One member's gradient in an attempt or commit.

  Attributes:
    incarnation: whose it is.
    replica: the id of that replica.
    sequence: the sender's number of the submission.
    local_step: the step of the parameters it was computed on.
    staleness: by how many steps it is late.
    count: how many gradients are summed in it.
    weight: what it counts for in the mean.
    data: the samples that it was computed on, where a ledger leases them.
  """

  incarnation: Incarnation
  replica: ReplicaId
  sequence: Natural
  local_step: int
  staleness: Natural
  count: Positive
  weight: float
  data: Spans = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
  """What is in a learner's contribution to a fragment.

  Attributes:
    tokens: that it was trained on.
    steps: the learner's own, since it began from a version of the fragment.
    step_seconds: how long one of them takes.
    late: rounds of the fragment since that version.
    begins: whether it is the learner's turn, or it was called: then the round is
      under way. Else it waits for the round to begin.
  """

  tokens: Natural
  steps: Positive
  step_seconds: float
  late: Natural
  begins: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Leased:
  """A member computes on these samples next.

  Attributes:
    incarnation: of the member.
    spans: the samples, in its order.
  """

  incarnation: Incarnation
  spans: Spans


@dataclasses.dataclass(frozen=True, slots=True)
class Details:
  """What the journal tells of a gradient; nothing is decided by it.

  Attributes:
    batches: the batches it was computed on, as JSON text; "" for none.
    compute: seconds that computing it took, if known.
    age: seconds from its arrival at the leader until the commit.
  """

  batches: str
  compute: float | None
  age: float


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
  """A process has become leader, and is a member from here on if it wasn't.

  Attributes:
    term: counts the leaders of the run from 0.
    leader: its process.
    address: where it listens.
    fresh: membership starts anew with the leader as the only member; all who
      were members before are removed. Only as long as no step was committed.
    incarnation: of the leader's membership.
    replica: the leader's id.
    step: the first step, where `fresh`; the next one otherwise.
    digest: of the state that the run starts from, where `fresh`; "" otherwise.
    progress: which samples are in committed steps of the run that it goes on
      with, where `fresh`.
  """

  term: Natural
  leader: Process
  address: str
  fresh: bool
  incarnation: Incarnation
  replica: ReplicaId
  step: Natural
  digest: str
  progress: Progress = NOTHING_DONE


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
  """A replica takes part from here on; an earlier membership of its id ends."""

  member: Member


@dataclasses.dataclass(frozen=True, slots=True)
class Removed:
  """A membership has ended.

  Attributes:
    incarnation: which one.
    left: whether it left gracefully; otherwise it was lost.
    reason: in words, for people.
  """

  incarnation: Incarnation
  left: bool
  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Committed:
  """A step: everyone applies the mean over `parts`, in this order.

  Attributes:
    attempt: the aggregation that made the mean.
    parts: the gradients in the mean, in replica order.
    readers: incarnations for which the members keep the mean, or a witness
      fetched it; empty if `mean` has it.
    inline: whether `mean` is the mean; otherwise those in `parts` and `readers`
      have it by their aggregation.
    mean: the mean's bytes, or none.
    save: whether the state after this step is the one that all replicas save.
    details: for the journal; one for each part.
    dropped: for each reason, how many gradients the run has dropped so far.
    leases: what the members of `parts` compute on next, in their order, where a
      ledger leases it; these samples are in no committed step.
    others: what other members compute on next.
    skipped: samples that are given up, for their gradients were never finite.
  """

  attempt: AttemptId
  parts: tuple[Part, ...]
  readers: tuple[Incarnation, ...]
  inline: bool
  mean: bytes
  save: bool
  details: tuple[Details, ...]
  dropped: tuple[tuple[str, Natural], ...]
  leases: tuple[Spans, ...] = ()
  others: tuple[Leased, ...] = ()
  skipped: Spans = ()

  def with_mean(self, mean: bytes) -> Committed:
    """The same, but for its mean: a third of the time of `replace`."""
    return Committed(
      self.attempt,
      self.parts,
      self.readers,
      self.inline,
      mean,
      self.save,
      self.details,
      self.dropped,
      self.leases,
      self.others,
      self.skipped,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
  """The run is over; nothing follows.

  Attributes:
    step: how many steps were committed.
    reason: in words, for people.
    error: "" for a good end; else the name of the error that all replicas
      raise, "CoordinatorError" or "Diverged".
    dropped: for each reason, how many gradients the run has dropped.
  """

  step: Natural
  reason: str
  error: str
  dropped: tuple[tuple[str, Natural], ...]


Entry: TypeAlias = Term | Joined | Removed | Committed | Ended


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
  """What stands at one position of the log.

  Attributes:
    term: of the leader that put it.
    entries: one or more; those that had come up while the record before was
      being put.
  """

  term: Natural
  entries: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Trimmed:
  """The marker of a block: its records may be deleted. It stays itself."""

  block: Natural


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
  """Which run this is: put once, by the first process of all.

  Attributes:
    nonce: a random text that is part of every signature, so that nothing
      recorded in another run is accepted in this one.
  """

  nonce: str


@dataclasses.dataclass(frozen=True, slots=True)
class Beat:
  """The leader's sign of life, overwritten now and then: a hint, no decision.

  It lets a process that starts find the leader, and keeps one that is cut off
  from all others, but not from the store, from claiming leadership.

  Attributes:
    term: of the leader.
    leader: its process.
    address: where it listens.
    count: goes up with each overwriting.
    position: from here on the log is still there; a hint, too.
  """

  term: Natural
  leader: Process
  address: str
  count: Natural
  position: Natural


StoreValue: TypeAlias = Record | Trimmed | Run | Beat
STORE_VALUES: Codec[StoreValue] = Codec(StoreValue)


@dataclasses.dataclass(frozen=True, slots=True)
class Departed:
  """A replica that takes part no more.

  Attributes:
    replica: its id.
    left: whether it left gracefully.
  """

  replica: ReplicaId
  left: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ViewState:
  """All that the log has decided up to a position, for a reader that starts there.

  Attributes:
    term: of the latest leader.
    leader: its process.
    leader_address: where it listens.
    step: how many steps were committed since step 0.
    origin_step: the step that the run started from.
    origin_digest: of the state that it started from.
    next_incarnation: of the next membership.
    membership: the position of the latest change of membership.
    members: who takes part.
    departed: who does no more.
    terms: positions of records with a `Term` that trimming must leave.
    applied: how many gradients were part of commits.
    dropped: how many were dropped, by reason, as of the latest commit.
    saved: the latest step that all were to save; -1 for none.
    ended: how the run has ended; None if it hasn't.
    progress: which samples are in committed steps.
  """

  term: Natural
  leader: Process
  leader_address: str
  step: Natural
  origin_step: Natural
  origin_digest: str
  next_incarnation: Incarnation
  membership: Natural
  members: tuple[Member, ...]
  departed: tuple[Departed, ...]
  terms: tuple[int, ...]
  applied: Natural
  dropped: tuple[tuple[str, Natural], ...]
  saved: int
  ended: Ended | None
  progress: Progress = NOTHING_DONE
