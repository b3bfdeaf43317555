"""The store for replicas that are threads of one process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from optax_dist.coordinator.store import interface, outbox, table


class InProcessStore:
  """What the clients of one process share.

  Example:
    >>> store = InProcessStore()
    >>> one, two = store.connect("one"), store.connect("two")
    >>> one.ask(interface.PutIfAbsent(0, "log/0", b"mine"), timeout=1.0)
    >>> two.ask(interface.PutIfAbsent(0, "log/0", b"yours"), timeout=1.0)
    >>> one.poll(), two.poll()
    ([Done(request=0)], [Conflict(request=0, value=b'mine')])
  """

  def __init__(self, quota: table.Quota | None = None):
    """An empty store."""
    self._lock = threading.Lock()
    self._table = table.Table(quota)
    self.clients: set[InProcessClient] = set()
    self.to_wake: set[interface.Wake] = set()

  def connect(
    self, name: str, wake: interface.Wake = lambda: None
  ) -> InProcessClient:
    """A client; its name is that of whose quota it uses."""
    return InProcessClient(self, name, wake)

  @contextlib.contextmanager
  def changing(self) -> Iterator[table.Table]:
    """Locks it; those for whom there is something to poll are woken after it."""
    with self._lock:
      yield self._table
      woken, self.to_wake = self.to_wake, set()
    for wake in woken:
      wake()


class InProcessClient:
  """A client of an `InProcessStore`; see `interface.Store`."""

  address = "in-process"

  def __init__(self, store: InProcessStore, name: str, wake: interface.Wake):
    self._store, self._name, self._wake = store, name, wake
    # Its owner is woken when the lock is free again.
    self._outbox = outbox.Outbox(lambda: None)
    self._watches: dict[int, str] = {}
    with store.changing():
      store.clients.add(self)

  def ask(self, request: interface.Request, timeout: float) -> None:
    interface.check(request)
    with self._store.changing() as values:
      before = values.revision
      self._tell(values.answer(self._name, request))
      if values.revision == before:
        return
      assert isinstance(request, interface.PutIfAbsent | interface.Put)
      for client in self._store.clients:
        for watch, prefix in client._watches.items():
          if table.under(prefix, request.key):
            told = interface.Changed(watch, request.key, request.value)
            client._tell(told)

  def watch(self, watch: int, prefix: str) -> None:
    interface.check_key(prefix)
    with self._store.changing() as values:
      self._outbox.watches.add(watch)
      for key, entry in values.since(prefix, 0):
        self._tell(interface.Changed(watch, key, entry.value))
      self._tell(interface.Current(watch))
      self._watches[watch] = prefix

  def unwatch(self, watch: int) -> None:
    with self._store.changing():
      self._outbox.watches.discard(watch)
      self._watches.pop(watch, None)

  def poll(self) -> list[interface.Event]:
    return self._outbox.poll()

  def close(self) -> None:
    with self._store.changing():
      self._store.clients.discard(self)

  def _tell(self, event: interface.Event) -> None:
    self._outbox.tell(event)
    self._store.to_wake.add(self._wake)
