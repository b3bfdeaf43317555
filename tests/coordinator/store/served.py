"""A store server in a thread, and clients of it."""

import collections
import itertools
import threading

import owners

from optax_dist.coordinator.store import (
  client,
  interface,
  server,
  table,
  wire,
)
from optax_dist.coordinator.transport import interface as transports
from optax_dist.coordinator.transport import sockets

SECRET = b"0123456789abcdef"
# With these, nobody is lost within the time of a test.
PATIENT = transports.Limits(
  heartbeat=0.1, silence=transports.fixed(200.0), connect=100.0, handshake=100.0
)
QUICK = transports.Limits(
  heartbeat=0.1, silence=transports.fixed(0.6), connect=0.5, handshake=1.0
)


class Driven:
  """A client of a store process, with a thread as a replica's event loop.

  See `interface.Store`; its owner is another thread.
  """

  def __init__(self, transport, address, wake=lambda: None):
    self._transport, self._wake = transport, wake
    self._client = client.StoreClient(transport, address)
    self.address = self._client.address
    self._asked, self._events = collections.deque(), collections.deque()
    self._closed = False
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._thread.start()

  def ask(self, request, timeout):
    interface.check(request)
    self._asked.append((request, timeout))
    self._transport.wake()

  def deadline(self):
    return None

  def poll(self):
    return [self._events.popleft() for _ in range(len(self._events))]

  def close(self):
    self._closed = True
    self._transport.wake()
    self._thread.join(60.0)

  def _run(self):
    while not self._closed:
      for event in self._transport.poll(self._client.deadline()):
        assert self._client.handle(event)
      while self._asked:
        self._client.ask(*self._asked.popleft())
      events = self._client.poll()
      if events:
        self._events.extend(events)
        self._wake()
    self._client.close()
    self._transport.close()


class Served:
  """A server that listens on loopback.

  Attributes:
    server: its part that answers.
    address: host:port where it listens.
  """

  def __init__(self, quota=table.QUOTA, port=0, limits=PATIENT):
    self._limits = limits
    self._transport = sockets.Transport(
      wire.STORE,
      secret=SECRET,
      bind="127.0.0.1",
      ports=[port],
      limits=limits,
    )
    self.port = self._transport.port
    self.address = f"127.0.0.1:{self.port}"
    self.server = server.StoreServer(self._transport, quota)
    self._ended, self._rude = threading.Event(), False
    self._clients = []
    self._numbers = itertools.count()
    self._thread = threading.Thread(target=self._serve)
    self._thread.start()

  def _serve(self):
    while not self._ended.is_set():
      self.server.poll(None)
    if not self._rude:
      self.server.close()

  def connect(self, name, wake, address=None, secret=SECRET):
    """A client, perhaps over another way or with another secret."""
    transport = sockets.Transport(name, secret=secret, limits=self._limits)
    return Driven(transport, address or self.address, wake)

  def owner(self, address=None, **options):
    """An owner of a client of the server."""
    name = f"client{next(self._numbers)}"
    made = owners.Owner(
      lambda wake: self.connect(name, wake, address, **options)
    )
    self._clients.append(made.store)
    return made

  def stop(self, rudely=False):
    """Ends the server; rudely: as a process that is killed."""
    self._rude = rudely
    self._ended.set()
    self._transport.wake()
    self._thread.join(60.0)
    if rudely:
      self._transport._in_child()  # Closes everything without a goodbye.
    return self.port

  def close(self):
    """Ends the clients and the server."""
    for one in self._clients:
      one.close()
    if not self._ended.is_set():
      self.stop()
