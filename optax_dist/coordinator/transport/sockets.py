"""Connections over sockets: Unix sockets on the same host, TCP otherwise.

One event loop, `SocketTransport.poll`, serves all of them; nothing in it
blocks, and the only threads look up host names.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

from optax_dist.coordinator.transport import (
  addresses,
  channels,
  handshake,
  interface,
  peers,
  session,
)

DEFAULT_PORTS = range(29400, 29500)

_TURN = 2 << 20  # Bytes to read or write before other connections get a turn.
_PAUSES = (0.05, 0.3)  # Shortest and longest pause between attempts.
_DEAF = 0.5  # Seconds without accepting when resources run out.
_FORGOTTEN = 1024  # Ended connections whose names are kept.


@dataclasses.dataclass(eq=False)
class _Link:
  """A socket, from dialing or accepting it until it is closed."""

  channel: channels.Channel | None  # None while it is connecting.
  sock: socket.socket
  until: float  # Deadline of its handshake or its goodbye.
  source: str = ""
  handshake: handshake.Handshake | None = None
  session: session.Session | None = None
  peer: str = ""
  endpoint: addresses.Endpoint | None = None
  heard: float = 0.0
  quiet: float = 0.0  # How long it was silent at the last check.
  sent: float = 0.0
  mask: int = 0
  leaving: bool = False
  closed: bool = False


@dataclasses.dataclass(eq=False)
class _Dial:
  """Attempts to reach a peer."""

  ways: list[addresses.Endpoint]
  until: float
  at: float
  pause: float = _PAUSES[0]
  index: int = 0
  link: _Link | None = None
  reason: str = "no attempt has ended yet"
  key: bytes | None = None  # Set if it belongs to another run.
  found: list[addresses.Endpoint] | None = None  # The addresses of a host name.
  refusals: int = 0  # Endpoints in a row that refused the connection.


class SocketTransport(peers.Peers):
  """See `interface.Transport`.

  Attributes:
    name: name of this process.
    address: address that peers connect to.
    port: the port it listens on; None: it only accepts local connections.
  """

  def __init__(
    self,
    name: str,
    *,
    secret: bytes = b"",
    run: bytes = b"",
    bind: str | None = None,
    ports: Iterable[int] = DEFAULT_PORTS,
    advertise: str | None = None,
    towards: str | None = None,
    certificates: channels.Certificates | None = None,
    limits: interface.Limits | None = None,
    gaps: Callable[[], interface.Gaps] | None = None,
    time_source: Callable[[], float] = time.monotonic,
  ):
    """Starts to listen.

    Args:
      name: name of this process, unique in this run; at most 64 bytes.
      secret: known to all replicas of the job, at least 16 bytes. Without
        certificates it is required if other hosts can connect.
      run: a nonce of this run; peers of other runs are refused.
      bind: host name or IP address to listen on, such as "0.0.0.0" or "::" for
        all addresses. None: only this host can connect.
      ports: the first one that is free is used; 0 is any.
      advertise: what other hosts use instead of `bind`: a host, or
        ``host:port`` if ports are mapped.
      towards: a host that all replicas reach, to determine the address to
        advertise.
      certificates: encrypts all traffic that leaves this host.
      limits: bounds on time and memory.
      gaps: creates what learns how long a peer may be silent; by default
        `Limits.silence` applies to all.
      time_source: a monotonic clock, in seconds.

    Raises:
      ValueError: an option is invalid; the message says why.
      OSError: no port is free.

    Example:
      >>> a, b = SocketTransport("a"), SocketTransport("b")
      >>> a.connect("b", b.address)
      >>> _ = a.send("b", [b"hello"])
      >>> events = []
      >>> while len(events) < 2:
      ...   events += b.poll(0.01)
      ...   _ = a.poll(0.01)
      >>> events
      [PeerUp(peer='a', near=True), Message(peer='a', payload=b'hello')]
      >>> a.close(); b.close()
    """
    super().__init__(handshake.check_name(name), limits, time_source)
    self._secret = secret
    self._key = handshake.job_key(secret, run)
    self._signs = bool(secret)
    self._tls = certificates.contexts() if certificates else None
    self._up_links: dict[str, _Link] = {}
    self._dials: dict[str, _Dial] = {}
    self._links: set[_Link] = set()
    self._strangers: dict[_Link, None] = {}
    # In order, since others wait longest for what was sent first.
    self._dirty: collections.OrderedDict[_Link, None] = (
      collections.OrderedDict()
    )
    self._last: dict[str, bytes] = {}
    self._make_gaps = gaps
    self._gaps: dict[str, interface.Gaps] = {}
    self._deaf: list[tuple[float, socket.socket]] = []
    self._listeners: list[socket.socket] = []
    self._next_check = self.now()
    self._woken = False
    self.port: int | None = None
    ways = self._listen(bind, list(ports), advertise, towards)
    self.address = ",".join(map(str, ways))
    self._selector = selectors.DefaultSelector()
    self._wake_read, self._wake_write = socket.socketpair()
    for sock in (*self._listeners, self._wake_read):
      sock.setblocking(False)
      self._selector.register(sock, selectors.EVENT_READ)
    self._wake_write.setblocking(False)
    _living.add(self)

  def _listen(
    self,
    bind: str | None,
    ports: Sequence[int],
    advertise: str | None,
    towards: str | None,
  ) -> list[addresses.Endpoint]:
    ways: list[addresses.Endpoint] = []
    if bind is None and not addresses.has_unix():
      bind = "127.0.0.1"
    if bind is not None:
      family, ip = addresses.bound(bind)
      if not (addresses.is_loopback(ip) or self._signs or self._tls):
        raise ValueError(
          f"A secret or certificates are needed to listen on {ip}, where"
          " anyone may connect. Pass secret=, of at least 16 bytes."
        )
      told = advertise or addresses.advertised(ip, towards)
      is_host = addresses.is_ip(told) or ":" not in told
      some_port = addresses.Endpoint(told, 1)
      try:
        ways = addresses.parse(str(some_port) if is_host else told)
      except ValueError:
        # Otherwise it would fail in each of the others.
        raise ValueError(
          "advertise must be a host that others reach, such as 10.0.0.3, or"
          f" host:port, such as 10.0.0.3:29400; got {told!r:.200}."
        ) from None
      listener = self._bind(family, ip, ports)
      self.port = listener.getsockname()[1]
      self._listeners.append(listener)
      if is_host:
        ways = [addresses.Endpoint(told, self.port)]
    if addresses.has_unix():
      unix = f"optax-dist-{secrets.token_hex(12)}"
      listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
      self._listeners.append(listener)
      listener.bind("\0" + unix)
      listener.listen(256)
      ways.append(addresses.Endpoint(unix=unix))
    return ways

  def _bind(
    self, family: socket.AddressFamily, ip: str, ports: Sequence[int]
  ) -> socket.socket:
    for port in ports:
      try:
        return socket.create_server(
          (ip, port),
          family=family,
          backlog=256,
          dualstack_ipv6=ip == "::" and socket.has_dualstack_ipv6(),
        )
      except OSError as error:
        if error.errno != errno.EADDRINUSE:
          raise
    some = f"{ports[0]} to {ports[-1]}" if ports else "(none)"
    raise OSError(errno.EADDRINUSE, f"No free port on {ip} of {some}.")

  # Called by the driver.

  def use_run(self, run: bytes) -> None:
    """Refuses peers of other runs from now on.

    Args:
      run: the run's nonce.
    """
    self._key = handshake.job_key(self._secret, run)

  def connect(self, peer: str, address: str, run: bytes | None = None) -> None:
    self._check_open()
    handshake.check_name(peer)
    ways = addresses.parse(address)
    if peer == self.name:
      raise ValueError(f"{peer!r} is this process.")
    if peer in self._sessions:
      return
    now = self.now()
    other = None if run is None else handshake.job_key(self._secret, run)
    dial = _Dial(ways, now + self._limits.connect, now, key=other)
    self._sessions[peer] = self._new_session(peer)
    self._dials[peer] = dial
    self._try(peer, dial)

  def disconnect(self, peer: str, reason: str = "") -> None:
    self._check_open()
    if peer not in self._sessions:
      return
    found = self._forget(peer)
    link = self._up_links.pop(peer, None)
    self._disconnected(peer)
    found.say_goodbye(reason)
    if link is None:
      found.close()
      return
    link.leaving, link.until = True, self.now() + self._limits.handshake
    self._guarded(link, selectors.EVENT_WRITE)

  def peers(self) -> list[str]:
    return list(self._up_links)

  def trouble(self, peer: str) -> str:
    dial = self._dials.get(peer)
    if dial is None:
      return ""
    if dial.link is not None and dial.link.channel is not None:
      return _no_handshake(dial.link)
    return dial.reason

  def silences(self) -> dict[str, float]:
    usual, gaps = self._limits.silence, self._gaps
    return {
      peer: gaps[peer].deadline if peer in gaps else usual
      for peer in self._up_links
    }

  def wake(self) -> None:
    with contextlib.suppress(OSError):
      self._wake_write.send(b"\0")

  def close(self, reason: str = "") -> None:
    if self._closed:
      return
    for peer in list(self._sessions):
      self.disconnect(peer, reason)
    self._closed = True
    _living.discard(self)
    for link in list(self._links):
      if link.leaving and not link.closed:
        # Unread input would reset the connection, and lose the goodbye.
        with contextlib.suppress(OSError, ValueError):
          link.sock.shutdown(socket.SHUT_WR)
          for _ in range(64):
            link.sock.recv(1 << 16)
      self._close(link)
    self._close_files()
    self._pool.close()

  def flush(self) -> None:
    while self._dirty:
      link, _ = self._dirty.popitem(last=False)
      if not link.closed:
        self._guarded(link, selectors.EVENT_WRITE)

  def poll(self, timeout: float | None) -> list[interface.Event]:
    self._check_open()
    now = self.now()
    end = None if timeout is None else now + timeout
    while True:
      self.flush()
      wait = 0.0
      if not (self._events or self._woken):
        until = self._next_check if end is None else min(end, self._next_check)
        wait = max(0.0, until - now)
      for key, mask in self._selector.select(wait):
        if key.data is not None:
          self._guarded(key.data, mask)
        else:
          self._woken |= self._handle_event(key.fileobj)
      now = self.now()
      if now >= self._next_check:
        self._check(now)
      if self._events or self._woken or (end is not None and now >= end):
        self.flush()
        self._woken = False
        events, self._events = self._events, []
        return events

  # The event loop.

  def _handle_event(self, source: object) -> bool:
    """Handles a new connection, or a call of `wake`."""
    if source is not self._wake_read:
      assert isinstance(source, socket.socket)
      self._accept(source)
      return False
    with contextlib.suppress(BlockingIOError):
      while len(self._wake_read.recv(4096)) == 4096:
        pass
    return True

  def _guarded(self, link: _Link, mask: int) -> None:
    """Reads and writes; any error ends only this connection."""
    if link.closed:
      return
    try:
      if link.channel is None:
        self._connected(link)
        return
      if mask & selectors.EVENT_READ or link.channel.reads_when_writable:
        self._read(link)
      if not link.closed:
        self._write(link)
    except handshake.AlreadyConnected as error:
      self._end(link, "twice", str(error))
    except handshake.AnotherAnswers as error:
      self._end(link, "ended", str(error))
    except handshake.Refused as error:
      with contextlib.suppress(OSError):
        self._write(link)  # The reason may be among the unread bytes.
      self._end(link, "refused", str(error))
    except (session.Faulty, struct.error, ValueError) as error:
      self._end(link, "faulty", f"it sent {error}")
    except OSError as error:
      self._end(link, "broken", str(error))
    except BaseException:
      # Bytes may be lost when interrupted between two lines; don't continue.
      self._end(link, "broken", "interrupted on this side")
      raise

  def _read(self, link: _Link) -> None:
    channel = link.channel
    assert channel is not None
    done = 0
    while done < _TURN or channel.pending():
      current = link.session
      room = (
        [memoryview(bytearray(1024))] if current is None else current.room()
      )
      got = channel.receive(room)
      if got is None:
        return
      if not got:
        reason = "it closed the connection"
        if current is None:
          reason += " during the handshake"
          if link.endpoint is not None and link.endpoint.host:
            reason += " (does one side have certificates, the other none?)"
        raise OSError(reason)
      link.heard = self.now()
      done += got
      if link.leaving:
        continue
      if current is None:
        self._handle_handshake(link, bytes(room[0][:got]))
        if link.closed:
          return
        continue
      current.received(got, channel.take_files() if channel.files else ())
      if current.ended is not None:
        self._end(link, "left", current.ended)
        return
      if channel.drains and (got < len(room[0]) or got < sum(map(len, room))):
        return

  def _handle_handshake(self, link: _Link, data: bytes) -> None:
    shake = link.handshake
    assert shake is not None
    shake.feed(data)
    if shake.undecided:
      other = self._up_links.get(shake.peer)
      if other is not None and (
        link.endpoint is not None or self._last_of(other) != shake.last
      ):
        shake.refuse(handshake.TWICE)
        raise handshake.AlreadyConnected("it has another connection")
      shake.use()
      shake.feed(b"")
    if shake.done:
      self._up(link, shake)

  def _write(self, link: _Link) -> None:
    channel, done = link.channel, 0
    assert channel is not None
    blocked = False
    while not blocked and done < _TURN:
      if link.handshake is not None and link.handshake.output:
        sent = channel.send([link.handshake.output])
        if sent:
          link.handshake.output = link.handshake.output[sent:]
        blocked = sent is None
        continue
      current = link.session
      output = current.output() if current else []
      if not output:
        break
      assert current is not None
      sent = channel.send(output, current.file)
      if sent is None:
        blocked = True
      else:
        current.sent(sent)
        done += sent
    if done:
      link.sent = self.now()
    more = (blocked and not channel.writes_when_readable) or done >= _TURN
    self._watch(link, more or channel.reads_when_writable)

  def _watch(self, link: _Link, write: bool) -> None:
    mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
    if mask != link.mask and not link.closed:
      link.mask = mask
      self._selector.modify(link.sock, mask, link)

  def _check(self, now: float) -> None:
    """Does what is due by now: heartbeats, silence, deadlines, attempts."""
    limits = self._limits
    self._next_check = now + limits.heartbeat / 4
    for link in list(self._links):
      if link.session is None or link.leaving:
        if now >= link.until:
          self._end(link, "broken", _no_handshake(link))
        continue
      silent = now - link.heard
      gaps = self._gaps.get(link.peer)
      if gaps is not None:
        if silent < link.quiet:
          # A byte came at some time between the two checks.
          gaps.add(link.quiet + limits.heartbeat / 4)
        link.quiet = silent
      if silent > (limits.silence if gaps is None else gaps.deadline):
        # Not one of its gaps: an outage would allow longer ones from then on.
        self._end(link, "silent", f"not a byte came for {silent:.1f} s")
      elif now - link.sent >= limits.heartbeat:
        link.session.ping()
        self._dirty[link] = None
    for peer, dial in list(self._dials.items()):
      if now >= dial.until:
        self._lose(
          peer,
          "unreachable",
          f"no connection within {limits.connect:g} s; last: {dial.reason}",
        )
      elif dial.link is None and now >= dial.at:
        self._try(peer, dial)
      if dial.link is None:
        self._next_check = min(self._next_check, max(dial.at, now + 0.005))
    for until, listener in list(self._deaf):
      if now >= until:
        self._deaf.remove((until, listener))
        try:
          self._selector.register(listener, selectors.EVENT_READ)
        except OSError:  # Out of watches or memory.
          self._deaf.append((now + _DEAF, listener))

  # Opening connections.

  def _accept(self, listener: socket.socket) -> None:
    for _ in range(64):
      try:
        sock, place = listener.accept()
      except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
          # Out of descriptors: otherwise the loop would spin here.
          self._selector.unregister(listener)
          self._deaf.append((self.now() + _DEAF, listener))
        return
      unix = sock.family == socket.AF_UNIX
      if unix and not _is_own_user(sock):
        sock.close()
        continue
      until = self.now() + self._limits.handshake
      try:
        link = self._add(sock, until, selectors.EVENT_READ)
      except OSError:
        continue  # The peer tries again.
      link.source = "" if unix else str(place[0])
      link.handshake = handshake.Handshake(self._key, self.name)
      self._strangers[link] = None
      self._guarded_open(link, server_side=True)
      if len(self._strangers) > self._limits.max_strangers:
        # Hosts with many unauthenticated connections make room for others.
        counts = collections.Counter(s.source for s in self._strangers)
        source = counts.most_common(1)[0][0]
        self._end(
          next(s for s in self._strangers if s.source == source),
          "broken",
          "too many handshakes at a time",
        )

  def _try(self, peer: str, dial: _Dial) -> None:
    if dial.found is None:
      if all(w.unix or addresses.is_ip(w.host) for w in dial.ways):
        dial.found = dial.ways
      else:
        dial.at = dial.until  # `poll` is woken before that.
        try:
          _look_up(weakref.ref(self), dial)
        except RuntimeError as error:  # Out of threads.
          self._failed(peer, dial, "unreachable", f"no look-up: {error}")
        return
    if not dial.found:
      self._failed(peer, dial, "unreachable", dial.reason)
      return
    way = dial.found[dial.index]
    if way.unix:
      family = socket.AF_UNIX
      place: str | tuple[str, int] = "\0" + way.unix
      if not addresses.has_unix():
        self._failed(peer, dial, "unreachable", "no such sockets here")
        return
    else:
      family = socket.AF_INET6 if ":" in way.host else socket.AF_INET
      place = (way.host, way.port)
    try:
      sock = socket.socket(family, socket.SOCK_STREAM)
      link = self._add(sock, dial.until, selectors.EVENT_WRITE)
    except OSError as error:
      # No IPv6 on this host, or out of descriptors, watches or memory.
      self._failed(peer, dial, "unreachable", f"{way}: {error}")
      return
    link.peer, link.endpoint, dial.link = peer, way, link
    # With several endpoints left, none may use up all the time.
    share = (dial.until - self.now()) / 2
    link.until = self.now() + max(0.5, min(share, self._limits.handshake))
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
      self._end(link, "unreachable", f"{way}: too many want to connect")

  def _unconnected(self, link: _Link, code: int) -> None:
    if code == errno.ECONNREFUSED:
      self._dials[link.peer].refusals += 1
    self._end(link, "unreachable", f"{link.endpoint}: {os.strerror(code)}")

  def _connected(self, link: _Link) -> None:
    code = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
      self._unconnected(link, code)
      return
    last = self._last.get(link.peer, handshake.NO_SESSION)
    key = self._dials[link.peer].key or self._key
    link.handshake = handshake.Handshake(key, self.name, link.peer, last)
    self._guarded_open(link, server_side=False)

  def _guarded_open(self, link: _Link, server_side: bool) -> None:
    tls = self._tls if link.sock.family != socket.AF_UNIX else None
    try:
      link.channel = channels.open_channel(
        link.sock, tls, server_side, self._limits.silence
      )
      link.sock = link.channel.sock
      link.mask = selectors.EVENT_READ
      # TLS has created another object for the descriptor.
      self._selector.modify(link.channel.sock, link.mask, link)
      self._write(link)
    except OSError as error:
      self._end(link, "broken", str(error))

  def _add(self, sock: socket.socket, until: float, mask: int) -> _Link:
    """Watches a socket; closes it, and raises OSError, if that can't be."""
    sock.setblocking(False)
    link = _Link(None, sock, until, mask=mask)
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
    if peer in self._up_links:
      self._lose(peer, "replaced", "it has connected anew")
    found = self._sessions.get(peer)
    if found is None:
      found = self._sessions[peer] = self._new_session(peer)
    dial = self._dials.pop(peer, None)
    if dial is not None and dial.link not in (None, link):
      assert dial.link is not None
      self._close(dial.link)
    self._up_links[peer] = link
    self._strangers.pop(link, None)
    assert link.channel is not None
    link.peer, link.session = peer, found
    link.sent = self.now()
    link.heard = link.sent
    unix = link.sock.family == socket.AF_UNIX
    plain = isinstance(link.channel, channels.Plain)
    signed = plain and not unix and self._signs
    self._last[peer] = keys.session
    if len(self._last) > _FORGOTTEN:
      oldest = next(iter(self._last))
      del self._last[oldest]
      self._gaps.pop(oldest, None)
    if self._make_gaps is not None and peer not in self._gaps:
      self._gaps[peer] = self._make_gaps()
    self._events.append(interface.PeerUp(peer, unix))
    found.start((keys.send, keys.receive) if signed else None, unix)
    link.channel.passes_files = unix
    found.feed(shake.rest)
    self._dirty[link] = None

  # Closing connections.

  def _end(self, link: _Link, how: str, reason: str) -> None:
    """Handles the end of a connection, or of an attempt."""
    if self._up_links.get(link.peer) is link:
      if how in ("refused", "twice"):
        how = "broken"
      self._lose(link.peer, how, reason)  # type: ignore[arg-type]
      return
    self._close(link)
    dial = self._dials.get(link.peer)
    if dial is not None and dial.link is link:
      self._failed(link.peer, dial, how, reason)

  def _failed(self, peer: str, dial: _Dial, how: str, reason: str) -> None:
    """Handles a failed attempt: tries again, or gives up."""
    dial.link, dial.reason = None, reason
    dial.index += 1
    dial.at = self.now()
    if dial.index >= len(dial.found or ()):
      if how in ("refused", "ended"):
        self._lose(peer, how, reason)  # type: ignore[arg-type]
        return
      if dial.refusals >= dial.index and peer in self._last:
        # A process listens at its own address for as long as it lives.
        reason = f"it has ended: its address refuses connections ({reason})"
        self._lose(peer, "unreachable", reason)
        return
      dial.index, dial.found, dial.refusals = 0, None, 0
      dial.at += dial.pause
      dial.pause = min(2 * dial.pause, _PAUSES[1])
    self._next_check = min(self._next_check, dial.at)

  def _disconnected(self, peer: str) -> None:
    link, dial = self._up_links.pop(peer, None), self._dials.pop(peer, None)
    for each in (link, dial.link if dial else None):
      if each is not None:
        self._close(each)

  def _is_connected(self, peer: str) -> bool:
    link = self._up_links.get(peer)
    return link is not None and not _is_cut(link.sock)

  def _to_write(self, peer: str) -> None:
    link = self._up_links.get(peer)
    if link is not None:
      self._dirty[link] = None

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
    if link.channel is not None:
      for file in link.channel.take_files():
        os.close(file)
    if link.leaving and link.session is not None:
      link.session.close()

  def _close_files(self) -> None:
    """Closes all descriptors without saying goodbye."""
    for link in self._links:
      link.sock.close()
    for sock in (*self._listeners, self._wake_read, self._wake_write):
      sock.close()
    self._selector.close()

  def _in_child(self) -> None:
    """In a forked child: the connections belong to the parent."""
    self._closed = True
    self._close_files()
    self._pool.close()
    self._links.clear()

  # Helpers.

  def _new_session(self, peer: str) -> session.Session:
    return session.Session(
      peer,
      self._pool,
      self._emit,
      connected=lambda: self._is_connected(peer),
      now=self.now,
    )

  def _last_of(self, link: _Link) -> bytes:
    shake = link.handshake
    return shake.keys.session if shake and shake.keys else b""


def _look_up(transport: weakref.ref[SocketTransport], dial: _Dial) -> None:
  """Looks up host names in a thread, since that may take long."""

  def look() -> None:
    found = []
    for way in dial.ways:
      if way.unix or addresses.is_ip(way.host):
        found.append(way)
        continue
      try:
        for info in socket.getaddrinfo(
          way.host, way.port, type=socket.SOCK_STREAM
        ):
          found.append(addresses.Endpoint(str(info[4][0]), way.port))
      except (OSError, UnicodeError) as error:  # Unicode: an empty label.
        dial.reason = f"the name {way.host!r} can't be resolved: {error}"
    dial.found = found
    dial.at = 0.0
    living = transport()
    if living is not None:
      living._next_check = 0.0
      living.wake()

  threading.Thread(target=look, name="optax-dist-dns", daemon=True).start()


def _no_handshake(link: _Link) -> str:
  if link.endpoint is None:
    return "the handshake took too long"
  if link.channel is None:
    return f"{link.endpoint}: it does not accept the connection"
  return (
    f"what listens at {link.endpoint} is not {link.peer!r} of this job: it"
    " accepts the connection, and does not answer"
  )


def _is_own_user(sock: socket.socket) -> bool:
  raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
  return struct.unpack("3i", raw)[1] in (os.getuid(), 0)


def _is_cut(sock: socket.socket) -> bool:
  """Whether the other side has closed it, even if input is unread."""
  poll = select.poll()
  poll.register(sock, getattr(select, "POLLRDHUP", 0))
  return bool(poll.poll(0))


_living: weakref.WeakSet[SocketTransport] = weakref.WeakSet()


def _after_fork() -> None:
  for transport in list(_living):
    transport._in_child()
  _living.clear()


os.register_at_fork(after_in_child=_after_fork)
