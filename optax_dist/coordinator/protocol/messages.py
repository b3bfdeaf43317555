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
    epoch: of the last coordinator that has welcomed it; -1 for none.
    incarnation: of its membership, as far as it knows; -1 for none.
    beginnings: how often the run had begun, when it was welcomed last.
    read: how many steps it knows of.
    applied: the step of its state; -1 if that is not the run's.
    lease: samples that it computes on, or whose gradient has no answer yet.
    follows: earlier memberships of its program, which are closed, each as the
      digest of its run and its incarnation.
    since, compute: seconds since it knows of the last one of these steps, and that its
      last gradient took; 0 if unknown. A coordinator that has started again has not
      seen the step begin.
    nonce: of the run that has welcomed it; "" for none. In another log the same numbers
      mean something else.
  """

  job: Job
  replica: ReplicaId
  address: str
  start: Start
  # A new log continues from it, and numbers of transfers have 31 bits of it.
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

  Its training loop makes it, and waits for the outcome: one `effects.Resolved`, or
  `effects.Taken` before. The coordinator answers by a commit, `RequestGradients` or
  `Dropped`. A step may have several of one member, on the same parameters.

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
    work: what the coordinator's policy must know of it; opaque to all others.
    applied: the step of the sender's state.
    early: the early round that the sender has begun with it; None if it waits for
      one.
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
  """A member or witness has the whole mean of a round; so its aggregation answers."""

  round: RoundId


class Failed(Struct):
  """A member or witness could not complete a round: the other answer.

  Attributes:
    round: the round. After an early one another follows, and no replica is
      considered failed.
    failed_replica: the member whose bytes did not come; None if there is none.
    reason: human-readable explanation.
  """

  round: RoundId
  failed_replica: Incarnation | None
  reason: str


class Applied(Struct):
  """The sender's state has this many steps.

  Sent after `Welcome`, since it may have more than at `Hello`, unless the sender
  needs a snapshot; and as the answer to `Report`.
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
      otherwise others first fetch what only it has.
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
    values: those that are in no commit yet.
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
    nonce: of the run: part of all signatures between members.
    beginnings: how often the run has begun.
    origin: the state that it began from, the last time.
    incarnation: of the membership on this connection; -1 for none, if the run
      has ended.
    step: how many steps were committed.
    progress: the samples in these.
    anew: whether it needs one in any case, unless it has the state that the run
      began from: what it has is not of this run, or not any more.
    alone: whether there is no other member.
    ends_in: seconds in which the present step is expected to end, if that does not
      wait for the new member; None otherwise, or if it is not known.
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
  """Members aggregate, readers collect; members and witness answer.

  It is sent to members and readers, and ends by the commit with this id, by
  `Cancel`, by another round at this step, or by a later step.

  Attributes:
    round: its id.
    parts: the gradients to average, in this order. In an early round those are
      gradients to come, without a `sequence`.
    peers: their owners, each once, in the same order.
    readers: other replicas that fetch the mean.
    witness: the reader that also answers, because it must hold the mean before
      the commit; None for none.
    lag: how many steps the slowest reader is behind: that many more means are
      kept.
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
  """The submission was dropped for this reason.

  Attributes:
    sequence: the submission.
    reason: a value of `quorum.Reason`.
    count: how many gradients to sum in the next submission.
    lease: the samples that the receiver computes on next; empty if it has to
      wait for some, or if none are leased.
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
    sequence: the last submission that is accepted, and was not enough; -1 if there is
      none.
    count: how many gradients to sum in the next submission.
    lease: the samples for them, if leased.
  """

  sequence: Integer
  count: Positive
  lease: Spans = ()


class Call(Struct):
  """Others have contributed to this step: contribute now.

  Sent if the policy says so, to members without a contribution in it.
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
    waited: seconds waited so far; 0.0 if it was found just now that too few
      replicas are left.
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


# Between the coordinator and a process of a replica of several that has yet to join.


class Meet(Struct):
  """The first message on a connection: looks for the others of its replica.

  Attributes:
    run: name of the run.
    replica: id of the replica.
    index: which of its processes the sender is, from 0.
    count: how many processes it has.
    address: ``host:port`` of process 0, where they meet; "" in others.
    generation: of the `Met` that it had from an earlier coordinator; "" for none.
    ended: why it will not join, though it lives on: it may wait for the others, which
      wait for it; "" as long as it may.
  """

  run: str
  replica: ReplicaId
  index: Natural
  count: Several
  address: str
  generation: str = ""
  ended: str = ""


class Awaited(Struct):
  """The answer to `Meet` as long as these processes have not come."""

  missing: tuple[Natural, ...]


class Met(Struct):
  """The answer to `Meet` once all have come.

  Attributes:
    generation: which start of the replica it is.
    address: that of process 0.
  """

  generation: str
  address: str


class Parted(Struct):
  """The receiver's replica can't go on as it is: its processes end, for this reason."""

  reason: str


# Between the coordinator and the launcher of a host.


class Host(Struct):
  """The first message on a connection, and again whenever it changes.

  Attributes:
    run: name of the run.
    rank: index of the host among those of the job.
    options: those that all launchers of the job must have been given alike.
    launcher: which process the sender is, human-readable.
    replicas: those that have processes on this host.
    coming: of these, the ones that have been started or will be, and have never joined.
    ended: of these, the ones that have ended, and have never joined.
    given_up: why some of the latter do not start again; "" if they do.
    ended_members: processes on this host that have been members, and have ended.
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
