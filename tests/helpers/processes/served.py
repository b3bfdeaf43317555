"""A coordinator in a thread, at an address on loopback, with its log in memory."""

import contextlib
import threading

from optax_dist.coordinator.server import driver
from optax_dist.coordinator.transport import sockets

SECRET = b"0123456789abcdef"


@contextlib.contextmanager
def served(port=0):
  """The address of a coordinator, which says goodbye at the end."""
  transport = sockets.Transport(
    driver.NAME, secret=SECRET, bind="127.0.0.1", ports=[port]
  )
  ended = threading.Event()
  thread = threading.Thread(target=driver.serve, args=(transport, ended))
  thread.start()
  try:
    yield f"127.0.0.1:{transport.port}"
  finally:
    ended.set()
    transport.wake()
    thread.join(60.0)
