"""The store for replicas that are threads of one process."""

from __future__ import annotations

import collections
import threading

from optax_dist.coordinator.store import interface, table


class InProcessStore:
  """A store shared by the clients of one process.

  Example:
    >>> store = InProcessStore()
    >>> one, two = store.connect("one"), store.connect("two")
    >>> one.ask(interface.PutIfAbsent(0, "log/0", b"mine"), timeout=1.0)
    >>> two.ask(interface.PutIfAbsent(0, "log/0", b"yours"), timeout=1.0)
    >>> one.poll(), two.poll()
    ([Done(request=0)], [Conflict(request=0, value=b'mine')])
  """

  def __init__(self) -> None:
    """Creates an empty store."""
    self.lock = threading.Lock()
    self.table = table.Table()

  def connect(self, name: str) -> InProcessClient:
    """Creates a client; its name determines whose quota it uses."""
    return InProcessClient(self, name)


class InProcessClient(interface.Store):
  """A client of an `InProcessStore`; see `interface.Store`."""

  def __init__(self, store: InProcessStore, name: str):
    self._store, self._name = store, name
    self._answers: collections.deque[interface.Event] = collections.deque()

  def ask(self, request: interface.Request, timeout: float) -> None:
    interface.check(request)
    with self._store.lock:
      self._answers.append(self._store.table.answer(self._name, request))

  def deadline(self) -> float | None:
    return 0.0 if self._answers else None

  def poll(self) -> list[interface.Event]:
    events = list(self._answers)
    self._answers.clear()
    return events
