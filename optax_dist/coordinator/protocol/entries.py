"""Values that are decided exactly once: the log's entries, and other keys.

The log is a sequence of keys in the store, `log/0`, `log/1` and so on. A record
is only put if the key has no value, so if two processes believe that they are
leader, one succeeds: the store decides what is committed. All other
communication between replicas is in `messages`.

Two rules make the deletion of old records safe. Records are deleted in blocks,
and a block's marker is written before any of it is deleted: a process that has
found a record, its own `Term` included, checks for the marker *afterwards*.
And a record with a `Term` is never deleted: when a leader was replaced, its
next put is at the position of that `Term`, so it always conflicts.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

from optax_dist.coordinator.protocol.codec import (
  Codec,
  Finite,
  Integer,
  Natural,
  Positive,
  Struct,
)
from optax_dist.ledger import NOTHING_DONE, Progress, Spans

# A replica's id, chosen by its user.
ReplicaId: TypeAlias = Integer | str
# A process's name, new whenever it starts; also its name in the transport.
Process: TypeAlias = str
# The number of a membership: unique in a run, and increasing.
Incarnation: TypeAlias = Natural
# The runs that a run goes on from, the first one first: of each its id, and the
# step that the next one has gone on from.
Lineage: TypeAlias = tuple[tuple[str, Natural], ...]


def as_lineage(given: Any) -> Lineage:
  """Checks a lineage from outside; None for that of a run that begins anew.

  Raises:
    ValueError: it is none.
  """
  try:
    return msgspec.convert(given or (), Lineage)
  except msgspec.ValidationError as error:
    raise ValueError(
      "lineage must be what checkpoint.restore returns, pairs of a run and a"
      f" step; got {given!r:.100}: {error}."
    ) from None


class Member(Struct):
  """A replica that takes part in the run.

  Attributes:
    incarnation: the number of this membership.
    replica: the replica's id; one membership per id.
    process: the name of its process.
    address: address of its transport.
  """

  incarnation: Incarnation
  replica: ReplicaId
  process: Process
  address: str


class AttemptId(Struct):
  """Identifies an aggregation within the run.

  A replica contributes at most one gradient under an id, so all that complete
  an aggregation with the same id have the same mean.

  Attributes:
    term: term of the leader.
    step: the step being taken.
    number: the leader's attempts at the step, counted from 1; 0 is the
      optimistic one, which members begin by themselves.
    membership: the log position of the last change of membership, so that an
      optimistic attempt has the same members everywhere.
  """

  term: Natural
  step: Natural
  number: Natural
  membership: Natural


class Part(Struct):
  """One member's gradient in an attempt or commit.

  Attributes:
    incarnation: incarnation of its replica.
    replica: the id of that replica.
    sequence: the sender's number of the submission.
    local_step: the step of the parameters it was computed on.
    staleness: its staleness, in steps.
    count: how many gradients are summed in it.
    weight: its weight in the mean.
    data: the samples that it was computed on, if a ledger leases them.
  """

  incarnation: Incarnation
  replica: ReplicaId
  sequence: Natural
  local_step: Integer
  staleness: Natural
  count: Positive
  weight: Finite
  data: Spans = ()


class Leased(Struct):
  """The samples that a member computes on next.

  Attributes:
    incarnation: the membership that they are leased to.
    spans: the samples, in order; if empty, it waits for some. If more is
      requested (`effects.Taken`), those for the rest.
  """

  incarnation: Incarnation
  spans: Spans


class Details(Struct):
  """Fields of a gradient for the journal; nothing is decided by them.

  Attributes:
    batches: the batches it was computed on, as JSON text; "" for none.
    compute: seconds that computing it took, if known.
    age: seconds from its arrival at the leader until the commit.
  """

  batches: str
  compute: Finite | None
  age: Finite


class Term(Struct):
  """A process has become leader, and a member unless it already was one.

  Attributes:
    term: number of the term in the run, from 0.
    leader: process of the leader.
    address: address of its transport.
    fresh: membership restarts with the leader as the only member; all previous
      members are removed. Only possible before the first commit.
    incarnation: incarnation of the leader's membership.
    replica: the leader's id.
    step: the first step, if `fresh`; the next one otherwise.
    digest: of the state that the run starts from, if `fresh`; "" otherwise.
    progress: the samples in committed steps of the run that it continues, if
      `fresh`.
    lineage: the runs that it continues, if `fresh`.
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
  lineage: Lineage = ()


class Joined(Struct):
  """A replica has joined; an earlier membership of its id ends."""

  member: Member


class Removed(Struct):
  """A membership has ended.

  Attributes:
    incarnation: its incarnation.
    left: whether it left gracefully; otherwise it was lost.
    reason: explanation for people.
  """

  incarnation: Incarnation
  left: bool
  reason: str


# Numbers of hyperparameters, by name.
Hyperparams: TypeAlias = tuple[tuple[str, Finite], ...]


class Change(Struct):
  """Hyperparameters that one process sets for all replicas.

  Attributes:
    process: the process.
    number: its requests so far; each counts once.
    values: the numbers.
  """

  process: Process
  number: Natural
  values: Hyperparams


class Committed(Struct):
  """A step: all replicas apply the mean over `parts`, in this order.

  Attributes:
    attempt: the aggregation that computed the mean.
    parts: the gradients in the mean, in replica order.
    mean: the mean's bytes, if gradients are sent inline; None: members and
      readers have it from their aggregation.
    save: whether the state after this step is the one that all replicas save.
    details: fields for the journal; one for each part.
    dropped: for each reason, how many gradients the run has dropped so far.
    leases: the samples that members compute on next, if a ledger leases them;
      they are not in a committed step.
    skipped: samples that are given up because their gradients were never
      finite; those of a deterministic step count as zeros in it.
    changes: hyperparameters that all replicas set, in this order, before they apply
      the mean.
  """

  attempt: AttemptId
  parts: tuple[Part, ...]
  mean: bytes | None
  save: bool
  details: tuple[Details, ...]
  dropped: tuple[tuple[str, Natural], ...]
  leases: tuple[Leased, ...] = ()
  skipped: Spans = ()
  changes: tuple[Change, ...] = ()

  @property
  def hyperparams(self) -> Hyperparams:
    """The numbers that they are set to: the last change of a name decides."""
    found: dict[str, float] = {}
    for change in self.changes:
      found.update(change.values)
    return tuple(found.items())


class Ended(Struct):
  """The run is over; nothing follows.

  Attributes:
    step: how many steps were committed.
    reason: explanation for people.
    error: "" if it finished successfully; otherwise the error that all replicas
      raise, "CoordinatorError" or "Diverged".
    dropped: for each reason, how many gradients the run has dropped.
  """

  step: Natural
  reason: str
  error: str
  dropped: tuple[tuple[str, Natural], ...]


Entry: TypeAlias = Term | Joined | Removed | Committed | Ended


class Record(Struct):
  """The record at one position of the log.

  Attributes:
    term: term of the leader that put it.
    entries: those that were decided while the previous record was
      being put.
  """

  term: Natural
  entries: Annotated[tuple[Entry, ...], msgspec.Meta(min_length=1)]


class Trimmed(Struct):
  """The marker of a block whose records may be deleted. It is never deleted."""

  block: Natural


class Run(Struct):
  """The identity of the run: put once, by its first process.

  Attributes:
    nonce: a random text that is part of every signature, so that nothing
      recorded in another run is accepted in this one.
  """

  nonce: str


class Beat(Struct):
  """The leader's heartbeat in the store, overwritten regularly: only a hint.

  It helps a starting process to find the leader, and prevents one that is cut
  off from all others, but not from the store, from claiming leadership.

  Attributes:
    term: term of the leader.
    leader: its process.
    address: address of its transport.
    count: increases with each write.
    position: from here on the log is not deleted; also a hint.
  """

  term: Natural
  leader: Process
  address: str
  count: Natural
  position: Natural


StoreValue: TypeAlias = Record | Trimmed | Run | Beat
STORE_VALUES: Codec[StoreValue] = Codec(StoreValue)
