"""The messages between a coordinator and its members.

Frozen structs, every field checked. A connection delivers them in order, once each,
until it breaks, and a membership lives on one connection: when it breaks, the
coordinator removes the member, which calls again and becomes a new one. So no
message is numbered or acknowledged, and none is sent twice. If the coordinator dies,
the next one knows all members from the log: they call it, stay members, and submit
again.

A coordinator answers `Hello` with the commits that its sender has missed, then
`Welcome`, and from then on sends each commit as it is in the log.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from optax_dist.coordinator.protocol.codec import (
  Codec,
  Finite,
  Integer,
  Natural,
  Positive,
  Seconds,
  Several,
  Struct,
)
from optax_dist.coordinator.protocol.entries import (
  Committed,
  Ended,
  Hyperparams,
  Incarnation,
  Job,
  Member,
  Part,
  Process,
  Removed,
  ReplicaId,
  RoundId,
  Start,
)
from optax_dist.coordinator.protocol.journal_events import Timings
from optax_dist.ledger import Progress, Spans

# To the coordinator.


class Hello(Struct):
  """The first message on a connection: asks for membership.

  A process that is a member (`incarnation`) stays one, if its coordinator has
  started again since; any other becomes one, or gets `Refused`.

  Attributes:
    job: what all replicas must agree on.
    replica: the sender's id.
    address: address of its transport.
    start: its state, from which the run may begin.
    epoch: epoch of the last coordinator that welcomed the sender; -1 for none.
    incarnation: the sender's membership, as far as it knows; -1 for none.
    beginnings: how often the run had begun when the sender was last welcomed.
    read: how many committed steps the sender knows of.
    applied: the step of the sender's state; -1 if that state is not the run's.
    lease: samples that the sender computes on, or whose gradient has no outcome yet.
    follows: earlier, closed memberships of the same program, each as the id of its
      run and its incarnation.
    since, compute: seconds since the sender learned of the last of the `read` steps,
      and seconds that its last gradient took; 0 if unknown. A coordinator that has
      started again needs both, because it has not seen the step begin.
    nonce: nonce of the run that welcomed the sender; "" for none. The same numbers
      mean something else in another log.
  """

  job: Job
  replica: ReplicaId
  address: str
  start: Start
  # Bounded, since a new log continues from this epoch, and a transfer's id holds 31
  # bits of the epoch.
  epoch: Annotated[int, msgspec.Meta(ge=-1, le=1 << 30)]
  incarnation: Integer
  beginnings: Natural
  read: Natural
  applied: Integer
  lease: Spans = ()
  follows: tuple[tuple[str, Integer], ...] = ()
  since: Seconds = 0.0
  compute: Seconds = 0.0
  nonce: str = ""


class SubmitGradient(Struct):
  """A member submits a gradient.

  The member's training loop creates it, and waits for its outcome: one
  `effects.Resolved`, or `effects.Taken` before. The coordinator answers by a commit,
  `RequestGradients` or `Dropped`. A step may contain several gradients of one member,
  all computed on the same parameters.

  Attributes:
    sequence: the sender's number of the submission, increasing.
    incarnation: the membership in which it was computed.
    local_step: the step of the parameters it was computed on.
    count: how many gradients are summed in it.
    finite: whether every number of it is finite.
    payload: the gradient, if gradients are sent inline and it is finite;
      otherwise the sender's driver keeps it until it is resolved.
    batches: for the journal, as JSON text.
    compute: seconds that computing it took, if known.
    timings: for the journal: where the sender's time went.
    data: its samples, if they are leased, in the order in which they were summed.
    work: what the coordinator's policy must know of this gradient; opaque to all
      others.
    applied: the step of the sender's state.
    early: the early round that the sender has begun with this gradient; None if the
      sender waits for a round.
  """

  sequence: Natural
  incarnation: Incarnation
  local_step: Natural
  count: Positive
  finite: bool
  payload: bytes = b""
  batches: str = ""
  compute: Seconds | None = None
  timings: Timings | None = None
  data: Spans = ()
  work: bytes = b""
  applied: Natural = 0
  early: RoundId | None = None


class Done(Struct):
  """A member or witness has the whole mean of a round.

  It is also the input by which that member's aggregation reports success.
  """

  round: RoundId


class Failed(Struct):
  """A member or witness could not complete a round: the opposite of `Done`.

  Attributes:
    round: the round. If it was an early round, another round follows, and no replica
      is considered failed.
    failed_replica: the member whose bytes did not come; None if there is none.
    reason: human-readable explanation.
  """

  round: RoundId
  failed_replica: Incarnation | None
  reason: str


class Applied(Struct):
  """The sender's state has this many steps.

  Sent as the answer to `Report`, and after `Welcome`, unless the sender needs a
  snapshot: its state may have advanced since `Hello`.
  """

  step: Natural


class NeedsSnapshot(Struct):
  """A member can't compute the current state from means.

  It is answered by `Fetch`, as soon as a replica can serve it.

  Attributes:
    step: the step of its state.
  """

  step: Natural


class Leave(Struct):
  """A member leaves; the coordinator records `Removed`.

  Attributes:
    lost: whether it leaves immediately because of an error, and counts as lost;
      otherwise the other members first fetch the state that only it has.
    reason: human-readable explanation, if it counts as lost.
    stacks: stacks of a stuck replica's threads.
    final: whether no other one can take its place, so that a run that needs it ends.
  """

  lost: bool
  reason: str = ""
  stacks: str = ""
  final: bool = False


class Finish(Struct):
  """A member ends the run for all; the coordinator records `Ended`."""

  reason: str


class Save(Struct):
  """A member asks all to save after the next commit (`Committed.save`)."""


class SetHyperparams(Struct):
  """A member sets hyperparameters for all, with the next commit.

  Attributes:
    values: the hyperparameters that are in no commit yet.
    number: see `entries.Change`.
  """

  values: Hyperparams
  number: Natural = 0


class Fingerprint(Struct):
  """A digest of the sender's state; the run ends if two differ.

  Attributes:
    step: the step of that state.
    digest: equal for equal states.
  """

  step: Natural
  digest: str


# From the coordinator, which also sends entries of its log: `Committed`, `Removed`
# to the member that it concerns, and `Ended`.


class Welcome(Struct):
  """The answer to `Hello`, after the commits that its sender has missed.

  Attributes:
    epoch: number of the coordinator; members ignore lower ones from now on.
    nonce: nonce of the run, which is part of all signatures between members.
    beginnings: how often the run has begun.
    origin: the state that it began from, the last time.
    incarnation: the membership on this connection; -1 for none, if the run
      has ended.
    step: how many steps were committed.
    progress: the samples in these steps.
    anew: whether the receiver's state is not (or no longer) a state of this run. It
      then needs a snapshot, unless it has the state that the run began from.
    alone: whether there is no other member.
    ends_in: seconds in which the current step is expected to end, if that step does
      not wait for the new member; None if it does, or if the end is not known.
    changes: the number of the receiver's last `SetHyperparams` that is in the log.
  """

  epoch: Natural
  nonce: str
  beginnings: Natural
  origin: Start
  incarnation: Integer
  step: Natural
  progress: Progress
  anew: bool
  alone: bool
  ends_in: Seconds | None = None
  changes: Natural = 0


class Round(Struct):
  """Announces a round: members aggregate, readers collect the mean.

  Members and the witness answer with `Done` or `Failed`. The round ends by the commit
  with its id, by `Cancel`, by another round for its step, or by a later step.

  Attributes:
    round: its id.
    parts: the gradients to average, in this order. An early round is announced before
      the gradients exist, so its parts have no `sequence` yet.
    peers: their owners, each once, in the same order.
    readers: other replicas that fetch the mean.
    witness: the reader that also answers, because it must hold the mean before
      the commit; None for none.
    lag: how many steps the slowest reader is behind: members keep that many more
      means.
  """

  round: RoundId
  parts: tuple[Part, ...]
  peers: tuple[Member, ...]
  readers: tuple[Member, ...] = ()
  witness: Incarnation | None = None
  lag: Natural = 0


class Cancel(Struct):
  """A round will not be committed; another one may follow."""

  round: RoundId


class Dropped(Struct):
  """A submission of the receiver was dropped.

  Attributes:
    sequence: the submission.
    reason: a value of `quorum.Reason`.
    count: how many gradients to sum in the next submission.
    lease: the samples that the receiver computes on next; empty if it has to
      wait for samples, or if the run leases none.
  """

  sequence: Natural
  reason: str
  count: Positive
  lease: Spans = ()


class RequestGradients(Struct):
  """A token: what the receiver should compute next.

  Sent if `replicas_to_aggregate` exceeds the number of replicas, or if samples
  are leased and the lease is in no `Committed` or `Dropped`.

  Attributes:
    sequence: the receiver's last submission that was accepted while the step still
      needs more gradients; -1 if there is none.
    count: how many gradients to sum in the next submission.
    lease: the samples for them, if leased.
  """

  sequence: Integer
  count: Positive
  lease: Spans = ()


class Call(Struct):
  """Others have contributed to this step: contribute now.

  Sent if the policy says so, to members without a contribution to this step.
  """

  step: Natural


class Serve(Struct):
  """The receiver should serve a snapshot once it has `at_least` steps.

  Attributes:
    transfer: the transfer id on both sides.
    to: the process that fetches it.
    address: address of that process.
    at_least: the lowest useful step.
  """

  transfer: Natural
  to: Process
  address: str
  at_least: Natural


class Fetch(Struct):
  """The receiver should fetch a snapshot: the answer to `NeedsSnapshot`.

  Attributes:
    transfer: the transfer id on both sides.
    source: the process that serves it.
    address: address of that process.
  """

  transfer: Natural
  source: Process
  address: str


class Report(Struct):
  """The receiver should send `Applied` once it has this many steps."""

  step: Natural


class Stalled(Struct):
  """A step is slow; names the replicas that it waits for.

  Attributes:
    step: the step.
    waited: seconds waited so far; 0.0 for a warning that is not about time, such as
      that too few replicas are left.
    missing: the missing replicas, human-readable.
  """

  step: Natural
  waited: Finite
  missing: str


class Refused(Struct):
  """The receiver can't take part, or not any more.

  Attributes:
    reason: human-readable explanation.
    again: whether another process that takes its place may be admitted.
  """

  reason: str
  again: bool = False


class Rejected(Struct):
  """A message of the receiver was invalid and ignored."""

  reason: str


# Between the coordinator and the processes of a multi-process replica that has yet to
# join.


class Meet(Struct):
  """The first message on a connection: looks for the replica's other processes.

  Attributes:
    run: name of the run.
    replica: id of the replica.
    index: which of its processes the sender is, from 0.
    count: how many processes it has.
    address: ``host:port`` of process 0, where they meet; "" in other processes.
    generation: generation of the `Met` that an earlier coordinator sent; "" for none.
    ended: why this process will not join, although it is still alive; "" as long as
      it may join. Without this text, the replica's processes might wait for each
      other.
  """

  run: str
  replica: ReplicaId
  index: Natural
  count: Several
  address: str
  generation: str = ""
  ended: str = ""


class Awaited(Struct):
  """The answer to `Meet` as long as some processes of the replica have not called.

  Attributes:
    missing: the indices of these processes.
  """

  missing: tuple[Natural, ...]


class Met(Struct):
  """The answer to `Meet` once all processes of the replica have called.

  Attributes:
    generation: which start of the replica it is.
    address: address of process 0.
  """

  generation: str
  address: str


class Parted(Struct):
  """The receiver's replica can't go on as it is: its processes end.

  Attributes:
    reason: human-readable explanation.
  """

  reason: str


# Between the coordinator and the launcher of a host.


class Host(Struct):
  """A launcher's report: its first message on a connection, resent on each change.

  Attributes:
    run: name of the run.
    rank: index of the host among those of the job.
    options: the options that must be equal for all launchers of the job.
    launcher: which process the sender is, human-readable.
    replicas: the replicas that have processes on this host.
    coming: the replicas of this host that were started, or will be, and have never
      joined.
    ended: the replicas of this host that have ended, and have never joined.
    given_up: why some of the ended replicas are not started again; "" if all are.
    ended_members: processes on this host that were members, and have ended.
  """

  run: str
  rank: Natural
  options: str
  launcher: str
  replicas: tuple[ReplicaId, ...] = ()
  coming: tuple[ReplicaId, ...] = ()
  ended: tuple[ReplicaId, ...] = ()
  given_up: str = ""
  ended_members: tuple[Process, ...] = ()


# Also inputs of the sender's core.
ToldByReplica: TypeAlias = (
  SubmitGradient
  | Done
  | Failed
  | Leave
  | Finish
  | Save
  | SetHyperparams
  | Fingerprint
)
ToCoordinator: TypeAlias = Hello | ToldByReplica | Applied | NeedsSnapshot
FromCoordinator: TypeAlias = (
  Welcome
  | Committed
  | Removed
  | Ended
  | Round
  | Cancel
  | Dropped
  | RequestGradients
  | Call
  | Serve
  | Fetch
  | Report
  | Stalled
  | Refused
  | Rejected
)
Message: TypeAlias = (
  ToCoordinator | FromCoordinator | Meet | Awaited | Met | Parted | Host
)

MESSAGES: Codec[Message] = Codec(Message)
