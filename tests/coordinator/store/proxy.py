"""A stretch of network between two processes, which a test cuts and slows."""

import contextlib
import selectors
import socket
import threading
import time


class Proxy:
  """Forwards TCP connections.

  Attributes:
    address: host:port where it listens.
    swallows: whether what comes back from the server is dropped.
    holds: whether it is kept until it isn't held any more.
    delay: seconds that everything takes on the way, in each direction.
    made: how many connections there were.
  """

  def __init__(self, target: str):
    host, _, port = target.rpartition(":")
    self._target = host, int(port)
    self._listener = socket.create_server(("127.0.0.1", 0))
    self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
    self.swallows, self.delay, self.made = False, 0.0, 0
    self.holds = False
    self._is_cut, self._closed = False, False
    self._lock = threading.Lock()
    self._open: set[socket.socket] = set()
    threading.Thread(target=self._accept, daemon=True).start()

  def _accept(self):
    while not self._closed:
      try:
        near, _ = self._listener.accept()
        if self._is_cut:
          near.close()
          continue
        far = socket.create_connection(self._target, 5.0)
      except OSError:
        if not self._closed:
          near.close()
        continue
      self.made += 1
      with self._lock:
        self._open |= {near, far}
      threading.Thread(
        target=self._forward, args=(near, far), daemon=True
      ).start()

  def _forward(self, near, far):
    with contextlib.suppress(OSError), near, far:
      self._carry(near, far)
    with self._lock:
      self._open -= {near, far}

  def _carry(self, near, far):
    kept = b""
    with selectors.DefaultSelector() as selector:
      selector.register(near, selectors.EVENT_READ, far)
      selector.register(far, selectors.EVENT_READ, near)
      while True:
        ready = selector.select(0.01 if kept else None)
        if kept and not self.holds:
          near.sendall(kept)
          kept = b""
        for key, _ in ready:
          data = key.fileobj.recv(1 << 16)
          if not data:
            return
          if self.delay:
            time.sleep(self.delay)
          back = key.fileobj is far
          if back and (self.holds or kept):
            kept += data  # What was kept goes first.
          elif not (back and self.swallows):
            key.data.sendall(data)

  def cut(self):
    """Resets all connections, and lets none be made."""
    self._is_cut = True
    with self._lock:
      for one in self._open:
        with contextlib.suppress(OSError):
          one.shutdown(socket.SHUT_RDWR)

  def mend(self):
    """Lets connections be made again."""
    self._is_cut = False

  def close(self):
    """Ends it."""
    self._closed = True
    with contextlib.suppress(OSError):
      self._listener.shutdown(socket.SHUT_RDWR)
    self._listener.close()
    self.cut()
