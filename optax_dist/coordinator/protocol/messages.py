"""Messages between replicas; all are frozen dataclasses, and all are checked.

A connection carries them in order, each once, until it breaks. A membership
lives on one connection to the leader: when that breaks the leader removes the
member, and the member joins again or helps to elect another leader. So nothing
here is numbered or acknowledged, and nothing is sent twice, except after a new
leader was elected: then every member tells it what is under way.

A leader sends a replica the log as a stream: `Welcome`, unless the replica's own
position is recent enough, and then every record, `Proposed` and `Recorded`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, TypeAlias

from optax_dist.coordinator.protocol.codec import Apart, Codec
from optax_dist.coordinator.protocol.entries import (
  STORE_VALUES,
  AttemptId,
  Incarnation,
  Natural,
  Part,
  Positive,
  Process,
  Record,
  ReplicaId,
  ViewState,
  Work,
)
from optax_dist.ledger import Spans

# Raised when a message's meaning changes; `Hello` carries it.
PROTOCOL_VERSION = 1
# A record goes to the store and to all followers, the same bytes.
_Record: TypeAlias = Annotated[Record, Apart(STORE_VALUES)]

# To the leader.


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
  """First on each connection to a leader: asks for the log, and to take part.

  The leader answers with its stream of the log, from `position` on if it can. A
  process that is a member (`incarnation`) stays one; any other becomes one, or
  gets `Refused`. A process that isn't leader answers `NotLeader`.

  Attributes:
    version: `PROTOCOL_VERSION`.
    agreement: what all replicas must have in common, as pairs of a name and a
      text: parameters, optimizer, strategy, versions, options.
    replica: the sender's id.
    address: where it listens.
    incarnation: of its membership, as far as it knows; -1 for none.
    position: the next record it needs; -1 if it has none of the log.
    step: how many steps its state has.
    has_state: whether its state is that of the run at `step`.
    call: counts the sender's calls of leaders; the answer repeats it.
    lease: the samples that it computes on, or whose gradient has no answer yet.
  """

  version: int
  agreement: tuple[tuple[str, str], ...]
  replica: ReplicaId
  address: str
  incarnation: int
  position: int
  step: Natural
  has_state: bool
  call: Natural
  lease: Spans = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Arrive:
  """A member submits a gradient.

  The leader accepts it, and answers by a commit, `Taken` or `Dropped`.

  Attributes:
    sequence: the sender's number of the submission, counting up.
    local_step: the step of the parameters it was computed on.
    total: how many gradients are summed in it.
    count: how many of them were not in the sender's submission before, which was
      answered by `Taken`; otherwise `total`.
    finite: whether every number of it is finite.
    applied: how many steps the sender's state has.
    optimistic: the attempt which the sender has begun with it; None if it waits
      to hear of one.
    payload: the gradient, where gradients are sent inline and it is finite.
    batches: for the journal, as JSON text.
    compute: seconds that computing it took, if known.
    timings: for the journal; nobody else reads them.
    data: the samples of the gradients that `count` counts, where they are leased.
    work: what is in it, where it is a contribution to a fragment.
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
  compute: float | None
  timings: bytes = b""
  data: Spans = ()
  work: Work | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
  """A member or witness has the whole mean of an attempt."""

  attempt: AttemptId


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
  """A member or witness could not finish an attempt.

  Attributes:
    attempt: which one. An optimistic one is then attempted as usual; nobody is
      blamed.
    failed_replica: the member whose bytes did not come; None: nobody else is to blame.
    reason: in words, for people.
  """

  attempt: AttemptId
  failed_replica: Incarnation | None
  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Applied:
  """The sender's state has this many steps: the answer to `Report`."""

  step: Natural


@dataclasses.dataclass(frozen=True, slots=True)
class NeedsSnapshot:
  """A member can't compute the current state from means.

  The leader answers with `Fetch`, as soon as a replica can serve it.

  Attributes:
    step: how many steps its state has.
    reason: in words; of the snapshot that failed, if one did.
  """

  step: Natural
  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Leave:
  """A member goes; the leader records `Removed`.

  Attributes:
    lost: whether it goes by an error, at once and to be counted as lost;
      otherwise others first fetch what only it has.
    reason: in words, for people.
    stacks: of the threads of a replica that is stuck.
  """

  lost: bool
  reason: str
  stacks: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
  """A member ends the run for all; the leader records `Ended`."""

  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Save:
  """A member asks all to save after the next commit (`Committed.save`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fingerprint:
  """A digest of the sender's state; the leader ends the run if two differ.

  Attributes:
    step: the step of that state.
    digest: equal for equal states.
  """

  step: Natural
  digest: str


# From the leader.


@dataclasses.dataclass(frozen=True, slots=True)
class Welcome:
  """The answer to `Hello`: the stream of the log starts here.

  Attributes:
    call: of the `Hello`; only the answer to the latest one counts.
    position: of the next record.
    view: what was decided before; None: the receiver's own view stands, for its
      position was recent enough.
    incarnation: of the membership that lives on this connection: one that goes
      on, or a new one that is about to be recorded; -1 for none.
  """

  call: Natural
  position: Natural
  view: ViewState | None
  incarnation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Proposed:
  """The leader is putting this record; it may yet fail.

  The receiver may prepare for it (compute the update) and must show nothing of
  it, until `Recorded` or the log itself confirms it.
  """

  position: Natural
  record: _Record


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
  """The record stands in the log, whichever replica sends this.

  A new leader sends its `Term` to all members like this.

  Attributes:
    position: where.
    record: the record; None: the one that was proposed for this position, on
      this connection.
  """

  position: Natural
  record: _Record | None


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
  """Members aggregate, readers collect; members and witness answer.

  Sent to members and readers. It ends by the commit with this id, `Abandoned`,
  another attempt or another term.

  Attributes:
    attempt: its id.
    parts: the gradients to be averaged, in this order.
    readers: who else fetches the mean.
    witness: the reader that answers too, for it is to hold the mean before the
      commit; None for none.
    lag: how many steps the latest reader is behind: so many more means are kept.
  """

  attempt: AttemptId
  parts: tuple[Part, ...]
  readers: tuple[Incarnation, ...]
  witness: Incarnation | None
  lag: Natural


@dataclasses.dataclass(frozen=True, slots=True)
class Abandoned:
  """The attempt leaves no trace; gradients that are in stay in."""

  attempt: AttemptId


@dataclasses.dataclass(frozen=True, slots=True)
class Dropped:
  """The submission doesn't count, for this reason.

  Attributes:
    sequence: which one.
    reason: a value of `quorum.Reason`.
    count: how many gradients the next submission is to sum.
    lease: the samples that the receiver computes on next; empty if it has to wait
      for some, or if none are leased.
    whole: whether all that it sums doesn't count; else only what it adds to the
      one that it extends, which has an outcome of its own.
  """

  sequence: Natural
  reason: str
  count: Positive
  lease: Spans = ()
  whole: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
  """A token: what the receiver is to compute next.

  Sent with `replicas_to_aggregate` larger than the number of replicas, and where
  samples are leased and the lease is in no `Committed` or `Dropped`.

  Attributes:
    sequence: the submission that is in and stays in (`more`); it was not
      enough, so the next one adds to it; -1 if there is none.
    count: how many gradients the next submission is to sum; how many more, where
      one is in.
    lease: the samples for them, where they are leased.
  """

  sequence: int
  count: Positive
  lease: Spans = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
  """Others have given to the round of this step: who has something gives it now.

  Sent where a step is a round of a fragment, to members whose contribution is not
  in.
  """

  step: Natural


@dataclasses.dataclass(frozen=True, slots=True)
class Serve:
  """The receiver serves a snapshot, as soon as it has `at_least` steps.

  Attributes:
    transfer: the id under which both sides know it.
    to: the process that fetches it.
    address: where that listens.
    at_least: the lowest step that is of use.
  """

  transfer: Natural
  to: Process
  address: str
  at_least: Natural


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
  """The receiver fetches a snapshot: the answer to `NeedsSnapshot`.

  Attributes:
    transfer: the id under which both sides know it.
    source: the process that serves it.
    address: where that listens.
    at_least: the lowest step that is of use.
  """

  transfer: Natural
  source: Process
  address: str
  at_least: Natural


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
  """The receiver says `Applied` as soon as it has this many steps."""

  step: Natural


@dataclasses.dataclass(frozen=True, slots=True)
class Stalled:
  """A step takes long; the replicas it waits for, for users and errors.

  Attributes:
    step: which one.
    waited: for how many seconds.
    missing: in words.
  """

  step: Natural
  waited: float
  missing: str


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
  """The sender of `Hello` can't take part; it raises `JoinRefused`."""

  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class NotLeader:
  """The sender of `Hello` is to look for the leader elsewhere, or later."""

  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Rejected:
  """A message of the receiver was a bad one and is passed over."""

  reason: str


# Between members.


@dataclasses.dataclass(frozen=True, slots=True)
class Canvass:
  """The sender has lost the leader of this term, and asks who still hears it."""

  term: Natural


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
  """The answer to `Canvass`.

  Attributes:
    term: the term that was asked about.
    hears: whether the sender is connected to that leader, or knows a later one.
  """

  term: Natural
  hears: bool


Message: TypeAlias = (
  Hello
  | Arrive
  | Done
  | Failed
  | Applied
  | NeedsSnapshot
  | Leave
  | Finish
  | Save
  | Fingerprint
  | Welcome
  | Proposed
  | Recorded
  | Attempt
  | Abandoned
  | Dropped
  | Asked
  | Call
  | Serve
  | Fetch
  | Report
  | Stalled
  | Refused
  | NotLeader
  | Rejected
  | Canvass
  | Standing
)

MESSAGES: Codec[Message] = Codec(Message)
