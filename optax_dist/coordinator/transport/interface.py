"""The transport interface: messages, arrays and detection of lost peers.

A process has one `Transport`, and one connection to each peer it talks to.
`Transport.poll` returns all events as a list:

  transport.connect("b", address_of_b)
  transport.send("b", b"hello")
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
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

# Anything contiguous can be sent, such as `bytes`, `memoryview`, or an array's
# `.data`.
Buffer: TypeAlias = bytes | bytearray | memoryview

# The largest message, in bytes; part of the protocol, so it is fixed.
MAX_MESSAGE = 4 << 20

How: TypeAlias = Literal[
  "left",  # It said goodbye, with its reason.
  "broken",  # The connection was closed or reset: most likely it died.
  "silent",  # No byte for `Limits.silence`: stopped, or cut off.
  "unreachable",  # No connection could be made within `Limits.connect`.
  "refused",  # It has another secret, run or version.
  "ended",  # Another process is at its address.
  "faulty",  # It violated the protocol.
  "overflow",  # It did not read, and too much was queued for it.
  "replaced",  # It has reconnected; a `PeerUp` follows.
]


@dataclasses.dataclass(frozen=True)
class Limits:
  """Bounds on time and memory. Times are in seconds.

  Attributes:
    heartbeat: a peer to which nothing was sent for this long gets a heartbeat.
    silence: a peer that sent no byte for this long is lost. A slow transfer
      that makes progress is not silent.
    connect: how long `Transport.connect` retries.
    handshake: how long an unknown process may take to authenticate.
    max_queued: bytes of messages that may be queued for a peer that doesn't
      read.
    max_strangers: number of connections that may be in their handshake.
  """

  heartbeat: float = 1.0
  silence: float = 10.0
  connect: float = 10.0
  handshake: float = 5.0
  max_queued: int = 64 << 20
  max_strangers: int = 256

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not value > 0:
        raise ValueError(f"Limits.{field.name} must be above 0, got {value}.")
    if self.heartbeat * 2 > self.silence:
      raise ValueError(
        "Limits.silence must be at least twice Limits.heartbeat, or living"
        f" peers are lost; got {self.silence} and {self.heartbeat}."
      )


class Gaps(Protocol):
  """Learns how long a peer is silent between two messages."""

  @property
  def deadline(self) -> float:
    """Seconds without a byte after which the peer is lost."""

  def add(self, seconds: float) -> None:
    """Records that the peer was silent for this long."""


@dataclasses.dataclass(frozen=True, slots=True)
class PeerUp:
  """A peer is connected and authenticated.

  Attributes:
    peer: its name.
    near: whether arrays from `Transport.allocate` reach it without a copy,
      because it is on this host, and can map this process's memory.
  """

  peer: str
  near: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class PeerLost:
  """A peer is no longer connected, or could not be connected to.

  All transfers with it have failed; those events come before this one.

  Attributes:
    peer: its name.
    how: the kind of loss.
    reason: explanation for people.
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
    data: its bytes: the memory passed to `Transport.expect`, or, if there was
      none, read-only memory of the transport's choice. It may be the sender's
      own memory, which is lent until `Transport.release`.
  """

  peer: str
  transfer: int
  data: memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayPart:
  """The front of an array that was expected in parts has been received.

  Attributes:
    peer: its sender.
    transfer: its transfer id.
    data: the memory of the whole array.
    received: how many bytes of it have been received.
  """

  peer: str
  transfer: int
  data: memoryview
  received: int


@dataclasses.dataclass(frozen=True, slots=True)
class ArraySent:
  """An array was sent: its memory belongs to the caller again.

  It has left this process; only the receiver knows that it arrived.
  """

  peer: str
  transfer: int


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayFailed:
  """A transfer failed: the peer was lost or refused it, or the size was wrong.

  Attributes:
    peer: the other side.
    transfer: its transfer id.
    sending: whether it was outgoing; otherwise it was expected.
    reason: explanation for people.
  """

  peer: str
  transfer: int
  sending: bool
  reason: str


Event: TypeAlias = (
  PeerUp
  | PeerLost
  | Message
  | ArrayReceived
  | ArrayPart
  | ArraySent
  | ArrayFailed
)


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
  """How much of an expected array was received.

  Attributes:
    received: bytes received.
    idle: seconds since the last byte, or since it was expected, by
      `Transport.now`.
  """

  received: int
  idle: float


class Transport(Protocol):
  """One process's connections to its peers.

  One thread owns it and makes all calls, except `wake`, which may be called
  from any thread and from signal handlers. If that thread is the main one, an
  exception that a signal handler raises (Ctrl-C) while bytes are moved costs
  the connection they belong to, and no other. Only `poll` ever waits. Base a
  deadline for an array on `progress(...).idle`: it then ends transfers that are
  stuck, not those that are merely long.

  Peers are known by names, which are new whenever a process starts: a restarted
  process is another peer. Both ends may call `connect`; they get one
  connection.

  Attributes:
    name: name of this process.
    address: address that peers `connect` to; it may list several endpoints.
  """

  name: str
  address: str

  def connect(self, peer: str, address: str, run: bytes | None = None) -> None:
    """Starts to connect; ends in `PeerUp` or `PeerLost`.

    It retries, with pauses, until `Limits.connect` has passed. A peer that was
    connected before is lost at once if its address no longer accepts
    connections, since its process has ended. Messages and arrays may be sent at
    once, and wait until the peer is up. If it is already connected or
    connecting, nothing happens.

    Args:
      peer: name of the peer.
      address: the peer's `address`.
      run: the nonce of its run, if it differs from this process's.

    Raises:
      ValueError: the address is invalid.
    """
    ...

  def disconnect(self, peer: str, reason: str = "") -> None:
    """Says goodbye once the messages sent before have been written.

    The peer gets a `PeerLost` of kind "left" with the reason; this end gets none.
    Arrays in progress fail on both ends; other events of the peer are dropped.
    """
    ...

  def now(self) -> float:
    """Seconds of a clock that stands still while this process does.

    Time in which it was stopped counts against no peer.
    """
    ...

  def peers(self) -> Sequence[str]:
    """Names of the connected peers."""
    ...

  def trouble(self, peer: str) -> str:
    """Why a peer is not connected yet; "" if nothing is known."""
    ...

  def silences(self) -> Mapping[str, float]:
    """How long each peer may be silent, in seconds, if silence is detected."""
    ...

  def send(self, peer: str, payload: Sequence[Buffer]) -> bool:
    """Sends a message; its parts are copied, and may be reused.

    It never waits: the message is written by the next `poll` or `flush`.

    Returns:
      Whether it was queued. It isn't if there is no such peer, which may have
      been lost a moment ago, with the event still to be polled. If more than
      `Limits.max_queued` bytes are queued for it, the peer is lost.

    Raises:
      ValueError: it is larger than `MAX_MESSAGE`.
    """
    ...

  def allocate(self, nbytes: int) -> memoryview:
    """Allocates memory that near peers can read without a copy.

    It is not zeroed, and is aligned to 64 bytes.
    """
    ...

  def free(self, memory: memoryview) -> None:
    """Returns memory from `allocate`.

    It is not reused while a peer still reads from it.
    """
    ...

  def send_array(
    self,
    peer: str,
    transfer: int,
    data: Buffer | Sequence[Buffer],
    filled: int | None = None,
  ) -> None:
    """Sends an array; ends in one `ArraySent` or `ArrayFailed`.

    It must not be written to until then. An array of at most a MiB is sent at
    once, a larger one when the receiver expects it.

    Args:
      peer: the receiver, which expects it now or later.
      transfer: from 0 to 2**63 - 1, and not used before between these two in
        this direction.
      data: contiguous bytes, which are not copied, or parts of the array that
        are.
      filled: how many bytes at its front are ready; the others may be written
        until `fill` reports them. None: all.
    """
    ...

  def fill(self, peer: str, transfer: int, filled: int) -> None:
    """Reports that more bytes at the front of an array are ready to send.

    Does nothing if the transfer has ended.
    """
    ...

  def expect(
    self,
    peer: str,
    transfer: int,
    nbytes: int,
    into: Buffer | None = None,
    in_parts: bool = False,
  ) -> None:
    """Expects an array; ends in one `ArrayReceived` or `ArrayFailed`.

    Args:
      peer: its sender.
      transfer: its transfer id.
      nbytes: its size; an array of another size fails.
      into: contiguous writable memory of `nbytes` bytes for the result. None:
        wherever it is cheapest, which for near peers is where it already is.
      in_parts: whether to report progress by `ArrayPart` until it is complete.
    """
    ...

  def progress(self, peer: str, transfer: int) -> Progress | None:
    """How much of an expected array was received; None if none is expected."""
    ...

  def release(self, peer: str, transfer: int) -> bool:
    """Stops reading an `ArrayReceived` for which no memory was given.

    Call it once for each, after the last access to its bytes.

    Returns:
      Whether the bytes were valid throughout. False: the peer that lent them
      was lost in the meantime and may have overwritten them, so anything
      computed from them must be dropped.
    """
    ...

  def cancel(self, peer: str, transfer: int) -> None:
    """Cancels sending or expecting an array, in both directions.

    No event follows here, and the memory belongs to the caller again; at the
    peer the transfer fails, now or when it starts, unless the whole array is on
    its way. The sender of an array that will not be expected must cancel it too,
    or the peer keeps its bytes.
    """
    ...

  def poll(self, timeout: float | None) -> list[Event]:
    """Makes progress, and returns the events.

    Args:
      timeout: how long to wait for the first event; None: until there is one.

    Returns:
      Events, in order for each peer. An empty list after the timeout or a
      `wake`.
    """
    ...

  def flush(self) -> None:
    """Writes what was sent, as far as possible without waiting.

    Call it before slow work; `poll` includes it.
    """
    ...

  def wake(self) -> None:
    """Makes the current `poll`, or else the next one, return at once."""
    ...

  def close(self, reason: str = "") -> None:
    """Says goodbye to all peers without waiting, and frees all resources."""
    ...
