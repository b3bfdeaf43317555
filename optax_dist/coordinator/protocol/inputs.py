"""The inputs of `Coordinator.step` and `Client.step`: the events of a process.

The driver creates them, one at a time and in the order of the events, and adds
the time: seconds of a monotonic clock. The core never asks for the time, and
never waits. It has no arrays: the driver finds the arrays of an aggregation by the
round, those of a state by the transfer, and a gradient by its submission.
"""

from __future__ import annotations

from typing import TypeAlias

from optax_dist.coordinator.protocol.codec import Struct
from optax_dist.coordinator.protocol.entries import Process
from optax_dist.coordinator.protocol.messages import Message, ToldByReplica


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
    how: "refused" if the peer has another secret, run or version; "gone" if its
      process has ended, as no process or another one listens at its address; "broken"
      if the connection was closed; "unreachable" if its host does not answer; other
      kinds (left, silent).
    reason: human-readable explanation.
  """

  peer: Process
  how: str
  reason: str


# From the aggregation, besides `messages.Done` and `messages.Failed`.


class SnapshotFetched(Struct):
  """The answer to `Fetch`: the state, which is not in use yet.

  Attributes:
    transfer: transfer id of the `Fetch`.
    step: the step of the state.
  """

  transfer: int
  step: int


class SnapshotFailed(Struct):
  """The other answer to `Fetch`."""

  transfer: int
  reason: str


# A message of a replica to its coordinator is also an input of the replica's core: an
# aggregation or the training loop creates it, and the core sends it on.
Input: TypeAlias = (
  Started
  | TimePassed
  | Received
  | Malformed
  | PeerLost
  | SnapshotFetched
  | SnapshotFailed
  | ToldByReplica
)
