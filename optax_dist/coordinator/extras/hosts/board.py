"""Writes a launcher's notice to the job's store, and reads the others'."""

from __future__ import annotations

import itertools
import logging
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
_PAUSE = 0.2  # Seconds between two rounds of writes and reads.


class Board:
  """One launcher's notice board; only `close` ever waits.

  It writes its notice, reads those of the others, and begins again once all
  that was answered.

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
  ):
    """Starts to connect.

    Args:
      place: address of the store.
      secret: the job's secret.
      run: the name of the run, if several share the store.
      host: the index of this host.
      hosts: the hosts whose notices are read.
    """
    self._place, self._secret, self._host = place, secret, host
    self._keys = {h: f"{endpoint.key_prefix(run)}launch/{h}" for h in hosts}
    self._numbers = itertools.count()
    self._notice: notices.Notice | None = None
    # How often the notice was written, and the last time that succeeded.
    self._beat = self._written = 0
    self.trouble, self.reached = "", False
    self._connect()

  def publish(self, notice: notices.Notice) -> None:
    """Sets the notice that is written from now on."""
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
      pause = self._again_at - time.monotonic()
      if pause > 0:
        time.sleep(min(pause, timeout))
        return []
      self._connect()
    assert self._store is not None
    if not self._open and time.monotonic() >= self._again_at:
      self._ask(self._store)
    for what in self._transport.poll(timeout):
      self._store.handle(what)
    found: list[tuple[int, notices.Notice | None]] = []
    for event in self._store.poll():
      if isinstance(event, interface.StoreLost):
        self._lose(event.reason)
        break
      host = self._open.pop(event.request)
      self.reached |= not isinstance(event, interface.Unknown)
      match event:
        case interface.Unknown():
          self.trouble = event.reason
        case interface.Done():
          self._written = self._beat
        case interface.Value(_, value):
          self.trouble = ""
          try:
            notice = None if value is None else notices.CODEC.decode(value)
            found.append((host, notice))
          except codec.BadMessage as error:
            self.trouble = f"the notice of host {host} can't be read: {error}"
    return found

  def close(self, timeout: float) -> None:
    """Writes the last notice once more, and closes the board.

    Args:
      timeout: seconds to wait for that.
    """
    end = time.monotonic() + timeout
    # Once more: a notice that never changes could be of an earlier launch.
    before = self._beat
    while self._notice and self._written <= before and time.monotonic() < end:
      self.poll(0.05)
    if self._store is not None:
      self._store.close()
      self._transport.flush()
      self._transport.close()

  def _connect(self) -> None:
    name = endpoint.process_name(f"launcher-{self._host}")
    self._transport = sockets.Transport(name, secret=self._secret)
    self._store: interface.Store | None = endpoint.open_store(
      self._place, self._transport, self._secret
    )
    # The requests without an answer so far, each with the host whose notice it
    # writes or reads, and when the next ones follow.
    self._open: dict[int, int] = {}
    self._again_at = 0.0

  def _lose(self, reason: str) -> None:
    if reason != self.trouble:
      _log.warning("the launcher has lost the store: %s", reason)
    assert self._store is not None
    self._store.close()
    self._transport.close()
    self._store, self.trouble = None, reason
    self._again_at = time.monotonic() + _AGAIN

  def _ask(self, store: interface.Store) -> None:
    """Writes the notice, and reads all others."""
    self._again_at = time.monotonic() + _PAUSE
    if self._notice is not None:
      self._beat += 1
      value = notices.CODEC.encode(codec.replace(self._notice, beat=self._beat))
      number = next(self._numbers)
      self._open[number] = self._host
      put = interface.Put(number, self._keys[self._host], value)
      store.ask(put, _TIMEOUT)
    for host, key in self._keys.items():
      number = next(self._numbers)
      self._open[number] = host
      store.ask(interface.Get(number, key), _TIMEOUT)
