"""A process's transport, over Unix sockets on its host and TCP otherwise."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

from optax_dist.coordinator.protocol import liveness
from optax_dist.coordinator.transport import (
  addresses,
  clock,
  connections,
  handshake,
  interface,
  listening,
  session,
  shared_memory,
  tls,
)

DEFAULT_PORTS = range(29400, 29500)


class Transport:
  """One process's connections to its peers.

  One thread owns it and makes all calls, except those that say otherwise, and
  `wake`, which may be called from signal handlers, too. If that thread is the
  main one, an exception that a signal handler raises (Ctrl-C) while bytes are
  moved costs the connection they belong to, and no other. Only `poll` ever
  waits. Base a deadline for an array on `idle`: it then ends transfers that are
  stuck, not those that are merely long.

  Peers are known by names, which are new whenever a process starts: a restarted
  process is another peer. Both ends may call `connect`; they get one
  connection.

  Attributes:
    name: name of this process.
    address: address that peers `connect` to; it may list several endpoints.
    port: the port it listens on; None: it only accepts local connections.
    now: the time, in seconds.
    flush: writes what was sent, as far as possible without waiting: to be called
      before slow work, since `poll` does so, too.
    wake: makes the current `poll`, or else the next one, return at once.
    bytes_in: bytes of arrays received.
    bytes_out: bytes of arrays sent.
  """

  def __init__(
    self,
    name: str,
    *,
    secret: bytes = b"",
    bind: str | None = None,
    ports: Iterable[int] = DEFAULT_PORTS,
    advertise: str | None = None,
    towards: str | None = None,
    certificates: tls.Certificates | None = None,
    server: str = "",
    limits: interface.Limits | None = None,
    time_source: Callable[[], float] = time.monotonic,
  ):
    """Starts to listen.

    Args:
      name: name of this process, unique in this run; at most 64 bytes.
      secret: known to all replicas of the job, at least 16 bytes. Without
        certificates it is required if other hosts can connect.
      bind: host name or IP address to listen on, such as "0.0.0.0" or "::" for
        all addresses. None: only this host can connect if `towards` is on
        loopback, or None; otherwise all addresses.
      ports: the first one that is free is used; 0 is any.
      advertise: what other hosts use instead of `bind`: a host, or
        ``host:port`` if ports are mapped.
      towards: a host that all replicas reach, to determine the address to
        advertise.
      certificates: encrypts all traffic that leaves this host.
      server: the name of a process that this process connects to, but never accepts:
        a peer that calls with this name is refused; "" for none.
      limits: bounds on time and memory.
      time_source: a monotonic clock, in seconds.

    Raises:
      ValueError: an option is invalid; the message says why.
      OSError: no port is free.

    Example:
      >>> a, b = Transport("a"), Transport("b")
      >>> a.connect("b", b.address)
      >>> _ = a.send("b", [b"hello"])
      >>> events = []
      >>> while len(events) < 2:
      ...   events += b.poll(0.01)
      ...   _ = a.poll(0.01)
      >>> events
      [PeerUp(peer='a'), Message(peer='a', payload=b'hello')]
      >>> a.close(); b.close()
    """
    self.name = handshake.check_name(name)
    self._identity = handshake.Identity(name, secret, server)
    contexts = tls.Contexts(certificates) if certificates else None
    listeners = listening.listen(
      bind, list(ports), advertise, towards, bool(secret or certificates)
    )
    self.address, self.port = listeners.address, listeners.port
    limits = limits or interface.Limits()
    # Seconds of a clock that stands still while this process does: time in which it
    # was stopped counts against no peer.
    self._clock = clock.AwakeClock(limits.heartbeat, time_source)
    self.now = self._clock.now
    self._closed = False
    self.bytes_in = self.bytes_out = 0
    self._events: list[interface.Event] = []
    self._pool = shared_memory.Pool()
    # Sessions of peers that are connected or connecting.
    self._sessions: dict[str, session.Session] = {}
    self._connections = connections.Connections(
      self._identity,
      listeners,
      contexts,
      limits,
      self._clock,
      self._up,
      self._lose,
    )
    self.flush = self._connections.flush
    self.wake = self._connections.poller.wake
    _living.add(self)

  def use_run(self, run: bytes) -> None:
    """Refuses peers of other runs from now on, and of none.

    Args:
      run: the run's nonce.
    """
    self._identity.key = self._identity.key_of(run)

  def connect(
    self,
    peer: str,
    address: str | Callable[[], str],
    run: bytes | None = None,
    met: bool = False,
  ) -> None:
    """Starts to connect; ends in `PeerUp` or `PeerLost`.

    It retries, with pauses, until `Limits.connect` has passed. A peer that has
    listened before is lost at once if its address no longer accepts
    connections, since its process has ended; so is one whose name or address is
    invalid. Messages and arrays may be sent at once, and wait until the peer is
    up. If it is already connected or connecting, nothing happens.

    Args:
      peer: name of the peer.
      address: the peer's `address`; or a function that finds it, called in
        another thread before each attempt, since another process may have taken the
        peer's name by then. It may raise `ValueError`, or `handshake.Refused` where
        trying can't help.
      run: the nonce of its run, if it differs from this process's.
      met: whether it is known to have listened there, as a peer that was connected.
    """
    self._check_open()
    if peer not in self._sessions:
      try:
        handshake.check_name(peer)
        ways = address if callable(address) else addresses.parse(address)
        if peer == self.name:
          raise ValueError(f"{peer!r} is this process.")
      except ValueError as error:
        lost = interface.PeerLost(peer, "unreachable", str(error))
        self._events.append(lost)
        return
      key = None if run is None else self._identity.key_of(run)
      self._sessions[peer] = self._new_session(peer)
      self._connections.dialer.dial(peer, ways, key, met)

  def disconnect(self, peer: str, reason: str = "") -> None:
    """Closes in order, once the messages sent before have been written.

    The peer gets a `PeerLost` of kind "left" with the reason; this end gets none.
    Arrays in progress fail on both ends; other events of the peer are dropped.
    """
    self._check_open()
    if peer not in self._sessions:
      return
    session_ = self._forget(peer)
    session_.announce_close(reason)
    if not self._connections.drain_and_close(peer):
      session_.close()

  def allow(self, peer: str, silence: liveness.Rule) -> None:
    """Sets how long a connected peer may be silent, in place of the limits.

    The peer has to set the same: heartbeats are sent often enough for this rule.
    """
    self._connections.allow(peer, silence)

  def peers(self) -> list[str]:
    """Names of the connected peers."""
    return self._connections.peers()

  @property
  def shares_memory(self) -> bool:
    """Whether peers read memory of `allocate` without a copy: all are on this host.

    The `server` does not count. False without any; callable from any thread.
    """
    server = self._identity.server
    some = [s for peer, s in list(self._sessions.items()) if peer != server]
    return bool(some) and all(session_.sending.shares for session_ in some)

  def trouble(self, peer: str) -> str:
    """Why a peer is not connected yet; "" if nothing is known."""
    return self._connections.dialer.trouble(peer)

  def send(self, peer: str, payload: Sequence[interface.Buffer]) -> bool:
    """Sends a message; its parts are copied, and may be reused.

    It never waits: the message is written by the next `poll` or `flush`.

    Returns:
      Whether it was queued. It isn't if there is no such peer, which may have
      been lost a moment ago, with the event still to be polled. If more than
      `Limits.max_queued` bytes are queued for it, the peer is lost.

    Raises:
      ValueError: it is larger than `MAX_MESSAGE`.
    """
    self._check_open()
    session_ = self._sessions.get(peer)
    if session_ is None:
      return False
    session_.send(payload)
    most = self._connections.limits.max_queued
    if session_.frames.backlog > most:
      self._lose(peer, "overflow", f"more than {most:,} bytes wait for it")
      return False
    self._connections.to_write(peer)
    return True

  def allocate(self, nbytes: int) -> memoryview:
    """Allocates memory that near peers can read without a copy.

    It is not zeroed, and is aligned to 64 bytes. It is used again once no view of
    it is left, and no peer reads it. Callable from any thread.
    """
    return self._pool.allocate(nbytes)

  def send_array(
    self,
    peer: str,
    transfer: int,
    data: interface.Buffer | Sequence[interface.Buffer],
  ) -> None:
    """Sends an array; ends in one `ArraySent` or `ArrayFailed`.

    It must not be written to until then; memory of `allocate` never, for a peer
    that was lost may still read it. It is sent once the receiver expects it.

    Args:
      peer: the receiver, which expects it now or later.
      transfer: from 0 to 2**63 - 1, and not used before between these two in
        this direction.
      data: contiguous bytes, which are not copied, or parts of the array that
        are.
    """
    session_ = self._session(peer)
    if session_ is None:
      self._not_connected(peer, transfer, True)
      return
    session_.sending.send(transfer, data)
    self._connections.to_write(peer)

  def expect(
    self,
    peer: str,
    transfer: int,
    into: interface.Buffer,
    in_place: bool = False,
  ) -> None:
    """Expects an array; ends in one `ArrayReceived` or `ArrayFailed`.

    Args:
      peer: its sender.
      transfer: its transfer id.
      into: contiguous writable memory for the result; an array of another size
        fails.
      in_place: whether it may be read where the sender has it, if it is near,
        until `release`; `into` is not written to then.
    """
    session_ = self._session(peer)
    if session_ is None:
      self._not_connected(peer, transfer, False)
      return
    session_.receiving.expect(transfer, into, in_place)
    self._connections.to_write(peer)

  def pending(self) -> int:
    """How many arrays are sent or expected; callable from any thread."""
    sessions = list(self._sessions.values())
    return sum(len(s.sending) + len(s.receiving) for s in sessions)

  def idle(self, peer: str, transfer: int) -> float | None:
    """Seconds since the last byte of an expected array, or since it was expected.

    By `now`; None if no such array is expected.
    """
    session_ = self._sessions.get(peer)
    return session_.receiving.idle(transfer) if session_ else None

  def release(self, peer: str, transfer: int) -> None:
    """Stops reading an `ArrayReceived` that is read in place.

    Call it after the last access to its bytes: its sender may then use the memory
    again. It does not if the connection is lost before.
    """
    session_ = self._sessions.get(peer)
    if session_ is not None:
      session_.receiving.release(transfer)
      self._connections.to_write(peer)

  def cancel(self, peer: str, transfer: int) -> None:
    """Cancels sending or expecting an array, in both directions.

    No event follows here, and the memory belongs to the caller again; at the
    peer the transfer fails, now or when it starts, unless the whole array is on
    its way.
    """
    session_ = self._session(peer)
    if session_ is not None:
      session_.cancel(transfer)
      self._connections.to_write(peer)

  def poll(self, timeout: float | None) -> list[interface.Event]:
    """Makes progress, and returns the events.

    Args:
      timeout: how long to wait for the first event; None: until there is one.

    Returns:
      Events, in order for each peer. An empty list after the timeout or a
      `wake`.
    """
    self._check_open()
    now = self._clock.now()
    end = None if timeout is None else now + timeout
    while True:
      self.flush()
      now = self._connections.run_once(0.0 if self._events else end)
      done = end is not None and now >= end
      if self._events or self._connections.poller.woken or done:
        self._connections.poller.woken = False
        events, self._events = self._events, []
        return events

  def close(self, reason: str = "") -> None:
    """Announces its end to all peers without waiting, and frees all resources."""
    if self._closed:
      return
    for peer in list(self._sessions):
      self.disconnect(peer, reason)
    self._closed = True
    _living.discard(self)
    self._connections.close()
    self._pool.close()

  # Called by connections and sessions.

  def _up(self, peer: str) -> session.Session:
    self._events.append(interface.PeerUp(peer))
    if peer not in self._sessions:
      self._sessions[peer] = self._new_session(peer)
    return self._sessions[peer]

  def _lose(self, peer: str, how: interface.How, reason: str) -> None:
    self._connections.close_peer(peer)
    self._sessions.pop(peer).close(f"{peer!r} is lost: {reason}")
    self._events.append(interface.PeerLost(peer, how, reason))

  def _emit(self, event: interface.Event) -> None:
    self._events.append(event)
    if isinstance(event, interface.ArraySent):
      self.bytes_out += event.nbytes
    elif isinstance(event, interface.ArrayReceived):
      self.bytes_in += event.data.nbytes

  # Helpers.

  def _new_session(self, peer: str) -> session.Session:
    return session.Session(peer, self._pool, self._emit, self._clock)

  def _session(self, peer: str) -> session.Session | None:
    self._check_open()
    return self._sessions.get(peer)

  def _not_connected(self, peer: str, transfer: int, sending: bool) -> None:
    reason = f"{peer!r} is not connected"
    self._events.append(interface.ArrayFailed(peer, transfer, sending, reason))

  def _forget(self, peer: str) -> session.Session:
    """Drops a peer, and its events that were not polled yet."""
    self._events = [e for e in self._events if e.peer != peer]
    return self._sessions.pop(peer)

  def _check_open(self) -> None:
    if self._closed:
      raise RuntimeError("This transport is closed, or its process has forked.")

  def _in_child(self) -> None:
    """In a forked child: the connections belong to the parent."""
    self._closed = True
    self._connections.close_files()
    self._pool.close()


_living: weakref.WeakSet[Transport] = weakref.WeakSet()


def _after_fork() -> None:
  for transport in list(_living):
    transport._in_child()
  _living.clear()


os.register_at_fork(after_in_child=_after_fork)
