"""Writes a launcher's notice to the job's store, and reads the others'."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable

from optax_dist.coordinator.extras.hosts import notices
from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.runtime import endpoint
from optax_dist.coordinator.store import interface, urls
from optax_dist.coordinator.transport import sockets

_log = logging.getLogger("optax_dist.coordinator")

_TIMEOUT = 5.0  # For a request; it is repeated then.
_AGAIN = 1.0  # Before reconnecting to a lost store.


class Board:
  """One launcher's notice board; only `close` ever waits.

  Attributes:
    trouble: why the store can't be read; "" while it can.
    reached: whether the store has ever answered.
  """

  def __init__(
    self,
    place: urls.Place,
    secret: bytes,
    run: str,
    host: int,
    hosts: Iterable[int],
    *,
    beat: float = 0.5,
    pause: float = 0.2,
  ):
    """Starts to connect.

    Args:
      place: address of the store.
      secret: the job's secret.
      run: the name of the run, if several share the store.
      host: the index of this host.
      hosts: the hosts whose notices are read.
      beat: seconds after which a notice is written again, with a new beat.
      pause: seconds between two reads of another host's notice.
    """
    self._place, self._secret, self._host = place, secret, host
    self._keys = {h: f"{endpoint.key_prefix(run)}launch/{h}" for h in hosts}
    self._beat, self._pause = beat, pause
    self._notice: notices.Notice | None = None
    self._written: notices.Notice | None = None
    self._beats = 0
    self._write_at = -math.inf
    self._read_at = dict.fromkeys(self._keys, -math.inf)
    self._next = 0
    # Open requests: the host whose notice is read, or None for a write.
    self._asked: dict[int, int | None] = {}
    self.trouble, self.reached = "", False
    self._connect()

  def publish(self, notice: notices.Notice) -> None:
    """Writes a notice as soon as possible."""
    self._notice = notice

  def poll(
    self, timeout: float = 0.0
  ) -> list[tuple[int, notices.Notice | None]]:
    """Makes progress, and returns the notices that were read.

    Args:
      timeout: seconds to wait for an answer.

    Returns:
      The hosts whose notices were read, each with its notice, or None if it has
      not written one.
    """
    if self._store is None:
      pause = self._connect_at - time.monotonic()
      if pause > 0:
        time.sleep(min(pause, timeout))
        return []
      self._connect()
    assert self._store is not None
    self._ask()
    for what in self._transport.poll(timeout):
      self._store.handle(what)
    found: list[tuple[int, notices.Notice | None]] = []
    for event in self._store.poll():
      if isinstance(event, interface.StoreLost):
        self._lose(event.reason)
        break
      host = self._asked.pop(event.request, None)
      self.reached |= not isinstance(event, interface.Unknown)
      match event:
        case interface.Unknown() | interface.Refused():
          self.trouble = event.reason
          if host is None:
            self._written = None  # Write it once more.
        case interface.Absent() if host is not None:
          self.trouble = ""
          found.append((host, None))
        case interface.Value() if host is not None:
          self.trouble = ""
          try:
            found.append((host, notices.CODEC.decode(event.value)))
          except codec.BadMessage as error:
            self.trouble = f"the notice of host {host} can't be read: {error}"
    return found

  def close(self, timeout: float) -> bool:
    """Writes the last notice once more, and closes the board.

    Args:
      timeout: seconds to wait for that.

    Returns:
      Whether it was written.
    """
    end = time.monotonic() + timeout
    # Once more: a notice that never changes could be of an earlier launch.
    self._written = None
    while not (done := self._is_written()) and time.monotonic() < end:
      self.poll(0.05)
      if self._store is None:
        time.sleep(0.05)
    if self._store is not None:
      self._store.close()
      self._transport.flush()
      self._transport.close()
    return done

  def _connect(self) -> None:
    name = endpoint.process_name(f"launcher-{self._host}")
    self._transport = sockets.Transport(name, secret=self._secret)
    self._store: interface.Store | None = endpoint.open_store(
      self._place, self._transport, self._secret
    )
    self._asked.clear()
    # Nothing is written in the new store yet.
    self._written, self._write_at = None, -math.inf

  def _lose(self, reason: str) -> None:
    _log.warning("the launcher has lost the store: %s", reason)
    assert self._store is not None
    self._store.close()
    self._transport.close()
    self._store, self.trouble = None, reason
    self._connect_at = time.monotonic() + _AGAIN

  def _is_written(self) -> bool:
    return self._notice == self._written and None not in self._asked.values()

  def _ask(self) -> None:
    now = time.monotonic()
    due = self._notice != self._written or now >= self._write_at
    # One write at a time, so that an older one can't arrive later.
    if self._notice is not None and due and None not in self._asked.values():
      self._beats += 1
      beating = codec.replace(self._notice, beat=self._beats)
      value = notices.CODEC.encode(beating)
      self._request(interface.Put(self._next, self._keys[self._host], value))
      self._written, self._write_at = self._notice, now + self._beat
    for host, key in self._keys.items():
      if now >= self._read_at[host] and host not in self._asked.values():
        self._read_at[host] = now + self._pause
        self._request(interface.Get(self._next, key), host)

  def _request(
    self, request: interface.Put | interface.Get, host: int | None = None
  ) -> None:
    assert self._store is not None
    self._asked[request.request] = host
    self._next += 1
    self._store.ask(request, _TIMEOUT)
