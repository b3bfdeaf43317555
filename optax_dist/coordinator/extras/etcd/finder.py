"""How a member finds its coordinator, and notices that another one is it now."""

from __future__ import annotations

import threading
from collections.abc import Callable

from optax_dist.coordinator.extras.etcd import client, keys, lease
from optax_dist.coordinator.extras.etcd.keys import Etcd
from optax_dist.coordinator.transport import handshake

# Seconds that a look-up may take, and between two of them while all is well.
_REQUEST_SECONDS, _WATCH_SECONDS = 5.0, 1.0


class Finder:
  """Asks etcd for the coordinator's address, from any thread.

  A host that has vanished closes no connection, so the lease's holder is asked again
  and again.
  """

  def __init__(
    self, where: Etcd, secret: bytes, wake: Callable[[], None] = lambda: None
  ):
    """Asks nothing yet.

    Args:
      where: the keys.
      secret: the job's.
      wake: called from another thread when the coordinator is elsewhere than
        `find` has said last.

    Raises:
      ValueError: a certificate can't be used.
    """
    self._where, self._secret, self._wake = where, secret, wake
    # The client of the watching thread.
    self._client = client.Client(where)
    # The last address that `find` has returned.
    self._address = ""
    self._moved = False
    self._closed = threading.Event()
    self._thread: threading.Thread | None = None

  def find(self) -> str:
    """The address of the coordinator at present.

    Raises:
      ValueError: it is not known; the message says why.
      handshake.Refused: it can't be known, and asking again won't help.
    """
    with client.Client(self._where) as asks:
      self._address, self._moved = self._ask(asks), False
    if self._thread is None:
      self._thread = threading.Thread(
        target=self._watch, name="optax-dist-finder", daemon=True
      )
      self._thread.start()
    return self._address

  def has_moved(self) -> bool:
    """Whether it is elsewhere than `find` has said; true once for each time."""
    moved, self._moved = self._moved, False
    return moved

  def close(self) -> None:
    """Stops asking."""
    self._closed.set()

  def _ask(self, asks: client.Client) -> str:
    where = self._where
    try:
      pair = asks.get(where.holder_key, _REQUEST_SECONDS)
      if pair is None:
        raise ValueError(f"no coordinator has the lease in {where}")
      holder = lease.holder_of(where, self._secret, pair)
    except (client.Rejected, keys.Foreign) as error:
      raise handshake.Refused(str(error)) from None
    except client.NoAnswer as error:
      raise ValueError(str(error)) from None
    if not holder.address:
      raise ValueError(f"the coordinator in {where} still reads its log")
    return holder.address

  def _watch(self) -> None:
    with self._client as asks:
      while not self._closed.wait(_WATCH_SECONDS):
        known = self._address
        try:
          address = self._ask(asks)
        except (ValueError, handshake.Refused):
          continue  # The connection may be good, whatever etcd does.
        if address != known == self._address:
          self._moved = True
          self._wake()
