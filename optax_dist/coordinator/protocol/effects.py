"""The effects of `Coordinator.step` and `Client.step`, which drivers execute.

They are executed in order, and none of them waits: slow operations are started,
and their end is an input. An effect that can't be executed any more (a lost
peer, a cancelled round) is ignored without an error: an input gives the core the
reason, or has done so already.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from optax_dist.coordinator.protocol import journal_events
from optax_dist.coordinator.protocol.codec import Struct
from optax_dist.coordinator.protocol.entries import (
  Hyperparams,
  Incarnation,
  Leased,
  Lineage,
  Member,
  Part,
  Process,
  Record,
  ReplicaId,
  RoundId,
)
from optax_dist.coordinator.protocol.messages import (
  Call,
  Fetch,
  Message,
  Serve,
)
from optax_dist.ledger import Progress

# Transport.


class UseRun(Struct):
  """The transport signs messages for this run, and accepts connections.

  Attributes:
    nonce: nonce of the run; part of every signature.
    run_id: identifies the run; see `entries.run_id`.
    lineage: the runs that it continues.
  """

  nonce: str
  run_id: str
  lineage: Lineage


class Connect(Struct):
  """Starts to connect to a process, unless connected or connecting already.

  Messages may follow at once. If it fails, there is a `PeerLost`.
  """

  peer: Process
  address: str


class Disconnect(Struct):
  """Closes the connection after sending pending messages; no `PeerLost` here.

  Aggregations and snapshots that need the peer fail with their own inputs.
  """

  peer: Process
  reason: str


class Send(Struct):
  """Sends a message to other processes."""

  peers: tuple[Process, ...]
  message: Message


# The coordinator's log.


class Append(Struct):
  """Appends a record to the log: all following effects happen once it is there.

  If the record can't be written, the process ends instead: no other process may learn
  of a decision that the next coordinator won't find in the log.
  """

  record: Record


# Aggregation. A member or reader of a round keeps its gradients and means
# until `Release`.


class Aggregate(Struct):
  """A replica's part in an aggregation: reduce-scatter, then gather.

  A member averages its slice of all members' gradients, in the order of `parts`,
  sends the mean of that slice to members and readers, and gathers the other slices. A
  reader only gathers; it starts along with the members, which have nothing to send
  at first. Answers `Done` or `Failed`, once, unless it was cancelled.

  An early aggregation may begin long before the other members have a gradient: it has
  no deadline, and ends by success, `Release`, or the loss of a peer. Any other
  aggregation fails after a member's `Deadlines.transfer` without progress.

  Attributes:
    round: its id, from which transfer ids are derived.
    parts: the gradients, in order.
    peers: the members whose gradients these are, each once, in the same order.
    readers: other replicas that gather the mean.
    me: the index of this replica in `peers`; None for a reader.
  """

  round: RoundId
  parts: tuple[Part, ...]
  peers: tuple[Member, ...]
  readers: tuple[Member, ...]
  me: int | None


class Release(Struct):
  """Frees a round: its mean and slices are no longer needed.

  If the round's aggregation has not ended, it is cancelled, without an answer.
  """

  round: RoundId


# The replica's state. The core counts steps; the driver holds the arrays. There is one
# published state, and at most one that is computed ahead of it. The coordinator's
# messages `Serve` and `Fetch` are also effects. `Serve` sends the published state at
# once, and has no answer. `Fetch` is answered by `SnapshotFetched`, or by
# `SnapshotFailed`, for instance after `Deadlines.transfer` without progress. Another
# `Fetch` replaces the one before.


class Apply(Struct):
  """Computes the state after the next step, speculatively.

  It stays hidden until `Publish`, and is dropped by `Restore`, or by
  another `Apply`. The computation may be in the background.

  Attributes:
    mean: the round whose mean is applied, or the bytes of an inline mean.
    hyperparams: values to set before the mean is applied.
  """

  mean: RoundId | bytes
  hyperparams: Hyperparams = ()


class Publish(Struct):
  """Publishes the state computed by `Apply`: its step is committed.

  If the state is still being computed, everything that reads it waits.
  The previous state is kept until a directly following `Resolved` has been
  handled (a strategy may need both).

  Attributes:
    step: the step of the new state.
    save: whether all replicas save this state: the driver keeps it until it was
      saved, or a later state to save replaces it.
  """

  step: int
  save: bool


class Restore(Struct):
  """Publishes the state of `SnapshotFetched`, by the transfer's id."""

  step: int
  transfer: int


class TakeFingerprint(Struct):
  """Computes a digest of the published state; answers `Fingerprint`."""

  step: int


# For the training loop. The coordinator's message `Call` is also such an effect.


class Admitted(Struct):
  """The replica is admitted, and its published state is that of the run.

  Sent the first time, and again after the replica was removed and has rejoined: then
  all gradients that it has computed since its removal are void.

  Attributes:
    incarnation: incarnation of the membership.
    ends_in: seconds in which the replica's first step is expected to end without its
      gradient; None if the step waits for the replica, or if the end is not known.
  """

  incarnation: Incarnation
  ends_in: float | None = None


class Suspended(Struct):
  """The replica is currently not a member; `Admitted` or `Fail` will follow.

  Until then the training loop waits before it submits.
  """


class Progressed(Struct):
  """The samples in the first `step` steps."""

  step: int
  progress: Progress


class SetRequested(Struct):
  """Sets how many gradients to sum in a submission from now on; 1 at first.

  If the same message resolves a submission, this comes before `Taken` or `Resolved`.
  """

  count: int


class Taken(Struct):
  """A submission is accepted, and more gradients are requested for the same step.

  These make another submission. `Resolved` follows for each of the two.
  """

  sequence: int


class Resolved(Struct):
  """The outcome of a submission, sent once. Its gradient may be freed.

  Attributes:
    sequence: the submission.
    reason: "" if the gradient was part of a commit; otherwise a value of
      `quorum.Reason`. After "lost" it is unknown whether the gradient counted.
    step: if the gradient was part of a commit, the number of steps after that commit.
    members: the ids of the replicas in that commit.
    staleness: the gradient's staleness, in steps.
  """

  sequence: int
  reason: str
  step: int
  members: tuple[ReplicaId, ...] = ()
  staleness: int = 0


class Left(Struct):
  """The replica has left the run, as requested."""


class Finished(Struct):
  """The run has finished, and the published state is the final one."""

  reason: str


class Fail(Struct):
  """The run can't continue for this replica: all its waits raise this error.

  The core does nothing more.

  Attributes:
    error: the name of a class of `coordinator.errors`.
    reason: the message.
    final: whether a process that replaces this one would fail in the same way.
  """

  error: Literal["CoordinatorError", "JoinRefused", "RunFinished", "Diverged"]
  reason: str
  final: bool = True


# Journal and log.


class WriteJournal(Struct):
  """Writes a line about something that is already in the log.

  If the journal can't be written, a warning is logged and training continues.
  """

  note: journal_events.Record


class Log(Struct):
  """Logs a warning under `optax_dist.coordinator`."""

  text: str


# What a training loop is notified of: answers to its submissions, and other news.
Answer: TypeAlias = Taken | Resolved
Notice: TypeAlias = (
  Admitted
  | Suspended
  | Leased
  | Progressed
  | SetRequested
  | Call
  | Left
  | Finished
)

Effect: TypeAlias = (
  UseRun
  | Connect
  | Disconnect
  | Send
  | Append
  | Aggregate
  | Release
  | Apply
  | Publish
  | Restore
  | Serve
  | Fetch
  | TakeFingerprint
  | Answer
  | Notice
  | Fail
  | WriteJournal
  | Log
)
