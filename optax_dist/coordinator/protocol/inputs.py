"""The inputs of `Coordinator.step` and `Client.step`: the events of a process.

The driver creates them, one at a time and in the order of the events, and adds
the time: seconds of a monotonic clock. The core never asks for the time, and
never waits. It has no arrays: the driver knows those of an aggregation by the
round, those of a state by the transfer, and gradients by the submission.
"""

from __future__ import annotations

from typing import TypeAlias

from optax_dist.coordinator.protocol.codec import Struct
from optax_dist.coordinator.protocol.entries import (
  Hyperparams,
  Incarnation,
  Process,
  ReplicaId,
  RoundId,
)
from optax_dist.coordinator.protocol.journal_events import Timings
from optax_dist.coordinator.protocol.messages import Message
from optax_dist.ledger import Spans


class Started(Struct):
  """The process starts: a replica calls its coordinator."""


class TimePassed(Struct):
  """The time named by `deadline()` was reached. It may be early or late."""


# From the transport.


class Received(Struct):
  """A peer's message; messages of one connection are in order, once each."""

  peer: Process
  message: Message


class Malformed(Struct):
  """An authenticated peer has sent bytes that `codec` rejects."""

  peer: Process
  error: str


class PeerLost(Struct):
  """The connection to a peer has ended, or could not be made.

  Attributes:
    peer: the peer.
    how: "refused" if it has another secret, run or version; "gone" or "ended" if
      its process has, since nobody or another one is at its address; "broken" if
      the connection was closed; other kinds (left, silent, unreachable) are
      equivalent to the core.
    reason: explanation for people.
  """

  peer: Process
  how: str
  reason: str


# From the aggregation.


class Aggregated(Struct):
  """`Aggregate` has succeeded: the whole mean is here."""

  round: RoundId


class AggregateFailed(Struct):
  """`Aggregate` has failed. Not sent after `Release`.

  Attributes:
    round: the round.
    failed_replica: the member whose bytes did not come; None if there is none.
    reason: explanation for people.
  """

  round: RoundId
  failed_replica: Incarnation | None
  reason: str


class SnapshotFetched(Struct):
  """The answer to `FetchSnapshot`: the state, which is not in use yet.

  Attributes:
    transfer: transfer id of the `FetchSnapshot`.
    step: the step of the state.
  """

  transfer: int
  step: int


class SnapshotFailed(Struct):
  """The other answer to `FetchSnapshot`."""

  transfer: int
  reason: str


# From the training loop.


class Submitted(Struct):
  """The training loop submits a gradient, and waits for its outcome.

  It is answered by one `Resolved` or `Taken`, and there is one submission at a
  time. After `Taken` the next one includes it, and there may also be a
  `Resolved` for it, if it was decided before the next one was submitted.

  Attributes:
    sequence: number of the submission, from 0.
    extends: the sequence of the `Taken` submission that it includes; -1: none.
    admission: number of the last `Admitted` when the gradient was computed.
    local_step: the step of the parameters it was computed on.
    total: how many gradients are summed in it.
    finite: whether every number of it is finite.
    payload: its bytes, if gradients are sent inline and it is finite; otherwise
      the driver keeps the gradient until `Resolved`.
    batches: for the journal, as JSON text.
    compute: seconds that computing it took, if known.
    timings: for the journal.
    data: the samples of the gradients, in the order in which they were summed.
    work: what the coordinator's policy must know of it (`Config.policy`).
  """

  sequence: int
  extends: int
  admission: int
  local_step: int
  total: int
  finite: bool
  payload: bytes
  batches: str = ""
  compute: float | None = None
  timings: Timings | None = None
  data: Spans = ()
  work: bytes = b""


class LeaveWanted(Struct):
  """The replica should leave gracefully; answered by `Left`, or the run's end.

  If there is no acknowledgement, `Left` is sent after a while all the same.
  """


class FinishWanted(Struct):
  """The run should end for all; answered by `Finished`."""

  reason: str


class SaveWanted(Struct):
  """All should save after the next commit; shown by `Publish.save`."""


class NeverJoined(Struct):
  """For a coordinator: replicas have ended, and count as lost if they never joined.

  Attributes:
    replicas: all of them, so far.
    given_up: why some of them do not start again; "" if they do.
    gone: processes that were members, and have ended: a coordinator that has
      started again need not wait for their calls.
  """

  replicas: tuple[ReplicaId, ...]
  given_up: str = ""
  gone: tuple[Process, ...] = ()


class HyperparamsWanted(Struct):
  """All should set hyperparameters; shown by `Apply.hyperparams`."""

  values: Hyperparams


class Aborted(Struct):
  """The training loop ends with an exception, but the process continues.

  The others are told at once, without waiting. The driver executes the effects,
  and then closes the transport.

  Attributes:
    reason: explanation for people.
    stacks: stacks of its threads, if it is stuck; for the journal.
  """

  reason: str
  stacks: str = ""


class FingerprintTaken(Struct):
  """The answer to `TakeFingerprint`."""

  step: int
  digest: str


Input: TypeAlias = (
  Started
  | TimePassed
  | Received
  | Malformed
  | PeerLost
  | Aggregated
  | AggregateFailed
  | SnapshotFetched
  | SnapshotFailed
  | Submitted
  | LeaveWanted
  | FinishWanted
  | SaveWanted
  | NeverJoined
  | HyperparamsWanted
  | Aborted
  | FingerprintTaken
)
