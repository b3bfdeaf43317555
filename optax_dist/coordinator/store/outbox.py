"""What a store's client has to tell: from its own thread to its owner's."""

from __future__ import annotations

import collections

from optax_dist.coordinator.store import interface


class Outbox:
  """Events between two threads.

  Example:
    >>> outbox = Outbox(lambda: None)
    >>> outbox.watches.add(1)
    >>> outbox.tell(interface.Current(1))
    >>> outbox.tell(interface.Current(2))
    >>> outbox.poll()
    [Current(watch=1)]

  Attributes:
    watches: the numbers of the watches that have not ended.
  """

  def __init__(self, wake: interface.Wake):
    """An empty one; `wake` is called whenever something is told."""
    self.watches: set[int] = set()
    self._wake = wake
    self._events: collections.deque[interface.Event] = collections.deque()
    self._lost = False

  def tell(self, event: interface.Event) -> None:
    """Has an event polled; nothing comes after a `StoreLost`."""
    if not self._lost:
      self._lost = isinstance(event, interface.StoreLost)
      self._events.append(event)
      self._wake()

  def poll(self) -> list[interface.Event]:
    """The events since it was last called, but for those of ended watches."""
    found = []
    while self._events:
      event = self._events.popleft()
      match event:
        case interface.Changed(watch) | interface.Current(watch):
          if watch not in self.watches:
            continue
      found.append(event)
    return found
