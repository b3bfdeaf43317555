"""Transports of threads of one process; arrays are lent, not copied."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from optax_dist.coordinator.transport import interface, shared_memory

_REMEMBERED = 16384  # Cancelled transfers.
_numbers = itertools.count(1)


class Hub:
  """A place where transports of one process find each other.

  Example:
    >>> hub = Hub()
    >>> a, b = InProcessTransport("a", hub), InProcessTransport("b", hub)
    >>> a.connect("b", b.address)
    >>> a.send("b", [b"hel", b"lo"])
    True
    >>> b.poll(0)
    [PeerUp(peer='a', near=True), Message(peer='a', payload=b'hello')]
    >>> b.close("done")
    >>> a.poll(0)[-1]
    PeerLost(peer='b', how='left', reason='done')
  """

  def __init__(self) -> None:
    self.lock = threading.RLock()
    self.members: dict[str, InProcessTransport] = {}


@dataclasses.dataclass(eq=False)
class _Array:
  """A transfer, of which one half may be missing yet."""

  data: memoryview | None = None
  expected: int | None = None
  into: memoryview | None = None
  since: float = 0.0
  lent: bool = False
  region: shared_memory.Region | None = None
  dead: bool = False  # One side has given it up.
  silent: bool = False  # Its sender has, while it is lent.


class _Pair:
  """What two connected transports have in common; arrays by sender and id."""

  def __init__(self) -> None:
    self.arrays: dict[tuple[str, int], _Array] = {}


@dataclasses.dataclass(eq=False)
class _Dial:
  address: str
  until: float
  waiting: list[Callable[[], object]] = dataclasses.field(default_factory=list)


class InProcessTransport:
  """See `interface.Transport`; a thread that stops is not noticed as silent.

  Attributes:
    name: of this thread's side.
    address: text by which others of the hub connect to it.
  """

  def __init__(
    self, name: str, hub: Hub, limits: interface.Limits | None = None
  ):
    self.name = name
    self.address = f"in-process:{next(_numbers)}"
    self._limits = limits or interface.Limits()
    self._hub = hub
    self._changed = threading.Condition(hub.lock)
    self._events: list[interface.Event] = []
    self._woken = self._closed = False
    self._pool = shared_memory.Pool(shared=False)
    self._pairs: dict[str, tuple[_Pair, InProcessTransport]] = {}
    self._dials: dict[str, _Dial] = {}
    self._lent: dict[tuple[str, int], _Pair] = {}
    with hub.lock:
      hub.members[self.address] = self
      for member in list(hub.members.values()):
        member._try_dials()

  def connect(self, peer: str, address: str) -> None:
    if not address.startswith("in-process:"):
      raise ValueError(
        f"An address here is in-process:number; got {address!r:.200}."
      )
    with self._hub.lock:
      self._check_open()
      if peer not in self._pairs and peer not in self._dials:
        until = time.monotonic() + self._limits.connect
        self._dials[peer] = _Dial(address, until)
        self._try_dials()

  def disconnect(self, peer: str, reason: str = "") -> None:
    with self._hub.lock:
      self._check_open()
      if self._dials.pop(peer, None) is None and peer not in self._pairs:
        return
      self._part(peer, "left", reason)
      self._events = [e for e in self._events if e.peer != peer]

  def peers(self) -> list[str]:
    with self._hub.lock:
      return list(self._pairs)

  def send(self, peer: str, payload: Sequence[interface.Buffer]) -> bool:
    body = b"".join(payload)
    if len(body) > self._limits.max_message:
      raise ValueError(
        f"A message has at most {self._limits.max_message:,} bytes"
        f" (Limits.max_message), got {len(body):,}."
      )
    with self._hub.lock:
      self._check_open()
      if self._waits(peer, lambda: self.send(peer, [body])):
        return True
      if peer not in self._pairs:
        return False
      self._pairs[peer][1]._emit(interface.Message(self.name, body))
      return True

  def allocate(self, nbytes: int) -> memoryview:
    with self._hub.lock:
      return self._pool.allocate(nbytes)

  def free(self, memory: memoryview) -> None:
    with self._hub.lock:
      self._pool.free(memory)

  def send_array(
    self, peer: str, transfer: int, data: interface.Buffer
  ) -> None:
    with self._hub.lock:
      if self._waits(peer, lambda: self.send_array(peer, transfer, data)):
        return
      found = self._begin(peer, self.name, transfer, True)
      if found is not None:
        found.data = memoryview(data).cast("B")
        found.region = self._pool.find(found.data)
        self._match(peer, transfer, sending=True)

  def expect(
    self,
    peer: str,
    transfer: int,
    nbytes: int,
    into: interface.Buffer | None = None,
  ) -> None:
    memory = None if into is None else memoryview(into).cast("B")
    if memory is not None and (memory.readonly or memory.nbytes != nbytes):
      raise ValueError(
        f"into must be writable and have {nbytes:,} bytes, has"
        f" {memory.nbytes:,}."
      )
    with self._hub.lock:
      if self._waits(peer, lambda: self.expect(peer, transfer, nbytes, into)):
        return
      found = self._begin(peer, peer, transfer, False)
      if found is not None:
        found.expected, found.into = nbytes, memory
        found.since = time.monotonic()
        self._match(peer, transfer, sending=False)

  def progress(self, peer: str, transfer: int) -> interface.Progress | None:
    with self._hub.lock:
      pair = self._pairs.get(peer)
      found = pair[0].arrays.get((peer, transfer)) if pair else None
      if found is None or found.expected is None or found.lent:
        return None
      return interface.Progress(0, time.monotonic() - found.since)

  def release(self, peer: str, transfer: int) -> bool:
    with self._hub.lock:
      lender = self._lent.pop((peer, transfer), None)
      if lender is None:
        return True
      pair, other = self._pairs.get(peer, (None, self))
      if pair is not lender:
        return False
      found = lender.arrays.pop((peer, transfer))
      other._returned(found)
      if not found.silent:
        other._emit(interface.ArraySent(self.name, transfer))
      return True

  def cancel(self, peer: str, transfer: int) -> None:
    with self._hub.lock:
      self._check_open()
      if self._waits(peer, lambda: self.cancel(peer, transfer)):
        return
      if peer not in self._pairs:
        return
      pair, other = self._pairs[peer]
      for sender in (self.name, peer):
        found = pair.arrays.get((sender, transfer))
        if found is not None and found.lent:
          found.silent |= sender == self.name
          continue
        sending = sender != self.name
        begun = found is not None and (
          (found.data if sending else found.expected) is not None
        )
        pair.arrays.pop((sender, transfer), None)
        if begun:
          other._emit(
            interface.ArrayFailed(
              self.name, transfer, sending, f"{self.name!r} has given it up"
            )
          )
          continue
        pair.arrays[sender, transfer] = _Array(dead=True)
        dead = [key for key, a in pair.arrays.items() if a.dead]
        if len(dead) > _REMEMBERED:
          del pair.arrays[dead[0]]
    self.release(peer, transfer)

  def poll(self, timeout: float | None) -> list[interface.Event]:
    end = None if timeout is None else time.monotonic() + timeout
    with self._changed:
      while True:
        self._check_open()
        now = time.monotonic()
        for peer, dial in list(self._dials.items()):
          if now >= dial.until:
            del self._dials[peer]
            reason = f"nobody at {dial.address} for {self._limits.connect:g} s"
            self._emit(interface.PeerLost(peer, "unreachable", reason))
        if self._events or self._woken or (end is not None and now >= end):
          self._woken = False
          events, self._events = self._events, []
          return events
        times = [dial.until for dial in self._dials.values()]
        if end is not None:
          times.append(end)
        self._changed.wait(min(times) - now if times else None)

  def wake(self) -> None:
    with self._changed:
      self._woken = True
      self._changed.notify()

  def close(self, reason: str = "") -> None:
    self._close("left", reason)

  def kill(self) -> None:
    """Ends it as a crash would: peers lose it without a goodbye."""
    self._close("broken", "it has ended")

  def _close(self, how: interface.How, reason: str) -> None:
    with self._hub.lock:
      if self._closed:
        return
      for peer in list(self._pairs):
        self._part(peer, how, reason)
      self._closed = True
      del self._hub.members[self.address]
      self._dials.clear()
      self._changed.notify_all()

  def _part(self, peer: str, how: interface.How, reason: str) -> None:
    if peer not in self._pairs:
      return
    pair, other = self._pairs.pop(peer)
    del other._pairs[self.name]
    told = f"{self.name!r} is lost: {reason}"
    for (sender, transfer), found in pair.arrays.items():
      (self if sender == self.name else other)._returned(found)
      sending = sender == peer
      mine = found.data is not None if sending else found.expected is not None
      if mine and not found.dead and not (found.lent and not sending):
        other._emit(interface.ArrayFailed(self.name, transfer, sending, told))
    other._emit(interface.PeerLost(self.name, how, reason))

  def _try_dials(self) -> None:
    for peer, dial in list(self._dials.items()):
      found = self._hub.members.get(dial.address)
      if found is None:
        continue
      del self._dials[peer]
      if found.name != peer or found is self:
        reason = f"{found.name!r} is at the address of {peer!r}"
        self._emit(interface.PeerLost(peer, "refused", reason))
        continue
      dials = [dial, found._dials.pop(self.name, None)]
      pair = _Pair()
      self._pairs[peer], found._pairs[self.name] = (pair, found), (pair, self)
      self._emit(interface.PeerUp(peer, True))
      found._emit(interface.PeerUp(self.name, True))
      for waiting in [w for d in dials if d for w in d.waiting]:
        waiting()

  def _waits(self, peer: str, action: Callable[[], object]) -> bool:
    """Keeps what is to be done until the peer is up, if it is being dialed."""
    if peer in self._dials:
      self._dials[peer].waiting.append(action)
    return peer in self._dials

  def _begin(
    self, peer: str, sender: str, transfer: int, sending: bool
  ) -> _Array | None:
    self._check_open()
    if not 0 <= transfer < 2**63:
      raise ValueError(f"transfer must be from 0 to 2**63 - 1, got {transfer}.")
    if peer not in self._pairs:
      reason = f"{peer!r} is not connected"
      self._emit(interface.ArrayFailed(peer, transfer, sending, reason))
      return None
    arrays = self._pairs[peer][0].arrays
    found = arrays.setdefault((sender, transfer), _Array())
    if found.dead:
      del arrays[sender, transfer]
      reason = f"{peer!r} has given it up"
      self._emit(interface.ArrayFailed(peer, transfer, sending, reason))
      return None
    if (found.data if sending else found.expected) is not None:
      raise ValueError(f"Transfer {transfer} with {peer!r} is under way.")
    return found

  def _match(self, peer: str, transfer: int, sending: bool) -> None:
    """Hands the array over, if both halves are here."""
    pair, other = self._pairs[peer]
    sender, receiver = (self, other) if sending else (other, self)
    key = sender.name, transfer
    found = pair.arrays[key]
    if found.data is None or found.expected is None:
      return
    sent, expected = found.data.nbytes, found.expected
    if sent != expected:
      del pair.arrays[key]
      reason = f"{sent:,} bytes were sent where {expected:,} were expected"
      for one, two in ((sender, receiver), (receiver, sender)):
        one._emit(
          interface.ArrayFailed(two.name, transfer, one is sender, reason)
        )
    elif found.into is not None:
      np.copyto(np.frombuffer(found.into, np.uint8), _bytes(found.data))
      del pair.arrays[key]
      receiver._emit(interface.ArrayReceived(sender.name, transfer, found.into))
      sender._emit(interface.ArraySent(receiver.name, transfer))
    else:
      found.lent = True
      if found.region is not None:
        found.region.lent += 1
      receiver._lent[key] = pair
      data = found.data.toreadonly()
      receiver._emit(interface.ArrayReceived(sender.name, transfer, data))

  def _returned(self, found: _Array) -> None:
    if found.lent and found.region is not None:
      self._pool.returned(found.region)

  def _emit(self, event: interface.Event) -> None:
    self._events.append(event)
    self._changed.notify()

  def _check_open(self) -> None:
    if self._closed:
      raise RuntimeError("This transport is closed.")


def _bytes(data: memoryview) -> np.ndarray:
  return np.frombuffer(data, np.uint8)
