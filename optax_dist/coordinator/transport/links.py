"""One socket: its bytes go to a handshake first, and then to a session."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct

from optax_dist.coordinator.protocol import liveness
from optax_dist.coordinator.transport import (
  addresses,
  channels,
  handshake,
  session,
  tls,
)
from optax_dist.coordinator.transport.clock import AwakeClock
from optax_dist.coordinator.transport.poller import READ, WRITE, Poller

_TURN = 2 << 20  # Bytes to write before other connections get a turn.


@dataclasses.dataclass
class Memory:
  """Facts about a peer that outlive a connection.

  Attributes:
    silences: the durations of its silences so far.
    heartbeat: seconds without output after which it gets a heartbeat.
    last: the latest connection with it.
    quiet: how long it had been silent at the last check.
  """

  silences: liveness.Silence
  heartbeat: float
  last: bytes = handshake.NO_SESSION
  quiet: float = 0.0

  def is_overdue(self, silent: float) -> bool:
    """Whether a peer that is silent for so long is lost; learns from it if not."""
    if silent < self.quiet:
      # A byte came at some time between the two checks.
      self.silences.add(self.quiet + self.heartbeat / 4)
    self.quiet = silent
    # An overdue one is not added: an outage would allow longer ones.
    return silent > self.silences.deadline


class Link:
  """A socket, from dialing or accepting it until it is closed.

  Attributes:
    sock: the socket.
    stage: the handshake or session that reads its bytes.
    until: the deadline of its handshake, or of its orderly close.
    channel: None while it is connecting.
    endpoint: what was dialed; None if it was accepted.
    source: the IP address of the peer that has connected; "" on this host.
    peer: name of the peer; "" if it is not known.
    memory: the peer's memory, once its name is known.
    last_read: when a byte was read last.
    sent: when a byte was written last.
    leaving: whether it is closed once its output is written.
    closed: whether its socket is closed.
  """

  def __init__(
    self,
    sock: socket.socket,
    mask: int,
    stage: handshake.Handshake,
    until: float,
    poller: Poller,
    clock: AwakeClock,
  ):
    """Watches a socket.

    Args:
      sock: the socket.
      mask: what to wait for first.
      stage: its handshake.
      until: the deadline of that.
      poller: waits for the socket.
      clock: the transport's.

    Raises:
      OSError: it can't be watched; it is closed.
    """
    self.sock, self.until = sock, until
    self.stage: handshake.Handshake | session.Session = stage
    self.channel: channels.Channel | None = None
    self.endpoint: addresses.Endpoint | None = None
    self.source = self.peer = ""
    self.memory: Memory | None = None
    self.last_read = self.sent = 0.0
    self.leaving = self.closed = False
    self._mask, self._poller, self._clock = mask, poller, clock
    try:
      poller.watch(sock, mask, self)
    except OSError:
      sock.close()
      raise

  @property
  def is_local(self) -> bool:
    """Whether it is a socket of this host."""
    return self.sock.family == socket.AF_UNIX

  @property
  def is_stranger(self) -> bool:
    """Whether the socket was accepted, and its peer has not authenticated yet."""
    return self.endpoint is None and not (self.peer or self.leaving)

  def open(self, contexts: tls.Contexts | None, silence: float) -> int:
    """Opens its channel once it is connected; returns an error code, 0 for none.

    Args:
      contexts: encrypt it if it leaves this host; None for no encryption.
      silence: seconds after which the kernel gives up on unacknowledged bytes.
    """
    if self.endpoint is not None:
      code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
      if code:
        return code
    accepted = self.endpoint is None
    self.channel = channels.open_channel(self.sock, contexts, accepted, silence)
    # TLS has created another object for the descriptor.
    self.sock, self._mask = self.channel.sock, READ
    self._poller.change(self.sock, READ, self)
    return 0

  def read(self) -> tuple[int, bool]:
    """Reads once, for the stage to process.

    Returns:
      How many bytes; and whether there may be more.

    Raises:
      OSError: the peer has closed the connection.
    """
    channel = self.channel
    assert channel is not None
    room = self.stage.room()
    nbytes = channel.receive(room)
    if nbytes == 0:
      during = isinstance(self.stage, handshake.Handshake)
      raise OSError(
        f"it closed the connection{' during the handshake' if during else ''}"
      )
    if nbytes is None:
      return 0, False
    self.last_read = self._clock.time
    return nbytes, not channel.drains or nbytes == sum(map(len, room))

  def write(self) -> None:
    """Writes what its stage has, as far as possible without waiting."""
    channel, stage, done = self.channel, self.stage, 0
    assert channel is not None
    blocked = False
    while done < _TURN and (output := stage.output()):
      nbytes = channel.send(output)
      if nbytes is None:
        blocked = True
        break
      stage.sent(nbytes)
      done += nbytes
    if done:
      self.sent = self._clock.time
    more = (blocked and not channel.writes_when_readable) or done >= _TURN
    mask = READ | (WRITE if more else 0)
    if mask != self._mask and not self.closed:
      self._mask = mask
      self._poller.change(self.sock, mask, self)

  def close(self) -> None:
    """Closes its socket."""
    self.closed = True
    self._poller.unwatch(self.sock)
    with contextlib.suppress(OSError):
      # A forked process may hold it too.
      self.sock.shutdown(socket.SHUT_RDWR)
    self.sock.close()
    if self.leaving and isinstance(self.stage, session.Session):
      self.stage.close()

  def explain_silence(self) -> str:
    """Why its handshake has not ended, human-readable."""
    if self.endpoint is None:
      return "the handshake took too long"
    if self.channel is None:
      return f"{self.endpoint}: it does not accept the connection"
    return (
      f"what listens at {self.endpoint} is not {self.peer!r} of this job: it"
      " accepts the connection, and does not answer"
    )


def owner(sock: socket.socket) -> tuple[int, int]:
  """The process and the user at the other end of a socket of this host."""
  raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
  process, user, _ = struct.unpack("3i", raw)
  return process, user
