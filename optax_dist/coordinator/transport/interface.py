"""The transport interface: messages, arrays and detection of lost peers.

A process has one `Transport`, and one connection to each peer it talks to.
`Transport.poll` returns all events as a list:

  transport.connect("b", address_of_b)
  transport.send("b", [b"hello"])
  for event in transport.poll(1.0):
    match event:
      case PeerUp(peer): ...
      case Message(peer, payload): ...
      case ArrayReceived(peer, transfer, data): ...
      case PeerLost(peer, how, reason): ...

Arrays travel alongside messages. The sender calls `send_array`, the receiver
`expect`, in either order and with the same transfer id; small messages overtake
large arrays. A broken connection is a lost peer, reported at once.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

from optax_dist.coordinator.protocol import liveness

# Anything contiguous can be sent, such as `bytes`, `memoryview`, or an array's
# `.data`.
Buffer: TypeAlias = bytes | bytearray | memoryview

# The largest message, in bytes; part of the protocol, so it is fixed.
MAX_MESSAGE = 4 << 20

How: TypeAlias = Literal[
  "left",  # The peer closed the connection in order, with a reason.
  "broken",  # The connection was closed or reset: most likely the peer died.
  "silent",  # No byte for `Limits.silence`: stopped, or cut off.
  "unreachable",  # No connection could be made within `Limits.connect`.
  "gone",  # Its process has ended: its address is free, or another process's.
  "refused",  # The peer has another secret, run or version.
  "faulty",  # The peer violated the protocol.
  "overflow",  # The peer did not read, and too much was queued for it.
  "replaced",  # The peer has reconnected; a `PeerUp` follows.
]


def fixed(seconds: float) -> liveness.Rule:
  """The rule of a silence that does not adapt."""
  return liveness.Rule(floor=seconds, first=seconds, ceiling=seconds)


_SILENCE = fixed(10.0)


@dataclasses.dataclass(frozen=True)
class Limits:
  """Bounds on time and memory. Times are in seconds.

  Attributes:
    heartbeat: a peer to which nothing was sent for this long gets a heartbeat.
    silence: how long a peer that sends no byte may be silent, from its silences
      so far; then it is lost. A slow transfer that makes progress is not silent.
    connect: how long `Transport.connect` retries.
    handshake: how long an unknown process may take to authenticate.
    max_queued: bytes of messages that may be queued for a peer that doesn't
      read.
    max_strangers: number of connections that may be in their handshake.
  """

  heartbeat: float = 1.0
  silence: liveness.Rule = _SILENCE
  connect: float = 10.0
  handshake: float = 5.0
  max_queued: int = 64 << 20
  max_strangers: int = 256


@dataclasses.dataclass(frozen=True, slots=True)
class PeerUp:
  """A peer is connected and authenticated.

  Attributes:
    peer: its name.
  """

  peer: str


@dataclasses.dataclass(frozen=True, slots=True)
class PeerLost:
  """A peer is no longer connected, or could not be connected to.

  All transfers with it have failed; those events come before this one.

  Attributes:
    peer: its name.
    how: the kind of loss.
    reason: human-readable explanation.
  """

  peer: str
  how: How
  reason: str


class Message(NamedTuple):
  """A message was received. Each is delivered once, in order per peer."""

  peer: str
  payload: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayReceived:
  """An expected array has been received completely.

  Attributes:
    peer: its sender.
    transfer: its transfer id.
    data: its bytes: the memory passed to `Transport.expect`; or, read in place,
      read-only memory of the sender, which stays as it is until
      `Transport.release`.
  """

  peer: str
  transfer: int
  data: memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class ArraySent:
  """An array was sent: its memory belongs to the caller again.

  It has left this process; only the receiver knows that it arrived.

  Attributes:
    peer: its receiver.
    transfer: its transfer id.
    nbytes: its size.
  """

  peer: str
  transfer: int
  nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayFailed:
  """A transfer failed: the peer was lost or refused it, or the size was wrong.

  Attributes:
    peer: the other side.
    transfer: its transfer id.
    sending: whether it was outgoing; otherwise it was expected.
    reason: human-readable explanation.
  """

  peer: str
  transfer: int
  sending: bool
  reason: str


Event: TypeAlias = (
  PeerUp | PeerLost | Message | ArrayReceived | ArraySent | ArrayFailed
)
