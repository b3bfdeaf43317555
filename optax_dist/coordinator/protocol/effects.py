"""What the driver is to do: the effects of `Leader.step` and `Follower.step`.

They are carried out in order. None of them waits: what takes time is begun, and
its end comes back as an input. An effect that can't be carried out any more (a
peer that is gone, a cancelled attempt) is passed over without an error; the
input that tells why has come or is about to.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from optax_dist.coordinator.protocol.entries import (
  AttemptId,
  Committed,
  Incarnation,
  Part,
  Process,
  ReplicaId,
  StoreValue,
)
from optax_dist.coordinator.protocol.inputs import Handle
from optax_dist.coordinator.protocol.messages import Message
from optax_dist.coordinator.protocol.notes import Note
from optax_dist.ledger import Progress, Spans

# Transport.


@dataclasses.dataclass(frozen=True, slots=True)
class UseRun:
  """From now on the transport signs for this run, and takes connections.

  Attributes:
    nonce: of the run; part of every signature.
  """

  nonce: str


@dataclasses.dataclass(frozen=True, slots=True)
class Connect:
  """Begins to connect to a process; nothing if it is connected, or being so.

  Messages may follow at once. If it fails, `PeerLost` says so.
  """

  peer: Process
  address: str


@dataclasses.dataclass(frozen=True, slots=True)
class Disconnect:
  """Ends the connection once what was sent has gone out; no `PeerLost` here.

  Aggregations and snapshots that need the peer fail, and say so.
  """

  peer: Process
  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
  """Sends a message. Never to the sender itself: `Node` sees to that."""

  peer: Process
  message: Message


@dataclasses.dataclass(frozen=True, slots=True)
class SendAll:
  """Sends one message to several, none of which is the sender itself."""

  peers: tuple[Process, ...]
  message: Message


# Store.


@dataclasses.dataclass(frozen=True, slots=True)
class Put:
  """Puts a value, if there is none (or `overwrite`); answers `PutAnswered`.

  Several may be under way; each is answered by itself, and within a deadline of
  the driver's ("unknown"). One that was answered "unknown" isn't repeated by the
  driver.
  """

  request: int
  key: str
  value: StoreValue
  overwrite: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Get:
  """Reads a key as it is now, without waiting for it; answers `GetAnswered`."""

  request: int
  key: str


@dataclasses.dataclass(frozen=True, slots=True)
class Delete:
  """Deletes keys; no answer. Those that are left by a failure do no harm."""

  keys: tuple[str, ...]


# Aggregation. A member or reader of an attempt keeps its gradients and means
# until `Release`.


@dataclasses.dataclass(frozen=True, slots=True)
class Average:
  """The leader averages gradients that were sent inline; answers `Averaged`.

  Attributes:
    task: names it in the answer.
    parts: weights and counts, in replica order.
    payloads: the gradients' bytes, in the same order.
  """

  task: int
  parts: tuple[Part, ...]
  payloads: tuple[bytes, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
  """Where a member or reader of an attempt is found.

  Attributes:
    incarnation: its membership.
    process: its process; the receiver of this effect may be one of them.
    address: where it listens.
  """

  incarnation: Incarnation
  process: Process
  address: str


@dataclasses.dataclass(frozen=True, slots=True)
class Aggregate:
  """A member's part in an aggregation: reduce-scatter, then gather.

  It averages its slice of all members' gradients, in the order of `parts`,
  serves the slice to members and readers, and gathers the other slices. Answers
  `Aggregated` or `AggregateFailed`, once, unless it was cancelled.

  An optimistic one (`attempt.number == 0`) may begin long before the others have
  a gradient: it has no deadline and ends by success, `Cancel`, or the loss of a
  peer. Any other fails if nothing moves for `attempt_timeout`.

  Attributes:
    attempt: its id; transfers are named after it.
    parts: the gradients, in order.
    peers: where their owners are, in the same order.
    readers: where those are who fetch the mean besides.
    me: the index of the receiver in `parts`.
    sequence: of the receiver's submission whose gradient is meant.
  """

  attempt: AttemptId
  parts: tuple[Part, ...]
  peers: tuple[Peer, ...]
  readers: tuple[Peer, ...]
  me: int
  sequence: int


@dataclasses.dataclass(frozen=True, slots=True)
class Collect:
  """A reader fetches all slices of a mean; answered like `Aggregate`.

  Begun as soon as the attempt is: members have nothing to send at first.
  """

  attempt: AttemptId
  parts: tuple[Part, ...]
  peers: tuple[Peer, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Cancel:
  """Gives up an aggregation under way, with no answer; frees what it took."""

  attempt: AttemptId


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
  """Nobody needs this finished attempt any more: neither mean nor slices."""

  attempt: AttemptId


# The replica's state. The core counts steps; the driver holds the arrays. There
# is one published state, and at most one that is computed ahead of it.


@dataclasses.dataclass(frozen=True, slots=True)
class Apply:
  """Computes, from the published state, the one after the step: speculative.

  It is shown to nobody until `Publish`, and lost by `Discard`, `Restore`, or
  another `Apply`. The computation may be in the background.

  Attributes:
    step: of the published state; afterwards it is one more.
    mean: what `Aggregated` gave, or the bytes of a mean that was sent inline.
    inline: whether it is such bytes.
    parts: how many gradients or sums are in the mean.
  """

  step: int
  mean: Handle
  inline: bool
  parts: int


@dataclasses.dataclass(frozen=True, slots=True)
class Publish:
  """The state that was computed by `Apply` is the published one: it is decided.

  If the computation still goes on, everything that reads the state waits for it.
  The state before is kept until a `Resolved` that follows at once has been
  handled (a strategy may need both).

  Attributes:
    step: how many steps the state has now.
    save: whether all replicas save this state: the driver keeps it until it has
      been saved, or a later one takes its place.
  """

  step: int
  save: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Discard:
  """What `Apply` computed was not to be; the published state stays."""

  step: int


@dataclasses.dataclass(frozen=True, slots=True)
class Restore:
  """The state of `SnapshotFetched` is the published one from now on."""

  step: int
  state: Handle


@dataclasses.dataclass(frozen=True, slots=True)
class ServeSnapshot:
  """Serves the published state, as it is now, to one process.

  Ends by itself: when it is sent, or if nothing moves for `attempt_timeout`.

  Attributes:
    transfer: names the transfer on both sides.
    to: who fetches it.
    address: where that listens.
    step: how many steps the state has; sent along.
  """

  transfer: int
  to: Process
  address: str
  step: int


@dataclasses.dataclass(frozen=True, slots=True)
class FetchSnapshot:
  """Fetches what a peer serves; answers `SnapshotFetched` or `SnapshotFailed`.

  It fails if nothing moves for `attempt_timeout`. Another one replaces it.
  """

  transfer: int
  source: Process
  address: str


@dataclasses.dataclass(frozen=True, slots=True)
class TakeFingerprint:
  """Computes a digest of the published state; answers `FingerprintTaken`."""

  step: int


# Training loop.


@dataclasses.dataclass(frozen=True, slots=True)
class Admitted:
  """The replica takes part, and its published state is that of the run.

  Said at the first time, and again after it was given up and has joined anew:
  then all that it has computed is worthless.

  Attributes:
    admission: counts them, from 1.
    incarnation: of the membership.
    step: how many steps the published state has.
    asked: how many gradients a submission sums.
  """

  admission: int
  incarnation: Incarnation
  step: int
  asked: int


@dataclasses.dataclass(frozen=True, slots=True)
class Suspended:
  """The replica is no member at present; `Admitted` or `Fail` will follow.

  Until then the training loop waits before it submits.
  """


@dataclasses.dataclass(frozen=True, slots=True)
class Leased:
  """The training loop computes on these samples next.

  Attributes:
    incarnation: of the membership that they are leased to.
    spans: the samples, in order; empty: it waits for some. Where more is asked for
      (`Taken`), those for the rest.
  """

  incarnation: Incarnation
  spans: Spans


@dataclasses.dataclass(frozen=True, slots=True)
class Progressed:
  """Which samples are in the first `step` steps."""

  step: int
  progress: Progress


@dataclasses.dataclass(frozen=True, slots=True)
class SetAsked:
  """From now on a submission sums so many gradients."""

  count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Called:
  """Others have given to the round of this step; a learner need not be asked twice."""

  step: int


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
  """The submission is in, and more is asked for: `count` gradients more.

  They are added to the same sum, and submitted with it (`Submitted.extends`). The
  driver keeps the sum as it is: should the next submission be dropped while this
  one stays in, then the one after that extends this one again.
  """

  sequence: int
  count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
  """What became of a submission; said once. Its gradient may be freed.

  If `Taken` was said before and the training loop has added to the sum since,
  this is about what was in; what was added is superseded.

  Attributes:
    sequence: which one.
    reason: "" if it was part of a commit; otherwise why not, a value of
      `quorum.Reason`. "lost": it isn't known to count, nor that it doesn't.
    step: if it was part of a commit, how many steps there were after that.
    members: the ids of the replicas in that commit.
    staleness: by how many steps it was late.
    apart: whether the submission that this one extends has an outcome of its
      own, sent before or after this one; otherwise this is about both.
  """

  sequence: int
  reason: str
  step: int
  members: tuple[ReplicaId, ...] = ()
  staleness: int = 0
  apart: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Left:
  """The replica takes part no more, as was wanted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
  """The run has ended well, and the published state is the final one."""

  step: int
  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Fail:
  """The run can't go on for this replica: all its waits raise this error.

  The core does nothing more. Attributes:
    error: the name of a class of `coordinator.errors`.
    reason: the message.
  """

  error: Literal["CoordinatorError", "JoinRefused", "RunFinished", "Diverged"]
  reason: str


# Leadership, journal and log.


@dataclasses.dataclass(frozen=True, slots=True)
class LeadershipChanged:
  """The process has become leader, or is leader no more."""

  leads: bool
  term: int


@dataclasses.dataclass(frozen=True, slots=True)
class OpenJournal:
  """The new leader is to write the journal, if there is to be one.

  If it can't be written, a warning is logged and training goes on without it:
  every `WriteJournal` is then passed over.

  Attributes:
    commits: recent ones, in order, without their means. Those that come after
      the latest in the journal are written first: the leader before had no time.
  """

  commits: tuple[Committed, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class WriteJournal:
  """Writes a line; what it says stands in the log already.

  A commit that the journal has is not written again: a leader that stalled was
  replaced, and the next one may have written it.
  """

  note: Note


@dataclasses.dataclass(frozen=True, slots=True)
class CloseJournal:
  """The process is leader no more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Log:
  """A line for people, under `optax_dist.coordinator`."""

  level: Literal["debug", "info", "warning"]
  text: str


Effect: TypeAlias = (
  UseRun
  | Connect
  | Disconnect
  | Send
  | SendAll
  | Put
  | Get
  | Delete
  | Average
  | Aggregate
  | Collect
  | Cancel
  | Release
  | Apply
  | Publish
  | Discard
  | Restore
  | ServeSnapshot
  | FetchSnapshot
  | TakeFingerprint
  | Admitted
  | Suspended
  | Leased
  | Progressed
  | SetAsked
  | Called
  | Taken
  | Resolved
  | Left
  | Finished
  | Fail
  | LeadershipChanged
  | OpenJournal
  | WriteJournal
  | CloseJournal
  | Log
)
