"""The connections of one process: one event loop for all of its sockets.

    listeners --> _accept --+                   +--> session of a peer, `up`
    Dialer -----------------+--> handshake -----+
                                                +--> `lost`, or another attempt

Only `run_once` blocks, at most until its deadline. What a connection carries is the
session's; bytes go from one to the other.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import socket
import ssl
import struct
from collections.abc import Callable

from optax_dist.coordinator.protocol import liveness
from optax_dist.coordinator.transport import (
  channels,
  dialing,
  handshake,
  interface,
  links,
  listening,
  session,
  tls,
)
from optax_dist.coordinator.transport.clock import AwakeClock
from optax_dist.coordinator.transport.frames import Faulty
from optax_dist.coordinator.transport.links import Link
from optax_dist.coordinator.transport.poller import READ, WRITE, Poller

_log = logging.getLogger("optax_dist.coordinator")
_TURN = 2 << 20  # Bytes to read before other connections get a turn.
_REMEMBERED = 1024  # Peers.


class Connections:
  """The sockets of one process.

  Attributes:
    dialer: connects to peers.
    poller: waits for the sockets.
    limits: bounds on time and memory.
  """

  def __init__(
    self,
    identity: handshake.Identity,
    listeners: listening.Listeners,
    contexts: tls.Contexts | None,
    limits: interface.Limits,
    clock: AwakeClock,
    up: Callable[[str], session.Session],
    lost: Callable[[str, interface.How, str], None],
  ):
    """Starts to accept connections.

    Args:
      identity: this process's name, secret and run.
      listeners: where this process listens; they are closed with the rest.
      contexts: encrypt what leaves this host; None for no encryption.
      limits: bounds on time and memory.
      clock: the transport's.
      up: called when a peer is connected; returns its session.
      lost: called when a peer is lost; calls `close_peer`.
    """
    self._identity, self.limits, self._clock = identity, limits, clock
    self._contexts = contexts
    self._notify_up, self._notify_lost = up, lost
    self._memories: dict[str, links.Memory] = {}
    self.poller = Poller()
    self.dialer = dialing.Dialer(
      identity, limits, self.poller, clock, self._memories, lost
    )
    self._up_links: dict[str, Link] = {}
    # All links but those of the dialer, in order.
    self._links: dict[Link, None] = {}
    # Links with output. In order, since peers have waited longest for what was sent
    # first.
    self._dirty: dict[Link, None] = {}
    # Whether each listener accepts: not after descriptors or memory ran out.
    self._listeners = dict.fromkeys(listeners.sockets, True)
    # The last warning about a refused peer, so that it is not repeated.
    self._last_warning = ""
    self._next_check = clock.time
    for sock in self._listeners:
      self.poller.watch(sock, READ, sock)

  # Called by the transport.

  def peers(self) -> list[str]:
    """The connected peers."""
    return list(self._up_links)

  def to_write(self, peer: str) -> None:
    """A peer's session may have output: the next `flush` writes it."""
    link = self._up_links.get(peer)
    if link is not None:
      self._dirty[link] = None

  def flush(self) -> None:
    """Writes what sessions have, as far as possible without waiting."""
    while self._dirty:
      link = next(iter(self._dirty))
      del self._dirty[link]
      self._handle(link, WRITE)

  def run_once(self, until: float | None) -> float:
    """Waits for something to happen, and handles it; returns the time.

    Args:
      until: when to return at the latest; None: whenever something is due.
    """
    due = self._next_check
    if self.dialer.dials:  # Checked first, since most turns have no dials.
      due = min(due, self.dialer.due())
    if until is not None:
      due = min(due, until)
    ready = self.poller.wait(max(0.0, due - self._clock.time))
    now = self._clock.now()
    for owner, mask in ready:
      if isinstance(owner, Link):
        self._handle(owner, mask)
      else:
        self._accept(owner)
    if self.dialer.dials:
      self.dialer.check(now)
    if now >= self._next_check:
      self._check(now)
    return now

  def allow(self, peer: str, silence: liveness.Rule) -> None:
    """Sets how long a connected peer may be silent, and this process to it."""
    link = self._up_links.get(peer)
    if link is None or link.memory is None:
      return
    memory = link.memory
    if memory.silences.rule != silence:
      memory.silences = liveness.Silence(silence)
      memory.heartbeat = min(self.limits.heartbeat, silence.floor / 4)
      self._next_check = self._clock.time

  def close_peer(self, peer: str) -> None:
    """Closes a peer's connection, and stops dialing it."""
    self.dialer.stop(peer)
    if peer in self._up_links:
      self._close(self._up_links.pop(peer))

  def drain_and_close(self, peer: str) -> bool:
    """Closes a peer's connection once its session's output is written.

    Returns:
      Whether it is connected; if not, the session is the caller's to close.
    """
    link = self._up_links.pop(peer, None)
    self.dialer.stop(peer)
    if link is None:
      return False
    link.leaving, link.until = True, self._clock.now() + self.limits.handshake
    self._handle(link, WRITE)
    return True

  def close(self) -> None:
    """Closes all connections; unwritten output is lost."""
    for link in list(self._links):
      if link.leaving:
        # Unread input would reset the connection, and lose the announcement.
        with contextlib.suppress(OSError, ValueError):
          link.sock.shutdown(socket.SHUT_WR)
          for _ in range(64):
            link.sock.recv(1 << 16)
      self._close(link)
    self.close_files()

  def close_files(self) -> None:
    """Closes all descriptors without an announcement."""
    self.dialer.close()
    for sock in (*(link.sock for link in self._links), *self._listeners):
      sock.close()
    self._links.clear()
    self.poller.close()

  # The event loop.

  def _handle(self, link: Link, mask: int) -> None:
    """Reads and writes; any error ends only this connection."""
    if link.closed:
      return
    try:
      if link.channel is None:
        code = link.open(self._contexts, self.limits.silence.ceiling)
        if code:
          self.dialer.unconnected(link, code)
      elif mask & READ:
        self._read(link)
      if not link.closed:
        try:
          link.write()
        except OSError:
          # The last messages of a peer that has closed may still be unread.
          self._read(link)
          raise
    except handshake.Refused as error:
      with contextlib.suppress(OSError):
        link.write()  # The reason may be among the unread bytes.
      self._end(link, error.how, str(error))
    except ssl.SSLError as error:
      self._end_tls(link, error)
    except (Faulty, struct.error, ValueError) as error:
      self._end(link, "faulty", f"it sent {error}")
    except OSError as error:
      self._end(link, "broken", str(error))
    except BaseException:
      # Bytes may be lost when interrupted between two lines; don't continue.
      self._end(link, "broken", "interrupted on this side")
      raise

  def _end_tls(self, link: Link, error: ssl.SSLError) -> None:
    """Handles what TLS says of a connection that can't be used."""
    if not isinstance(link.stage, handshake.Handshake):
      self._end(link, "broken", str(error))
      return
    assert self._contexts is not None
    files, dialed = self._contexts.files, link.endpoint is not None
    if not dialed and tls.is_plain(error):
      # The other side reads no TLS, so the refusal is sent as plain text; otherwise it
      # would try again.
      link.stage.refuse("this side has certificates, and the other side none")
      with contextlib.suppress(OSError):
        socket.socket.send(link.sock, b"".join(link.stage.output()))
    why = tls.explain(error, files, dialed)
    if tls.is_final(error) and not (dialed or tls.is_plain(error)):
      self._warn_of_refused(link, why)
    self._end(link, "refused" if tls.is_final(error) else "broken", why)

  def _warn_of_refused(self, link: Link, why: str) -> None:
    where = link.source or "this host"
    warning = f"A process at {where} can't connect: {why}."
    if warning != self._last_warning:
      self._last_warning = warning
      _log.warning("%s", warning)

  def _read(self, link: Link) -> None:
    assert link.channel is not None
    done, more = 0, True
    while more and (done < _TURN or link.channel.pending()):
      stage = link.stage
      nbytes, more = link.read()
      done += nbytes
      if not nbytes or link.leaving:
        continue
      stage.received(nbytes)
      if isinstance(stage, handshake.Handshake):
        self._on_handshake(link, stage)
      elif stage.ended is not None:
        self._end(link, "left", stage.ended)
      if link.closed:
        return

  def _on_handshake(self, link: Link, shake: handshake.Handshake) -> None:
    """Uses the connection, if this side decides and has no other one."""
    if (
      (shake.undecided or shake.done)
      and link.endpoint is None
      and shake.peer == self._identity.server
    ):
      why = f"this process calls {shake.peer!r}, and never the reverse"
      self._warn_of_refused(link, why)
      shake.refuse(why)
      raise handshake.Refused(why)
    if shake.undecided:
      other = self._up_links.get(shake.peer)
      if other is not None:
        assert other.memory is not None
        if other.memory.last != shake.last:
          # The dialer will have the other one, too.
          self._end(link, "replaced", "both have connected")
          return
      shake.use()
    if shake.done:
      self._up(link, shake)

  def _check(self, now: float) -> None:
    """Does what is due by now: heartbeats, silence, deadlines."""
    every = [memory.heartbeat for memory in self._memories.values()]
    self._next_check = now + min(every, default=self.limits.heartbeat) / 4
    for link in list(self._links):
      stage, memory = link.stage, link.memory
      if link.leaving or isinstance(stage, handshake.Handshake):
        if now >= link.until:
          self._end(link, "broken", link.explain_silence())
        continue
      assert memory is not None
      silent = now - link.last_read
      if memory.is_overdue(silent):
        self._end(link, "silent", f"not a byte came for {silent:.1f} s")
      elif now - link.sent >= memory.heartbeat:
        stage.ping()
        self._dirty[link] = None
    for listener, accepts in self._listeners.items():
      if not accepts:
        with contextlib.suppress(OSError):  # Out of watches or memory.
          self.poller.watch(listener, READ, listener)
          self._listeners[listener] = True

  # Opening connections.

  def _accept(self, listener: socket.socket) -> None:
    for _ in range(64):
      try:
        sock, sockaddr = listener.accept()
      except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
          # The listener would stay readable, and the loop would spin.
          self.poller.unwatch(listener)
          self._listeners[listener] = False
        return
      is_local = sock.family == socket.AF_UNIX
      if is_local and links.owner(sock)[1] not in (os.getuid(), 0):
        sock.close()
        continue
      shake = handshake.Handshake(self._identity.key, self._identity.name)
      until = self._clock.time + self.limits.handshake
      try:
        link = Link(sock, READ, shake, until, self.poller, self._clock)
      except OSError:
        continue  # The peer tries again.
      link.source = "" if is_local else str(sockaddr[0])
      self._links[link] = None
      self._handle(link, 0)
      self._make_room()

  def _make_room(self) -> None:
    """Hosts with many unauthenticated connections make room for others."""
    strangers = [link for link in self._links if link.is_stranger]
    if len(strangers) > self.limits.max_strangers:
      counts = collections.Counter(link.source for link in strangers)
      source = counts.most_common(1)[0][0]
      first = next(link for link in strangers if link.source == source)
      self._end(first, "broken", "too many handshakes at a time")

  def _up(self, link: Link, shake: handshake.Handshake) -> None:
    peer, keys = shake.peer, shake.keys
    assert keys is not None
    if peer in self._up_links:
      self._notify_lost(peer, "replaced", "it has connected anew")
    self.dialer.stop(peer, kept=link)
    self._links[link] = None
    self._up_links[peer] = link
    if peer not in self._memories:
      silences = liveness.Silence(self.limits.silence)
      self._memories[peer] = links.Memory(silences, self.limits.heartbeat)
    link.memory = self._memories[peer]
    link.memory.last, link.memory.quiet = keys.session, 0.0
    if len(self._memories) > _REMEMBERED:
      del self._memories[next(iter(self._memories))]
    encrypted = isinstance(link.channel, channels.Tls)
    signed = bool(self._identity.secret) and not (link.is_local or encrypted)
    process = links.owner(link.sock)[0] if link.is_local else 0
    link.peer, link.stage = peer, self._notify_up(peer)
    link.sent = link.last_read = self._clock.time
    link.stage.start(
      (keys.send, keys.receive) if signed else None, process, shake.output()
    )
    self._dirty[link] = None

  # Closing connections.

  def _end(self, link: Link, how: interface.How, reason: str) -> None:
    """Handles the end of a connection, or of an attempt."""
    if self._up_links.get(link.peer) is link:
      self._notify_lost(link.peer, how, reason)
    elif link in self._links:
      self._close(link)
    else:
      self.dialer.failed(link, how, reason)

  def _close(self, link: Link) -> None:
    link.close()
    self._links.pop(link, None)
    self._dirty.pop(link, None)
