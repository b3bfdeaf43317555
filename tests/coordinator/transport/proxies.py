"""A network that can be slow, hold everything back, or be cut."""

import contextlib
import socket
import threading
import time


class Proxy:
  """Carries bytes between whoever connects here and a port of loopback.

  Attributes:
    address: where to connect.
    rate: bytes a second in each direction; None: as fast as it goes.
    held: whether nothing gets through, without a word to anyone.
    recorded: what those who connected have said.
  """

  def __init__(self, port, host="127.0.0.1"):
    self._target = host, port
    self.rate = None
    self.held = False
    self.recorded = b""
    self._sockets = []
    self._closed = False
    self._listener = socket.create_server(("127.0.0.1", 0))
    self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
    self._threads = []
    self._start(self._accept)

  def _start(self, target, *args):
    thread = threading.Thread(target=target, args=args, daemon=True)
    self._threads.append(thread)
    thread.start()

  def _accept(self):
    with contextlib.suppress(OSError):
      while True:
        one, _ = self._listener.accept()
        other = socket.create_connection(self._target)
        self._sockets += [one, other]
        self._start(self._carry, one, other, True)
        self._start(self._carry, other, one, False)

  def _carry(self, source, target, record):
    with contextlib.suppress(OSError):
      while data := source.recv(4096 if self.rate else 1 << 16):
        if record:
          self.recorded += data
        while self.held and not self._closed:
          time.sleep(0.005)
        if self.rate:
          time.sleep(len(data) / self.rate)
        target.sendall(data)
    with contextlib.suppress(OSError):
      target.shutdown(socket.SHUT_WR)

  def cut(self):
    """Ends all connections."""
    for sock in self._sockets:
      with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
      sock.close()
    self._sockets.clear()

  def close(self):
    self._closed = True
    with contextlib.suppress(OSError):
      self._listener.shutdown(socket.SHUT_RDWR)
    self._listener.close()
    self.cut()
    for thread in self._threads:
      thread.join(60)
