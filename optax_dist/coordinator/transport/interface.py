"""What carries messages and arrays between replicas, and reports lost peers.

A process has one `Transport`, and one connection to each peer it talks to. All
that happens comes out of `Transport.poll`, as a list of events:

  transport.connect("b", address_of_b)
  transport.send("b", b"hello")
  for event in transport.poll(1.0):
    match event:
      case PeerUp(peer): ...
      case Message(peer, payload): ...
      case ArrayReceived(peer, transfer, data): ...
      case PeerLost(peer, how, reason): ...

Arrays travel beside messages. The sender calls `send_array`, the receiver
`expect`, in either order and with the same transfer id; small messages overtake
large arrays. A connection that breaks is a lost peer, reported at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

# What can be sent: any contiguous bytes, such as `bytes`, `memoryview`, or an
# array's `.data`.
Buffer: TypeAlias = bytes | bytearray | memoryview

# The largest message, in bytes: part of the protocol, so alike everywhere.
MAX_MESSAGE = 4 << 20

How: TypeAlias = Literal[
  "left",  # It said goodbye; the reason is its own.
  "broken",  # The connection was closed or reset: most likely it has died.
  "silent",  # Not a byte for `Limits.silence`: stopped, or cut off.
  "unreachable",  # No connection could be made within `Limits.connect`.
  "refused",  # It has another secret, run, version or name.
  "faulty",  # It sent what no peer of this version sends.
  "overflow",  # It did not read, and too much was waiting for it.
  "replaced",  # It has connected anew; a `PeerUp` follows.
]


@dataclasses.dataclass(frozen=True)
class Limits:
  """Bounds on time and memory. Times are in seconds.

  Attributes:
    heartbeat: a peer that was sent nothing for so long is sent a heartbeat.
    silence: a peer of which no byte came for so long is lost. A transfer that
      is slow but moves is not silent.
    connect: how long `Transport.connect` tries.
    handshake: how long a stranger may take to prove who it is.
    max_queued: bytes of messages that may wait for a peer which does not read.
    max_strangers: connections that may be in their handshake at a time.
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
  """Learns how long a peer is silent between what it sends."""

  @property
  def deadline(self) -> float:
    """Seconds without a byte after which the peer is lost."""

  def add(self, seconds: float) -> None:
    """It was silent for so long, and went on."""


@dataclasses.dataclass(frozen=True, slots=True)
class PeerUp:
  """A peer is connected, and has proved who it is.

  Attributes:
    peer: its name.
    near: whether arrays from `Transport.allocate` reach it without a copy,
      because it is in this process or can map this process's memory.
  """

  peer: str
  near: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class PeerLost:
  """A peer is connected no longer, or could not be connected to.

  All transfers with it have failed, each by an event before this one.

  Attributes:
    peer: its name.
    how: what kind of loss it is.
    reason: the same in words, for people.
  """

  peer: str
  how: How
  reason: str


class Message(NamedTuple):
  """A message has come. A peer's messages come once each, in their order."""

  peer: str
  payload: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayReceived:
  """An array that was expected is here, whole.

  Attributes:
    peer: its sender.
    transfer: its transfer id.
    data: its bytes: the memory given to `Transport.expect`, or, if none was
      given, memory of the transport's choice, not to be written. It may be the
      sender's own memory; then it is lent until `Transport.release`.
  """

  peer: str
  transfer: int
  data: memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayPart:
  """The front of an array that was expected in parts is here.

  Attributes:
    peer: its sender.
    transfer: its transfer id.
    data: the memory of the whole array.
    received: how many bytes of it are here.
  """

  peer: str
  transfer: int
  data: memoryview
  received: int


@dataclasses.dataclass(frozen=True, slots=True)
class ArraySent:
  """An array has left: its memory is the caller's again.

  It has left this process; that it arrived only the receiver can tell.
  """

  peer: str
  transfer: int


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayFailed:
  """A transfer has failed: by the peer's loss, its refusal, or a wrong size.

  Attributes:
    peer: the other side.
    transfer: its transfer id.
    sending: whether it was to be sent; otherwise it was expected.
    reason: in words, for people.
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
  """How far an expected array has come.

  Attributes:
    received: bytes that are here.
    idle: seconds since the last of them came, or since it was expected.
  """

  received: int
  idle: float


class Transport(Protocol):
  """One process's connections to its peers.

  One thread owns it and calls everything; only `wake` may be called from any
  thread, and from signal handlers. If that thread is the main one, an exception
  that a signal handler raises (Ctrl-C) while bytes are moved costs the
  connection they belong to, and no other. Nothing but `poll` ever waits. A deadline
  on an array belongs on `progress(...).idle`, so that it cuts off what stands
  still and not what is merely long.

  Peers are known by names, which a process takes anew whenever it starts: a
  restarted process is another peer. Both ends may call `connect`; one
  connection comes of it.

  Attributes:
    name: this process's.
    address: text by which peers `connect` to it; it may name several ways.
  """

  name: str
  address: str

  def connect(self, peer: str, address: str, run: bytes | None = None) -> None:
    """Begins to connect; ends in `PeerUp` or `PeerLost`.

    It is tried again, with pauses, until `Limits.connect` has passed; at once
    it is lost if it was connected before and nobody listens there any more, for
    then its process has ended. Messages
    and arrays may be sent at once, and wait until the peer is up. Nothing
    happens if it is connected already, or being so.

    Args:
      peer: its name.
      address: what its own `address` is.
      run: the nonce of its run, if that is another than this process's.

    Raises:
      ValueError: the address is not one.
    """
    ...

  def disconnect(self, peer: str, reason: str = "") -> None:
    """Says goodbye once the messages sent before have gone out.

    The peer gets a `PeerLost` of kind "left" with the reason, and this end no
    event: whatever was going on with the peer is dropped, arrays included.
    """
    ...

  def peers(self) -> Sequence[str]:
    """Names of those who are connected."""
    ...

  def silences(self) -> Mapping[str, float]:
    """How long each of them may be silent, in seconds, where that is noticed."""
    ...

  def send(self, peer: str, payload: Sequence[Buffer]) -> bool:
    """Sends a message; its parts are joined, and are the caller's again.

    It never waits: what is sent goes out with the next `poll` or `flush`.

    Returns:
      Whether it was taken. It isn't if there is no such peer, for it may have
      been lost a moment ago, with the event still to be polled. If more than
      `Limits.max_queued` bytes would wait for it, the peer is lost.

    Raises:
      ValueError: it is larger than `MAX_MESSAGE`.
    """
    ...

  def send_all(self, peers: Sequence[str], payload: Sequence[Buffer]) -> None:
    """Sends one message to several, and perhaps at once; see `send`."""
    ...

  def allocate(self, nbytes: int) -> memoryview:
    """Memory from which peers that are near can read without a copy.

    It is not cleared, and starts at a multiple of 64 bytes.
    """
    ...

  def free(self, memory: memoryview) -> None:
    """Gives back what `allocate` gave.

    It is not given out again while a peer still reads from it.
    """
    ...

  def send_array(
    self, peer: str, transfer: int, data: Buffer, filled: int | None = None
  ) -> None:
    """Sends an array; ends in one `ArraySent` or `ArrayFailed`.

    It must not be written to until then. The first MiB goes out at once, what
    is left when the receiver expects it.

    Args:
      peer: who expects it, now or later.
      transfer: from 0 to 2**63 - 1, and never used before between these two in
        this direction.
      data: contiguous bytes, which are not copied.
      filled: so many bytes at its front are there as yet; the others may be
        written until `fill` has told of them. None: all.
    """
    ...

  def fill(self, peer: str, transfer: int, filled: int) -> None:
    """So many bytes at the front of an array are there now, and may go.

    Nothing happens if the transfer has ended.
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
    """Is ready for an array; ends in one `ArrayReceived` or `ArrayFailed`.

    Args:
      peer: its sender.
      transfer: its transfer id.
      nbytes: its size; another one is a failure.
      into: contiguous and writable, of `nbytes` bytes: where it shall go. None:
        wherever it costs least, which for peers that are near is where it lies.
      in_parts: whether `ArrayPart` tells of what is here, now and then, until
        it is whole.
    """
    ...

  def progress(self, peer: str, transfer: int) -> Progress | None:
    """How far an expected array has come; None if it isn't expected (now)."""
    ...

  def release(self, peer: str, transfer: int) -> bool:
    """Ends reading an `ArrayReceived` to which no memory was given.

    To be called once for each, after the last look at its bytes.

    Returns:
      Whether the bytes were whole all along. False: the lender was lost in the
      meantime and may have overwritten them, so what was computed from them
      must be dropped.
    """
    ...

  def cancel(self, peer: str, transfer: int) -> None:
    """Gives up sending or expecting an array, in both directions.

    No event follows here; at the peer the transfer fails, now or when it is
    begun. A sender of an array that is not going to be expected any more
    cancels it too, or the first bytes of it stay with the peer.
    """
    ...

  def poll(self, timeout: float | None) -> list[Event]:
    """Does what there is to do, and returns what has happened.

    Args:
      timeout: how long to wait for the first event; None: until there is one.

    Returns:
      Events; those of one peer in the order in which they happened. None after
      the timeout or a `wake`.
    """
    ...

  def flush(self) -> None:
    """Writes what was sent, as far as that needs no waiting.

    To be called before something that takes long; `poll` does it anyway.
    """
    ...

  def wake(self) -> None:
    """Lets a `poll` that waits, or else the next one, return at once."""
    ...

  def close(self, reason: str = "") -> None:
    """Says goodbye to all peers without waiting for them, and frees all."""
    ...
