"""The connections of one process: one event loop for all of its sockets.

    listeners --> _accept --+                   +--> session of a peer, `up`
    Dial ------> _try ------+--> handshake -----+
                                                +--> `lost`, or another attempt

Only `turn` blocks, at most until its deadline. What a connection carries is the
session's; bytes go from one to the other.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import logging
import os
import selectors
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import Any

from optax_dist.coordinator.protocol import liveness
from optax_dist.coordinator.transport import (
  addresses,
  channels,
  dialing,
  handshake,
  interface,
  listening,
  session,
  tls,
)

_log = logging.getLogger("optax_dist.coordinator")
_TURN = 2 << 20  # Bytes to read or write before other connections get a turn.
_REMEMBERED = 1024  # Peers.
# Seconds until a peer that has refused is called again: it needs new certificates.
_PAUSE = 1.0


@dataclasses.dataclass
class _Memory:
  """What is known of a peer from one connection to the next."""

  silences: liveness.Silence
  heartbeat: float
  last: bytes = handshake.NO_SESSION


@dataclasses.dataclass(eq=False)
class _Link:
  """A socket, from dialing or accepting it until it is closed."""

  sock: socket.socket
  mask: int
  stage: handshake.Handshake | session.Session  # What its bytes belong to.
  until: float  # Deadline of its handshake or its goodbye.
  channel: channels.Channel | None = None  # None while it is connecting.
  endpoint: addresses.Endpoint | None = None  # None if it was accepted.
  source: str = ""
  peer: str = ""
  memory: _Memory | None = None  # Of the peer, once it is known.
  last_read: float = 0.0
  quiet: float = 0.0  # How long it was silent at the last check.
  sent: float = 0.0
  leaving: bool = False
  closed: bool = False


class Connections:
  """The sockets of one process.

  Attributes:
    key: of the job's run: who has another one is refused.
    woken: whether `wake` was called since this was last set to False.
  """

  def __init__(
    self,
    name: str,
    key: bytes,
    signs: bool,
    listeners: listening.Listeners,
    contexts: tls.Contexts | None,
    server: str,
    limits: interface.Limits,
    now: Callable[[], float],
    up: Callable[[str, bool], session.Session],
    lost: Callable[[str, interface.How, str], None],
  ):
    """Starts to accept connections.

    Args:
      name: name of this process.
      key: of the job's run; see `handshake.job_key`.
      signs: whether frames are signed where they are not encrypted.
      listeners: where this process listens; they are closed with the rest.
      contexts: encrypt what leaves this host; None for no encryption.
      server: the name of a process to which only this one connects; "" for none.
      limits: bounds on time and memory.
      now: the transport's clock.
      up: called when a peer is connected, with whether this process can see its
        process; returns its session.
      lost: called when a peer is lost; calls `cut`.
    """
    self.key, self.woken = key, False
    self._name, self._signs, self._limits = name, signs, limits
    self._contexts, self._server, self._now = contexts, server, now
    self._notify_up, self._notify_lost = up, lost
    self._up_links: dict[str, _Link] = {}
    self._dials: dict[str, dialing.Dial] = {}
    # Their attempts that are under way.
    self._dialed: dict[str, _Link] = {}
    self._links: set[_Link] = set()
    self._strangers: dict[_Link, None] = {}
    # In order, since others wait longest for what was sent first.
    self._dirty: collections.OrderedDict[_Link, None] = (
      collections.OrderedDict()
    )
    self._memories: dict[str, _Memory] = {}
    self._listeners = listeners.sockets
    # When to call those again that have refused.
    self._refused: dict[str, float] = {}
    # Whom it has refused last, and why.
    self._told = ""
    # Those that don't accept, because descriptors or memory ran out.
    self._paused_listeners: list[socket.socket] = []
    self._next_check = now()
    self._selector = selectors.DefaultSelector()
    self._wake_read, self._wake_write = socket.socketpair()
    for sock in (*self._listeners, self._wake_read):
      sock.setblocking(False)
      self._selector.register(sock, selectors.EVENT_READ)
    self._wake_write.setblocking(False)

  # Called by the transport.

  def dial(
    self,
    peer: str,
    ways: Sequence[addresses.Endpoint] | Callable[[], str],
    key: bytes | None,
    met: bool,
  ) -> None:
    """Starts to connect to a peer; calls `up` or `lost` in the end.

    Args:
      peer: name of the peer.
      ways: its endpoints, or what finds its address.
      key: of its run, if it belongs to another one.
      met: whether it is known to have listened there; so is who was connected.
    """
    now, met = self._now(), met or peer in self._memories
    dial = dialing.Dial(ways, now, now + self._limits.connect, key, met)
    self._dials[peer] = dial
    dial.at = self._refused.get(peer, now)
    if dial.at <= now:
      self._try(peer, dial)
    self._next_check = min(self._next_check, dial.at)

  def peers(self) -> list[str]:
    """The connected peers."""
    return list(self._up_links)

  def trouble(self, peer: str) -> str:
    """Why a peer is not connected yet; "" if nothing is known."""
    dial, link = self._dials.get(peer), self._dialed.get(peer)
    if dial is None:
      return ""
    if link is not None and link.channel is not None:
      return _no_handshake(link)
    return dial.reason

  def to_write(self, peer: str) -> None:
    """A peer's session may have output: the next `flush` writes it."""
    link = self._up_links.get(peer)
    if link is not None:
      self._dirty[link] = None

  def flush(self) -> None:
    """Writes what sessions have, as far as possible without waiting."""
    while self._dirty:
      link, _ = self._dirty.popitem(last=False)
      if not link.closed:
        self._guarded(link, selectors.EVENT_WRITE)

  def run_once(self, until: float | None) -> None:
    """Waits for something to happen, and handles it.

    Args:
      until: when to return at the latest; None: whenever something is due.
    """
    due = self._next_check if until is None else min(until, self._next_check)
    wait = 0.0 if self.woken else max(0.0, due - self._now())
    for key, mask in self._selector.select(wait):
      if key.data is not None:
        self._guarded(key.data, mask)
      elif key.fileobj is self._wake_read:
        self.woken = True
        with contextlib.suppress(BlockingIOError):
          while len(self._wake_read.recv(4096)) == 4096:
            pass
      else:
        assert isinstance(key.fileobj, socket.socket)
        self._accept(key.fileobj)
    now = self._now()
    if now >= self._next_check:
      self._check(now)

  def wake(self) -> None:
    """Ends the current `turn`, or else the next one; from any thread."""
    with contextlib.suppress(OSError):
      self._wake_write.send(b"\0")

  def cut(self, peer: str) -> None:
    """Closes a peer's connection, and stops dialing it."""
    self._dials.pop(peer, None)
    for links in (self._up_links, self._dialed):
      if peer in links:
        self._close(links.pop(peer))

  def leave(self, peer: str) -> bool:
    """Closes a peer's connection once its session's output is written.

    Returns:
      Whether it is connected; if not, the session is the caller's to close.
    """
    link = self._up_links.pop(peer, None)
    self.cut(peer)
    if link is None:
      return False
    link.leaving, link.until = True, self._now() + self._limits.handshake
    self._guarded(link, selectors.EVENT_WRITE)
    return True

  def close(self) -> None:
    """Closes all; what was not written is lost."""
    for link in list(self._links):
      if link.leaving and not link.closed:
        # Unread input would reset the connection, and lose the goodbye.
        with contextlib.suppress(OSError, ValueError):
          link.sock.shutdown(socket.SHUT_WR)
          for _ in range(64):
            link.sock.recv(1 << 16)
      self._close(link)
    self.close_files()

  def close_files(self) -> None:
    """Closes all descriptors without saying goodbye."""
    for link in self._links:
      link.sock.close()
    for sock in (*self._listeners, self._wake_read, self._wake_write):
      sock.close()
    self._selector.close()
    self._links.clear()

  # The event loop.

  def _guarded(self, link: _Link, mask: int) -> None:
    """Reads and writes; any error ends only this connection."""
    if link.closed:
      return
    try:
      if link.channel is None:
        self._open(link)
      elif mask & selectors.EVENT_READ or link.channel.reads_when_writable:
        self._read(link)
      if not link.closed:
        try:
          self._write(link)
        except OSError:
          # The last messages of a peer that has closed may still be unread.
          self._read(link)
          raise
    except handshake.Refused as error:
      with contextlib.suppress(OSError):
        self._write(link)  # The reason may be among the unread bytes.
      self._end(link, error.how, str(error))
    except ssl.SSLError as error:
      self._end_tls(link, error)
    except (session.Faulty, struct.error, ValueError) as error:
      self._end(link, "faulty", f"it sent {error}")
    except OSError as error:
      self._end(link, "broken", str(error))
    except BaseException:
      # Bytes may be lost when interrupted between two lines; don't continue.
      self._end(link, "broken", "interrupted on this side")
      raise

  def _end_tls(self, link: _Link, error: ssl.SSLError) -> None:
    """Handles what TLS says of a connection that can't be used."""
    if not isinstance(link.stage, handshake.Handshake):
      self._end(link, "broken", str(error))
      return
    assert self._contexts is not None
    files, dialed = self._contexts.files, link.endpoint is not None
    if not dialed and tls.is_plain(error):
      # It reads no TLS, and would otherwise try again.
      link.stage.refuse("this side has certificates, and the other side none")
      with contextlib.suppress(OSError):
        socket.socket.send(link.sock, b"".join(link.stage.output()))
    why = tls.explain(error, files, dialed)
    if tls.is_final(error) and not (dialed or tls.is_plain(error)):
      self._tell_refused(link, why)
    self._end(link, "refused" if tls.is_final(error) else "broken", why)

  def _tell_refused(self, link: _Link, why: str) -> None:
    where = link.source or "this host"
    told = f"A process at {where} can't connect: {why}."
    if told != self._told:
      self._told = told
      _log.warning("%s", told)

  def _open(self, link: _Link) -> None:
    """The socket is connected."""
    if link.endpoint is not None:
      code = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
      if code:
        self._unconnected(link, code)
        return
    unix = link.sock.family == socket.AF_UNIX
    link.channel = channels.open_channel(
      link.sock,
      None if unix or self._contexts is None else self._contexts.get(),
      link.endpoint is None,
      self._limits.silence.ceiling,
    )
    # TLS has created another object for the descriptor.
    link.sock, link.mask = link.channel.sock, selectors.EVENT_READ
    self._selector.modify(link.sock, link.mask, link)

  def _read(self, link: _Link) -> None:
    channel, done = link.channel, 0
    assert channel is not None
    while done < _TURN or channel.pending():
      stage = link.stage
      room = stage.room()
      got = channel.receive(room)
      if got is None:
        return
      if not got:
        raise OSError(_end_of_input(link))
      link.last_read = self._now()
      done += got
      if link.leaving:
        continue
      stage.received(got)
      if isinstance(stage, handshake.Handshake):
        self._on_handshake(link, stage)
      elif stage.ended is not None:
        self._end(link, "left", stage.ended)
      if link.closed or (channel.drains and got < sum(map(len, room))):
        return

  def _on_handshake(self, link: _Link, shake: handshake.Handshake) -> None:
    """Uses the connection, if this side decides and has no other one."""
    if (
      (shake.undecided or shake.done)
      and link.endpoint is None
      and shake.peer == self._server
    ):
      why = f"whoever may be {shake.peer!r} is called, and does not call"
      self._tell_refused(link, why)
      shake.refuse(why)
      raise handshake.Refused(why)
    if shake.undecided:
      other = self._up_links.get(shake.peer)
      if other is not None:
        assert other.memory is not None
        if other.memory.last != shake.last:
          self._close(link)  # The dialer will have the other one, too.
          return
      shake.use()
    if shake.done:
      self._up(link, shake)

  def _write(self, link: _Link) -> None:
    channel, stage, done = link.channel, link.stage, 0
    assert channel is not None
    blocked = False
    while done < _TURN and (output := stage.output()):
      sent = channel.send(output)
      if sent is None:
        blocked = True
        break
      stage.sent(sent)
      done += sent
    if done:
      link.sent = self._now()
    more = (blocked and not channel.writes_when_readable) or done >= _TURN
    self._watch(link, more or channel.reads_when_writable)

  def _watch(self, link: _Link, write: bool) -> None:
    mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
    if mask != link.mask and not link.closed:
      link.mask = mask
      self._selector.modify(link.sock, mask, link)

  def allow(self, peer: str, silence: liveness.Rule) -> None:
    """Sets how long a connected peer may be silent, and this process to it."""
    link = self._up_links.get(peer)
    if link is None or link.memory is None:
      return
    memory = link.memory
    if memory.silences.rule != silence:
      memory.silences = liveness.Silence(silence)
      memory.heartbeat = min(self._limits.heartbeat, silence.floor / 4)
      self._next_check = self._now()

  def _check(self, now: float) -> None:
    """Does what is due by now: heartbeats, silence, deadlines, attempts."""
    limits = self._limits
    every = [memory.heartbeat for memory in self._memories.values()]
    self._next_check = now + min(every, default=limits.heartbeat) / 4
    for link in list(self._links):
      stage = link.stage
      if link.leaving or isinstance(stage, handshake.Handshake):
        if now >= link.until:
          self._end(link, "broken", _no_handshake(link))
        continue
      assert link.memory is not None
      silences, silent = link.memory.silences, now - link.last_read
      if silent < link.quiet:
        # A byte came at some time between the two checks.
        silences.add(link.quiet + link.memory.heartbeat / 4)
      link.quiet = silent
      if silent > silences.deadline:
        # Not added: an outage would allow longer ones from then on.
        self._end(link, "silent", f"not a byte came for {silent:.1f} s")
      elif now - link.sent >= link.memory.heartbeat:
        stage.ping()
        self._dirty[link] = None
    for peer, dial in list(self._dials.items()):
      if now >= dial.until:
        self._notify_lost(
          peer,
          "unreachable",
          f"no connection within {limits.connect:g} s; last: {dial.reason}",
        )
      elif peer not in self._dialed and now >= dial.at:
        self._try(peer, dial)
      if peer not in self._dialed:
        self._next_check = min(self._next_check, max(dial.at, now + 0.005))
    for listener in self._paused_listeners[:]:
      with contextlib.suppress(OSError):  # Out of watches or memory.
        self._selector.register(listener, selectors.EVENT_READ)
        self._paused_listeners.remove(listener)

  # Opening connections.

  def _accept(self, listener: socket.socket) -> None:
    for _ in range(64):
      try:
        sock, place = listener.accept()
      except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
          # Otherwise the loop would spin here.
          self._selector.unregister(listener)
          self._paused_listeners.append(listener)
        return
      unix = sock.family == socket.AF_UNIX
      if unix and _owner(sock)[1] not in (os.getuid(), 0):
        sock.close()
        continue
      shake = handshake.Handshake(self.key, self._name)
      until = self._now() + self._limits.handshake
      try:
        link = self._add(sock, selectors.EVENT_READ, shake, until)
      except OSError:
        continue  # The peer tries again.
      link.source = "" if unix else str(place[0])
      self._strangers[link] = None
      self._guarded(link, 0)
      if len(self._strangers) > self._limits.max_strangers:
        # Hosts with many unauthenticated connections make room for others.
        counts = collections.Counter(s.source for s in self._strangers)
        source = counts.most_common(1)[0][0]
        self._end(
          next(s for s in self._strangers if s.source == source),
          "broken",
          "too many handshakes at a time",
        )

  def _try(self, peer: str, dial: dialing.Dial) -> None:
    try:
      way = dial.way(self._looked_up)
    except handshake.Refused as error:
      self._failed(peer, dial, error.how, str(error))
      return
    except LookupError as error:
      self._failed(peer, dial, "unreachable", str(error))
      return
    if way is None:
      return
    if way.unix:
      family = socket.AF_UNIX
      place: Any = "\0" + way.unix
      if not addresses.has_unix():
        self._failed(
          peer, dial, "unreachable", "this system has no abstract Unix sockets"
        )
        return
    else:
      try:
        (ip,) = addresses.resolve(way.host)  # It is one already.
        family, place = ip.family, ip.place(way.port)
      except (OSError, ValueError) as error:
        self._failed(peer, dial, "unreachable", f"{way}: {error}")
        return
    memory = self._memories.get(peer)
    last = memory.last if memory is not None else handshake.NO_SESSION
    key = dial.key or self.key
    shake = handshake.Handshake(key, self._name, peer, last)
    try:
      sock = socket.socket(family, socket.SOCK_STREAM)
      link = self._add(sock, selectors.EVENT_WRITE, shake, dial.until)
    except OSError as error:
      # No IPv6 on this host, or out of descriptors, watches or memory.
      self._failed(peer, dial, "unreachable", f"{way}: {error}")
      return
    link.peer, link.endpoint = peer, way
    self._dialed[peer] = link
    # With several endpoints left, none may use up all the time.
    share = (dial.until - self._now()) / 2
    link.until = self._now() + max(0.5, min(share, self._limits.handshake))
    try:
      code = sock.connect_ex(place)
    except (OSError, TypeError, ValueError) as error:  # None can be this place.
      self._end(link, "unreachable", f"{way}: {error}")
      return
    if code == 0:
      self._guarded(link, selectors.EVENT_WRITE)
    elif code not in (errno.EINPROGRESS, errno.EWOULDBLOCK):
      self._unconnected(link, code)
    elif family == socket.AF_UNIX:
      self._end(link, "unreachable", f"{way}: its backlog is full")

  def _looked_up(self) -> None:
    self._next_check = 0.0
    self.wake()

  def _unconnected(self, link: _Link, code: int) -> None:
    if code == errno.ECONNREFUSED:
      self._dials[link.peer].refusals += 1
    self._end(link, "unreachable", f"{link.endpoint}: {os.strerror(code)}")

  def _add(
    self,
    sock: socket.socket,
    mask: int,
    shake: handshake.Handshake,
    until: float,
  ) -> _Link:
    """Watches a socket; closes it, and raises OSError, if that can't be."""
    sock.setblocking(False)
    link = _Link(sock, mask, shake, until)
    try:
      self._selector.register(sock, mask, link)
    except OSError:
      sock.close()
      raise
    self._links.add(link)
    return link

  def _up(self, link: _Link, shake: handshake.Handshake) -> None:
    peer, keys = shake.peer, shake.keys
    assert keys is not None
    assert link.channel is not None
    if peer in self._up_links:
      self._notify_lost(peer, "replaced", "it has connected anew")
    self._dials.pop(peer, None)
    dialed = self._dialed.pop(peer, None)
    if dialed is not None and dialed is not link:
      self._close(dialed)
    self._up_links[peer] = link
    self._strangers.pop(link, None)
    if peer not in self._memories:
      silences = liveness.Silence(self._limits.silence)
      self._memories[peer] = _Memory(silences, self._limits.heartbeat)
    link.memory = self._memories[peer]
    link.memory.last = keys.session
    if len(self._memories) > _REMEMBERED:
      del self._memories[next(iter(self._memories))]
    unix = link.sock.family == socket.AF_UNIX
    encrypted = isinstance(link.channel, channels.Tls)
    signed = self._signs and not (unix or encrypted)
    process = _owner(link.sock)[0] if unix else 0
    link.peer, link.stage = peer, self._notify_up(peer, bool(process))
    link.sent = link.last_read = self._now()
    link.stage.start(
      (keys.send, keys.receive) if signed else None, process, shake.output()
    )
    self._dirty[link] = None

  # Closing connections.

  def _end(self, link: _Link, how: interface.How, reason: str) -> None:
    """Handles the end of a connection, or of an attempt."""
    if self._up_links.get(link.peer) is link:
      self._notify_lost(link.peer, how, reason)
      return
    self._close(link)
    if self._dialed.get(link.peer) is link:
      self._failed(link.peer, self._dials[link.peer], how, reason)

  def _failed(
    self, peer: str, dial: dialing.Dial, how: interface.How, reason: str
  ) -> None:
    """Handles a failed attempt: tries again, or gives up."""
    self._dialed.pop(peer, None)
    loss = dial.failed(how, reason, self._now())
    if loss is not None:
      if loss[0] == "refused":
        now = self._now()
        waits = {p: at for p, at in self._refused.items() if at > now}
        self._refused = waits | {peer: now + _PAUSE}
      self._notify_lost(peer, *loss)
    self._next_check = min(self._next_check, dial.at)

  def _close(self, link: _Link) -> None:
    if link.closed:
      return
    link.closed = True
    self._links.discard(link)
    self._strangers.pop(link, None)
    self._dirty.pop(link, None)
    with contextlib.suppress(KeyError, ValueError):
      self._selector.unregister(link.sock)
    with contextlib.suppress(OSError):
      # A forked process may hold it too.
      link.sock.shutdown(socket.SHUT_RDWR)
    link.sock.close()
    if link.leaving and isinstance(link.stage, session.Session):
      link.stage.close()


def _end_of_input(link: _Link) -> str:
  reason = "it closed the connection"
  if isinstance(link.stage, handshake.Handshake):
    reason += " during the handshake"
  return reason


def _no_handshake(link: _Link) -> str:
  if link.endpoint is None:
    return "the handshake took too long"
  if link.channel is None:
    return f"{link.endpoint}: it does not accept the connection"
  return (
    f"what listens at {link.endpoint} is not {link.peer!r} of this job: it"
    " accepts the connection, and does not answer"
  )


def _owner(sock: socket.socket) -> tuple[int, int]:
  """The process and the user at the other end of a socket of this host."""
  raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
  process, user, _ = struct.unpack("3i", raw)
  return process, user
