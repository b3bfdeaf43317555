"""Sockets as the event loop sees them: plain, or with TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Sequence
from typing import TypeAlias

from optax_dist.coordinator.transport import tls

# From linux/tcp.h; Python does not define them.
_THIN_LINEAR_TIMEOUTS, _RTO_MAX_MS = 16, 44
# Bytes in the kernel that were not sent yet; small messages have to wait for them.
_UNSENT = 2 << 20
# Milliseconds that it can count.
_LONGEST = (1 << 31) - 1
_JOINED = 16 << 10  # The size of a TLS record.

Buffers: TypeAlias = Sequence[memoryview | bytes]


class Plain:
  """A socket without encryption.

  Attributes:
    sock: the socket.
    drains: whether a short read means that there is nothing more to read.
    writes_when_readable: whether writing waits until the socket is readable, as in
      the handshake of TLS.
  """

  drains = True
  writes_when_readable = False

  def __init__(self, sock: socket.socket):
    self.sock = sock

  def receive(self, room: Sequence[memoryview]) -> int | None:
    """Reads; returns None if there is nothing, 0 if the peer has closed it."""
    try:
      if len(room) == 1:
        return self.sock.recv_into(room[0])
      return self.sock.recvmsg_into(room)[0]
    except BlockingIOError:
      return None

  def pending(self) -> int:
    """Bytes that can be read though the socket is not readable."""
    return 0

  def send(self, output: Buffers) -> int | None:
    """Writes; returns None if there is no room."""
    try:
      if len(output) == 1:
        return self.sock.send(output[0])
      return self.sock.sendmsg(output)
    except BlockingIOError:
      return None


class Tls(Plain):
  """A socket with TLS; the handshake happens with the first bytes."""

  drains = False

  def pending(self) -> int:
    assert isinstance(self.sock, ssl.SSLSocket)
    return self.sock.pending()

  def receive(self, room: Sequence[memoryview]) -> int | None:
    self.writes_when_readable = False
    try:
      return self.sock.recv_into(room[0])
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
      return None
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
      return 0

  def send(self, output: Buffers) -> int | None:
    self.writes_when_readable = False
    first = output[0]
    if len(first) < _JOINED and len(output) > 1:
      room = _JOINED - len(first)
      first = bytes(first) + bytes(memoryview(output[1])[:room])
    try:
      return self.sock.send(first)
    except ssl.SSLWantWriteError:
      return None
    except ssl.SSLWantReadError:
      self.writes_when_readable = True
      return None


Channel: TypeAlias = Plain


def open_channel(
  sock: socket.socket,
  contexts: tls.Contexts | None,
  server_side: bool,
  silence: float,
) -> Channel:
  """Creates a channel for a connected socket.

  Args:
    sock: the socket; the channel may replace the object.
    contexts: encrypt the connection if it leaves this host; None for no encryption.
    server_side: whether the socket was accepted.
    silence: seconds after which the kernel gives up on unacknowledged bytes.
  """
  if sock.family == socket.AF_UNIX:
    return Plain(sock)
  _tune(sock, silence)
  if contexts is None:
    return Plain(sock)
  context = contexts.get()[0 if server_side else 1]
  return Tls(
    context.wrap_socket(
      sock, server_side=server_side, do_handshake_on_connect=False
    )
  )


def _tune(sock: socket.socket, silence: float) -> None:
  tcp = socket.IPPROTO_TCP
  sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
  sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  options = {
    getattr(socket, "TCP_USER_TIMEOUT", None): min(
      int(silence * 1000), _LONGEST
    ),
    getattr(socket, "TCP_NOTSENT_LOWAT", None): _UNSENT,
    # After an outage, retry at a constant interval instead of backing off.
    _THIN_LINEAR_TIMEOUTS: 1,
    _RTO_MAX_MS: 1000,
  }
  for option, value in options.items():
    if option is not None:
      with contextlib.suppress(OSError):
        sock.setsockopt(tcp, option, value)
