"""A client of a store process, which outlives every cut of its connection."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable

from optax_dist.coordinator.store import interface, outbox, wire
from optax_dist.coordinator.transport import interface as transports

_log = logging.getLogger("optax_dist.coordinator")
_PAUSES = (0.05, 0.3)  # Before it connects again, from and to.


@dataclasses.dataclass
class _Pending:
  request: interface.Request
  number: int  # Of the caller's.
  began: float
  timeout: float


@dataclasses.dataclass
class _Watch:
  prefix: str
  revision: int = 0


class StoreClient:
  """A client of a store process; see `interface.Store`.

  Requests that have no answer when a connection breaks are sent again over the
  next one, in their order, until their timeouts are over.
  """

  def __init__(
    self,
    transport: transports.Transport,
    address: str,
    wake: interface.Wake = lambda: None,
  ):
    """Begins to connect, in a thread of its own.

    Args:
      transport: with the name of this process, the job's secret and its run; it
        is the client's from now on.
      address: where the store listens, as `transport.connect` takes it.
      wake: called from any thread when there is something to poll.

    Raises:
      ValueError: the address is not one.
    """
    self.address = f"tcp://{address}"
    self._transport, self._where = transport, address
    self._outbox = outbox.Outbox(wake)
    self._asked: collections.deque[Callable[[], None]] = collections.deque()
    self._numbers = itertools.count()
    self._pending: dict[int, _Pending] = {}
    self._watches: dict[int, _Watch] = {}
    self._store = ""
    self._up = self._closed = False
    self._connect_at, self._pause = float("inf"), _PAUSES[0]
    self._detail = "not connected yet"
    transport.connect(wire.STORE, address)
    self._thread = threading.Thread(
      target=self._run, name="optax-dist-store", daemon=True
    )
    self._thread.start()

  # What its owner calls.

  def ask(self, request: interface.Request, timeout: float) -> None:
    interface.check(request)
    # Its own number, for the caller may use the same again after an `Unknown`.
    number = next(self._numbers)
    numbered = dataclasses.replace(request, request=number)
    made = _Pending(numbered, request.request, time.monotonic(), timeout)

    def begin() -> None:
      self._pending[number] = made
      if self._up:
        self._send(numbered)

    self._do(begin)

  def watch(self, watch: int, prefix: str) -> None:
    interface.check_key(prefix)
    self._outbox.watches.add(watch)

    def begin() -> None:
      self._watches[watch] = _Watch(prefix)
      if self._up:
        self._send(wire.Watch(watch, prefix, 0))

    self._do(begin)

  def unwatch(self, watch: int) -> None:
    self._outbox.watches.discard(watch)

    def end() -> None:
      if self._watches.pop(watch, None) and self._up:
        self._send(wire.Unwatch(watch))

    self._do(end)

  def poll(self) -> list[interface.Event]:
    return self._outbox.poll()

  def close(self) -> None:
    self._closed = True
    self._do(lambda: None)
    self._thread.join(5.0)

  def _do(self, action: Callable[[], None]) -> None:
    self._asked.append(action)
    self._transport.wake()

  # Its thread.

  def _run(self) -> None:
    try:
      while not self._closed:
        self._turn()
    except Exception as error:
      _log.exception("the client of the store at %s failed", self.address)
      self._lose(repr(error))
    finally:
      self._transport.close()

  def _turn(self) -> None:
    for event in self._transport.poll(self._check(time.monotonic())):
      match event:
        case transports.PeerLost(wire.STORE, how, reason):
          self._disconnected(how, reason)
        case transports.Message(wire.STORE, payload):
          self._receive(wire.REPLIES.decode(payload))
    while self._asked:
      self._asked.popleft()()

  def _check(self, now: float) -> float | None:
    """Does what is due; returns the seconds until something else is."""
    next_at = self._connect_at
    if now >= next_at:
      self._connect_at = next_at = float("inf")
      self._transport.connect(wire.STORE, self._where)
    for number, pending in list(self._pending.items()):
      end = pending.began + pending.timeout
      if now < end:
        next_at = min(next_at, end)
        continue
      del self._pending[number]
      reason = (
        f"{interface.describe(pending.request)} at {self.address}: no answer in"
        f" {now - pending.began:.1f} s ({self._detail})"
      )
      self._outbox.tell(interface.Unknown(pending.number, reason))
    return None if next_at == float("inf") else next_at - now

  def _receive(self, reply: wire.Reply) -> None:
    match reply:
      case wire.Welcome(store):
        if self._store not in ("", store):
          self._lose("it was started anew, and what it knew is gone")
          return
        self._store, self._up, self._pause = store, True, _PAUSES[0]
        self._detail = "connected"
        for watch, known in self._watches.items():
          self._send(wire.Watch(watch, known.prefix, known.revision))
        for pending in self._pending.values():
          self._send(pending.request)
      case wire.Told(watch, revision, key, value):
        if watch in self._watches:
          self._watches[watch].revision = revision
          self._outbox.tell(interface.Changed(watch, key, value))
      case interface.Current():
        self._outbox.tell(reply)
      case _:
        asked = self._pending.pop(reply.request, None)
        if asked is not None:
          answer = dataclasses.replace(reply, request=asked.number)
          self._outbox.tell(answer)

  def _disconnected(self, how: transports.How, reason: str) -> None:
    self._up = False
    self._detail = f"not connected: {reason}"
    if how in ("left", "refused"):
      self._lose(reason)
    elif how != "replaced":
      self._connect_at = time.monotonic() + self._pause
      self._pause = min(2 * self._pause, _PAUSES[1])

  def _send(self, message: wire.Request) -> None:
    self._transport.send(wire.STORE, wire.REQUESTS.parts(message))

  def _lose(self, reason: str) -> None:
    self._outbox.tell(interface.StoreLost(f"{self.address}: {reason}"))
    self._closed = True
