"""A network that can be slow, hold everything back, or be cut."""

import contextlib
import socket
import time

# The longest time that a slow network makes up for: it carries nothing while the
# process is stopped.
_LONGEST = 0.3


class Proxy:
  """Carries bytes between whoever connects here and a port of loopback.

  It has no thread: whoever drives the transports calls `carry`. So no busy
  machine can let them run and stop the network between them.

  Attributes:
    address: where to connect.
    rate: bytes a second in each direction; None: as fast as it goes.
    held: whether nothing gets through, without a word to anyone.
    swallows: whether it is all taken, and gets nowhere.
    recorded: what those who connected have said.
  """

  def __init__(self, port, host="127.0.0.1", clock=time.monotonic):
    self._target = host, port
    self._clock = clock
    self.rate = None
    self.held = self.swallows = False
    self.recorded = b""
    self._ways, self._near = [], set()
    self._listener = socket.create_server(("127.0.0.1", 0))
    self._listener.setblocking(False)
    self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
    self._carried = clock()

  def carry(self):
    """Takes what is there, and passes on what there is room for."""
    now = self._clock()
    most = 1 << 16
    if self.rate:
      most = int(self.rate * min(now - self._carried, _LONGEST))
      if not most:
        return
    self._carried = now
    with contextlib.suppress(BlockingIOError):
      while True:
        one, _ = self._listener.accept()
        # The kernel accepts it; the transport may do so later.
        other = socket.create_connection(self._target, 60.0)
        self._ways += [_Way(one, other), _Way(other, one)]
        self._near.add(one)
    if self.held:
      return
    for way in self._ways:
      taken = way.carry(most, self.swallows)
      if way.source in self._near:
        self.recorded += taken

  def cut(self):
    """Ends all connections."""
    for way in self._ways:
      with contextlib.suppress(OSError):
        way.source.shutdown(socket.SHUT_RDWR)
      way.source.close()
    self._ways.clear()
    self._near.clear()

  def close(self):
    self._listener.close()
    self.cut()


class _Way:
  """One direction of a connection."""

  def __init__(self, source, target):
    self.source, self.target = source, target
    self._data = b""
    self._ended = False
    source.setblocking(False)

  def carry(self, most, swallows):
    """Carries up to so many bytes; returns what it has taken."""
    if self._ended:
      return b""
    taken = b""
    try:
      if not self._data:
        taken = self._data = self.source.recv(most)
        if swallows:
          self._data = b""
          return taken
        self._ended = not taken
      if self._ended:
        self.target.shutdown(socket.SHUT_WR)
      else:
        self._data = self._data[self.target.send(self._data) :]
    except BlockingIOError:
      pass
    except OSError:
      self._ended = True
    return taken
