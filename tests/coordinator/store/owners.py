"""A thread that owns a client of a store, and waits for what it tells."""

import threading
import time

import waiting

from optax_dist.coordinator.store import interface

# For answers that come; a test that waits for none says for how long.
_TIMEOUT, _PATIENCE = 200.0, 240.0
_REQUESTS = {
  "put_if_absent": interface.PutIfAbsent,
  "put": interface.Put,
  "get": interface.Get,
  "delete": lambda number, keys: interface.Delete(number, tuple(keys)),
}


class Owner:
  """Asks, waits for the answer, and keeps everything else.

  Attributes:
    store: the client.
    events: all events so far, answers included.
  """

  def __init__(self, connect):
    """Connects; `connect` makes a client, given its `wake`."""
    self._woken = threading.Event()
    self._number = 0
    self.events = []
    self.store = connect(self._woken.set)

  def wait_for(self, found, seconds=_PATIENCE):
    """Polls until `found(events)` is true, and returns that."""
    end = time.monotonic() + seconds
    while not (result := found(self.events)):
      left = end - time.monotonic()
      assert left > 0, f"not after {seconds} s; events: {self.events[-5:]}"
      self._poll(left)
    return result

  def lost(self):
    """Waits until it is told that the store is lost; returns why."""
    losses = lambda events: [
      e for e in events if isinstance(e, interface.StoreLost)
    ]
    return self.wait_for(losses)[0].reason

  def wait_for_value(self, key, value, seconds=_PATIENCE):
    """Asks again and again, until a key has a value."""
    waiting.until(
      lambda: self.get(key) == value,
      lambda: f"{key} is {self.get(key)!r}",
      seconds,
    )

  def wait_long(self, seconds):
    """Polls for a while; returns what came in it."""
    before = len(self.events)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
      self._poll(left)
    return self.events[before:]

  def _poll(self, seconds):
    """Waits for events, or for as long."""
    soon = self.store.deadline()
    self._woken.wait(seconds if soon is None else min(seconds, soon))
    self._woken.clear()
    self.events += self.store.poll()

  def begin(self, what, *args, timeout=_TIMEOUT):
    """Makes a request; returns its number."""
    self._number += 1
    request = _REQUESTS[what](self._number, *args)
    self.store.ask(request, timeout=timeout)
    return self._number

  def answer(self, number, seconds=_PATIENCE):
    """Waits for the answer to a request."""

    def found(events):
      return [e for e in events if getattr(e, "request", None) == number]

    return self.wait_for(found, seconds)[0]

  def ask(self, what, *args, timeout=_TIMEOUT):
    """Makes a request, and waits for its answer."""
    return self.answer(self.begin(what, *args, timeout=timeout))

  def get(self, key):
    """A key's value, or None if it has none."""
    answer = self.ask("get", key)
    assert isinstance(answer, interface.Value), answer
    return answer.value
