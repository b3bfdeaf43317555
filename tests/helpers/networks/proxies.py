"""A stretch of network between two processes, which a test cuts, holds and slows."""

import contextlib
import socket
import threading
import time

# The longest time that a slow network makes up for: it carries nothing while the
# process is stopped.
_LONGEST = 0.3


class Direction:
  """How one direction treats its bytes.

  Attributes:
    rate: bytes a second; None: as fast as it goes.
    delay: seconds that everything takes.
    held: whether nothing gets through, without a word to anyone.
    swallows: whether it is all taken, and gets nowhere.
    taken: all that went this way.
  """

  def __init__(self):
    self.rate, self.delay = None, 0.0
    self.held = self.swallows = False
    self.taken = bytearray()


class Proxy:
  """Carries bytes between those who connect here and a server.

  Whoever drives the transports calls `carry`; so no busy machine can let them run
  and stop the network between them. `threaded` has it called by a thread.

  Attributes:
    address: host:port, where to connect.
    there: the direction to the server.
    back: the direction from it.
    made: how many connections there were.
  """

  def __init__(self, target, clock=time.monotonic):
    """Listens.

    Args:
      target: host:port of the server.
      clock: the seconds of rates and delays.
    """
    host, _, port = target.rpartition(":")
    self._target, self._clock = (host, int(port)), clock
    self.there, self.back, self.made = Direction(), Direction(), 0
    self._listener = socket.create_server(("127.0.0.1", 0))
    self._listener.setblocking(False)
    self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
    self._pairs = []
    self._is_cut = False
    self._carried = clock()
    self._lock = threading.Lock()

  def carry(self):
    """Takes what is there, and passes on what there is room for."""
    with self._lock:
      now = self._clock()
      elapsed = min(now - self._carried, _LONGEST)
      if any(d.rate and d.rate * elapsed < 1 for d in (self.there, self.back)):
        return
      self._carried = now
      with contextlib.suppress(OSError):
        while True:
          self._accept(self._listener.accept()[0])
      for pair in list(self._pairs):
        intact = [way.carry(now, elapsed) for way in pair]
        if not all(intact) or all(way.ended for way in pair):
          self._close(pair)

  def _accept(self, near):
    if self._is_cut:
      near.close()
      return
    try:
      # The kernel accepts it; the server may do so later.
      far = socket.create_connection(self._target, 60.0)
    except OSError:
      near.close()
      return
    self.made += 1
    self._pairs.append(
      (_Way(near, far, self.there), _Way(far, near, self.back))
    )

  def _close(self, pair):
    self._pairs.remove(pair)
    for way in pair:
      with contextlib.suppress(OSError):
        way.source.shutdown(socket.SHUT_RDWR)
      way.source.close()

  def cut(self):
    """Ends all connections, and lets none be made."""
    with self._lock:
      self._is_cut = True
      for pair in list(self._pairs):
        self._close(pair)

  def close(self):
    """Ends it."""
    self.cut()
    self._listener.close()


@contextlib.contextmanager
def threaded(target):
  """A proxy that a thread drives."""
  made, ended = Proxy(target), threading.Event()

  def drive():
    while not ended.wait(0.001):
      made.carry()

  thread = threading.Thread(target=drive, daemon=True)
  thread.start()
  try:
    yield made
  finally:
    ended.set()
    thread.join(60.0)
    made.close()


class _Way:
  """One direction of a connection."""

  def __init__(self, source, target, direction):
    self.source, self._target, self._direction = source, target, direction
    self._data, self._due = b"", 0.0
    self.ended = False
    source.setblocking(False)

  def carry(self, now, elapsed):
    """Carries what there is; returns False once the connection is broken."""
    direction = self._direction
    if self.ended or direction.held:
      return True
    most = int(direction.rate * elapsed) if direction.rate else 1 << 16
    try:
      if not self._data:
        taken = self.source.recv(most)
        direction.taken += taken
        self.ended = not taken
        if self.ended:
          self._target.shutdown(socket.SHUT_WR)
        elif not direction.swallows:
          self._data, self._due = taken, now + direction.delay
      if self._data and now >= self._due:
        self._data = self._data[self._target.send(self._data) :]
    except BlockingIOError:
      pass
    except OSError:
      return False
    return True
