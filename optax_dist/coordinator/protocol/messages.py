"""The messages between replicas: frozen structs, every field checked.

A connection delivers them in order, once each, until it breaks. A membership is
tied to one connection to the leader: when it breaks the leader removes the
member, and the member rejoins or helps to elect another leader. So no message
is numbered or acknowledged, and none is sent twice, except after a leader
election: then every member resends its pending requests.

A leader sends a replica the log as a stream: `Welcome`, then every record, as
`Recorded`. `Welcome` includes the view unless the replica's own
position is recent enough.
"""

from __future__ import annotations

from typing import TypeAlias

from optax_dist.coordinator.protocol.codec import (
  Codec,
  Finite,
  Integer,
  Natural,
  Positive,
  Struct,
)
from optax_dist.coordinator.protocol.entries import (
  AttemptId,
  Hyperparams,
  Incarnation,
  Part,
  Process,
  Record,
  ReplicaId,
)
from optax_dist.coordinator.protocol.membership import View
from optax_dist.coordinator.protocol.notes import Timings
from optax_dist.ledger import Spans

# To the leader.


class Hello(Struct):
  """The first message to a leader: asks for the log, and for membership.

  The leader answers with its stream of the log, from `position` on if it can. A
  process that is a member (`incarnation`) stays one; any other becomes one, or
  gets `Refused`. A process that isn't leader answers `NotLeader`.

  Attributes:
    agreement: what all replicas must agree on, as pairs of a name and a text:
      parameters, optimizer, strategy, versions, options.
    replica: the sender's id.
    address: address of its transport.
    incarnation: of its membership, as far as it knows; -1 for none.
    position: the next record it needs; -1 if it has read none.
    applied: the step of its state; -1 if that is not the run's.
    call: number of this request; the answer repeats it.
    lease: samples that it computes on, or whose gradient has no answer yet.
    store_delay: seconds that the store takes to answer it; 0.0 if unknown.
  """

  agreement: tuple[tuple[str, str], ...]
  replica: ReplicaId
  address: str
  incarnation: Integer
  position: Integer
  applied: Integer
  call: Natural
  lease: Spans = ()
  store_delay: Finite = 0.0


class Arrive(Struct):
  """A member submits a gradient.

  The leader accepts it, and answers with a commit, `Taken` or `Dropped`.

  Attributes:
    sequence: the sender's number of the submission, increasing.
    local_step: the step of the parameters it was computed on.
    total: how many gradients are summed in it.
    count: how many of them were not in the sender's previous submission, which
      was answered by `Taken`; otherwise `total`.
    finite: whether every number of it is finite.
    applied: the step of the sender's state.
    optimistic: the attempt that the sender has begun with it; None if it waits
      for one.
    payload: the gradient, if gradients are sent inline and it is finite.
    batches: for the journal, as JSON text.
    compute: seconds that computing it took, if known.
    timings: for the journal: where the sender's time went.
    data: the samples of the gradients in `count`, if they are leased.
    work: what the leader's policy must know of it; opaque to all others.
  """

  sequence: Natural
  local_step: Natural
  total: Positive
  count: Positive
  finite: bool
  applied: Natural
  optimistic: AttemptId | None
  payload: bytes
  batches: str
  compute: Finite | None
  timings: Timings | None = None
  data: Spans = ()
  work: bytes = b""


class Done(Struct):
  """A member or witness has the whole mean of an attempt."""

  attempt: AttemptId


class Failed(Struct):
  """A member or witness could not complete an attempt.

  Attributes:
    attempt: the attempt. An optimistic one is then attempted as usual, and no
      replica is considered failed.
    failed_replica: the member whose bytes did not come; None if there is none.
    reason: explanation for people.
  """

  attempt: AttemptId
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

  The leader answers with `Fetch`, as soon as a replica can serve it.

  Attributes:
    step: the step of its state.
  """

  step: Natural


class Leave(Struct):
  """A member leaves; the leader records `Removed`.

  Attributes:
    lost: whether it leaves immediately because of an error, and counts as lost;
      otherwise others first fetch what only it has.
    reason: explanation for people, if it counts as lost.
    stacks: stacks of a stuck replica's threads.
  """

  lost: bool
  reason: str = ""
  stacks: str = ""


class Finish(Struct):
  """A member ends the run for all; the leader records `Ended`."""

  reason: str


class Save(Struct):
  """A member asks all to save after the next commit (`Committed.save`)."""


class NeverJoined(Struct):
  """Replicas that the run expects have ended before they ever joined.

  A member has heard that from its launcher.
  """

  replicas: tuple[ReplicaId, ...]


class SetHyperparams(Struct):
  """A member sets hyperparameters for all, with the next commit.

  Attributes:
    number: see `entries.Change`.
    values: those that are in no commit yet.
  """

  number: Natural
  values: Hyperparams


class Fingerprint(Struct):
  """A digest of the sender's state; the leader ends the run if two differ.

  Attributes:
    step: the step of that state.
    digest: equal for equal states.
  """

  step: Natural
  digest: str


# From the leader.


class Welcome(Struct):
  """The answer to `Hello`: the start of the log stream.

  Attributes:
    call: the number in the `Hello`; only the answer to the last one counts.
    position: position of the next record.
    view: the decisions so far; None: the receiver's view is valid, since its
      position was recent enough.
    incarnation: of the membership tied to this connection: an existing one, or
      a new one that is about to be recorded; -1 for none.
  """

  call: Natural
  position: Natural
  view: View | None
  incarnation: Integer


class Recorded(Struct):
  """The record is in the log; any replica may send this.

  A new leader sends its `Term` to all members in this way.

  Attributes:
    position: position of the record.
    record: the record.
  """

  position: Natural
  record: Record


class Attempt(Struct):
  """Members aggregate, readers collect; members and witness answer.

  It is sent to members and readers, and ends by the commit with this id, another
  attempt at this step, or a later step.

  Attributes:
    attempt: its id.
    parts: the gradients to average, in this order.
    readers: other replicas that fetch the mean.
    witness: the reader that also answers, because it must hold the mean before
      the commit; None for none.
    lag: how many steps the slowest reader is behind: that many more means are
      kept.
  """

  attempt: AttemptId
  parts: tuple[Part, ...]
  readers: tuple[Incarnation, ...]
  witness: Incarnation | None
  lag: Natural


class AllBegun(Struct):
  """All members have begun this optimistic attempt.

  So each one fails it once it has waited for bytes long enough.
  """

  attempt: AttemptId


class Dropped(Struct):
  """The submission was dropped for this reason.

  Attributes:
    sequence: the submission.
    reason: a value of `quorum.Reason`.
    count: how many gradients to sum in the next submission.
    lease: the samples that the receiver computes on next; empty if it has to
      wait for some, or if none are leased.
    whole: whether the whole sum was dropped; otherwise only the addition to the
      submission that it extends, which has a separate outcome.
  """

  sequence: Natural
  reason: str
  count: Positive
  lease: Spans = ()
  whole: bool = True


class Asked(Struct):
  """A token: what the receiver should compute next.

  Sent if `replicas_to_aggregate` exceeds the number of replicas, or if samples
  are leased and the lease is in no `Committed` or `Dropped`.

  Attributes:
    step: the step that is open.
    sequence: the submission that is buffered, and which the next one should
      extend, since it was not enough; -1 if there is none.
    count: how many gradients to sum in the next submission; how many more, if
      one is buffered.
    lease: the samples for them, if leased.
  """

  step: Natural
  sequence: Integer
  count: Positive
  lease: Spans = ()


class TakeOver(Struct):
  """The leader hands its role to the receiver.

  The receiver has all records, and claims leadership at once: it is nearer to
  the store; or the run begins anew.

  Attributes:
    fresh: whether the run begins anew from the receiver's start state, since
      nobody has the one that it began from.
  """

  fresh: bool = False


class Call(Struct):
  """Others have contributed to this step: contribute now.

  Sent if the leader's policy says so, to members without a contribution in it.
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
    missing: the missing replicas, for people.
  """

  step: Natural
  waited: Finite
  missing: str


class Refused(Struct):
  """The sender of `Hello` can't join; it raises `JoinRefused`."""

  reason: str


class NotLeader(Struct):
  """The sender of `Hello` should look for the leader elsewhere, or later."""


class Rejected(Struct):
  """A message of the receiver was invalid and ignored."""

  reason: str


# Between members.


class Canvass(Struct):
  """The sender has lost the leader of this term, and asks who still hears it."""

  term: Natural


class Standing(Struct):
  """The answer to `Canvass`.

  Attributes:
    term: the term that was asked about.
    hears: whether the sender is connected to that leader, or knows a later one.
  """

  term: Natural
  hears: bool


ToLeader: TypeAlias = (
  Hello
  | Arrive
  | Done
  | Failed
  | Applied
  | NeedsSnapshot
  | Leave
  | Finish
  | Save
  | NeverJoined
  | SetHyperparams
  | Fingerprint
)
FromLeader: TypeAlias = (
  Welcome
  | Recorded
  | Attempt
  | AllBegun
  | Dropped
  | Asked
  | TakeOver
  | Call
  | Serve
  | Fetch
  | Report
  | Stalled
  | Refused
  | NotLeader
  | Rejected
)
Message: TypeAlias = ToLeader | FromLeader | Canvass | Standing

MESSAGES: Codec[Message] = Codec(Message)
