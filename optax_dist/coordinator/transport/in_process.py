"""Transports between threads of one process, without copies of arrays."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading

import numpy as np

from optax_dist.coordinator.transport import (
  handshake,
  interface,
  peers,
  session,
)

_FULL = 8 << 20  # Unread bytes after which a peer counts as full.
_numbers = itertools.count(1)


class Hub:
  """Connects the transports of one process.

  Example:
    >>> hub = Hub()
    >>> a, b = InProcessTransport("a", hub), InProcessTransport("b", hub)
    >>> a.connect("b", b.address)
    >>> a.send("b", [b"hel", b"lo"])
    True
    >>> a.poll(0)
    [PeerUp(peer='b', near=True)]
    >>> b.poll(0)
    [PeerUp(peer='a', near=True), Message(peer='a', payload=b'hello')]
    >>> b.close("done")
    >>> a.poll(0)
    [PeerLost(peer='b', how='left', reason='done')]
  """

  def __init__(self) -> None:
    self.lock = threading.Lock()
    self.members: dict[str, InProcessTransport] = {}
    self.links: dict[frozenset[str], _Link] = {}


@dataclasses.dataclass(eq=False)
class _Link:
  """The shared state of two connected transports."""

  ends: tuple[InProcessTransport, InProcessTransport]
  open: bool = True
  stalled: bool = False  # Whether one waits for the other to read.

  def other(self, one: InProcessTransport) -> InProcessTransport:
    return self.ends[self.ends[0] is one]


class InProcessTransport(peers.Peers):
  """See `interface.Transport`; a stopped thread is not detected as silent.

  Attributes:
    name: name of this thread's side.
    address: address at which others of the hub connect to it.
  """

  def __init__(
    self, name: str, hub: Hub, limits: interface.Limits | None = None
  ):
    super().__init__(handshake.check_name(name), limits, share_memory=False)
    self.address = f"in-process:{next(_numbers)}"
    self._hub = hub
    self._links: dict[str, _Link] = {}
    self._dials: dict[str, tuple[str, float]] = {}
    self._met: set[str] = set()  # Every peer connected so far.
    self._changed = threading.Condition()
    # Received items: bytes, or changes of the link.
    self._inbox: collections.deque[tuple[_Link, bytes | str]] = (
      collections.deque()
    )
    self._waiting = 0
    self._woken = False
    with hub.lock:
      others = list(hub.members.values())
      hub.members[self.address] = self
    for other in others:
      other.wake()  # It may have been dialing this transport.

  def connect(self, peer: str, address: str, run: bytes | None = None) -> None:
    self._check_open()
    if not address.startswith("in-process:"):
      raise ValueError(
        f"An address here is in-process:number; got {address!r:.200}."
      )
    if peer not in self._sessions:
      self._sessions[peer] = self._new_session(peer)
      self._dials[peer] = address, self.now() + self._limits.connect

  def disconnect(self, peer: str, reason: str = "") -> None:
    self._check_open()
    if peer not in self._sessions:
      return
    found = self._forget(peer)
    link = self._links.get(peer)
    found.say_goodbye(reason)
    if link is not None:
      self._deliver(link, found, everything=True)
    self._disconnected(peer)
    found.close()

  def peers(self) -> list[str]:
    return list(self._links)

  def silences(self) -> dict[str, float]:
    return {}

  def poll(self, timeout: float | None) -> list[interface.Event]:
    end = None if timeout is None else self.now() + timeout
    while True:
      self._check_open()
      self._dial()
      self.flush()
      self._read()
      self.flush()
      now = self.now()
      if self._events or self._woken or (end is not None and now >= end):
        self._woken = False
        events, self._events = self._events, []
        return events
      times = [until for _, until in self._dials.values()]
      if end is not None:
        times.append(end)
      with self._changed:
        if not (self._inbox or self._woken):
          # Often enough for the clock to notice that this process was stopped.
          wait = self._limits.heartbeat / 4
          self._changed.wait(min([wait, *(time - now for time in times)]))

  def wake(self) -> None:
    with self._changed:
      self._woken = True
      self._changed.notify()

  def close(self, reason: str = "") -> None:
    if self._closed:
      return
    self._vanish()
    for peer in list(self._sessions):
      self.disconnect(peer, reason)
    self._closed = True

  def kill(self) -> None:
    """Stops it as a crash would: peers lose it without a goodbye."""
    self._vanish()
    for link in self._links.values():
      self._end(link)
    self._links.clear()
    self.close()

  def _vanish(self) -> None:
    """Removes it from the hub, and reads what is there."""
    with self._hub.lock:
      self._hub.members.pop(self.address, None)
    self._read()

  def _new_session(self, peer: str) -> session.Session:
    return session.Session(
      peer,
      self._pool,
      self._emit,
      self._map,
      connected=lambda: self._is_connected(peer),
      now=self.now,
    )

  def _map(self, peer: str, number: int) -> np.ndarray:
    return self._links[peer].other(self)._pool.seen(number)

  def _to_write(self, peer: str) -> None:
    pass

  def _is_connected(self, peer: str) -> bool:
    return peer in self._links and self._links[peer].open

  def _disconnected(self, peer: str) -> None:
    self._dials.pop(peer, None)
    link = self._links.pop(peer, None)
    if link is not None:
      self._end(link)

  def _dial(self) -> None:
    now = self.now()
    for peer, (address, until) in list(self._dials.items()):
      with self._hub.lock:
        found = self._hub.members.get(address)
        if found is not None and found.name == peer and found is not self:
          key = frozenset((self.name, peer))
          link = self._hub.links.get(key)
          if link is None or not link.open:
            self._hub.links[key] = link = _Link((self, found))
            for end in link.ends:
              end._put(link, "up")
          del self._dials[peer]
          continue
      if found is not None:
        reason = f"{found.name!r} is at the address of {peer!r}"
        self._lose(peer, "ended", reason)
      elif peer in self._met:
        self._lose(peer, "unreachable", "it has ended")
      elif now >= until:
        reason = f"nobody at {address} for {self._limits.connect:g} s"
        self._lose(peer, "unreachable", reason)

  def _read(self) -> None:
    while self._inbox:
      with self._changed:
        link, data = self._inbox.popleft()
        if isinstance(data, bytes):
          self._waiting -= len(data)
      other = link.other(self)
      peer = other.name
      if data == "up":
        self._dials.pop(peer, None)
        self._links[peer] = link
        self._met.add(peer)
        self._events.append(interface.PeerUp(peer, True))
        found = self._sessions.setdefault(peer, self._new_session(peer))
        found.start(None, near=True)
      elif self._links.get(peer) is not link:
        continue  # The connection ended here.
      elif data == "ended":
        self._lose(peer, "broken", "it has ended")
      elif isinstance(data, bytes):
        found = self._sessions[peer]
        found.feed(data)
        if found.ended is not None:
          self._lose(peer, "left", found.ended)
        elif link.stalled and not self._inbox:
          link.stalled = False
          other._put(link, "go on")

  def flush(self) -> None:
    for peer, link in self._links.items():
      self._deliver(link, self._sessions[peer])

  def _deliver(
    self, link: _Link, found: session.Session, everything: bool = False
  ) -> None:
    other = link.other(self)
    while found.has_output():
      if other._waiting > _FULL and not everything:
        link.stalled = True
        return
      output = found.output()
      if not output:
        return
      data = b"".join(output)
      found.sent(len(data))
      other._put(link, data)

  def _end(self, link: _Link) -> None:
    link.open = False
    key = frozenset(end.name for end in link.ends)
    with self._hub.lock:
      if self._hub.links.get(key) is link:
        del self._hub.links[key]
    link.other(self)._put(link, "ended")

  def _put(self, link: _Link, data: bytes | str) -> None:
    with self._changed:
      self._inbox.append((link, data))
      if isinstance(data, bytes):
        self._waiting += len(data)
      self._changed.notify()
