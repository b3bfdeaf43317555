"""The channel of a process that tests start, give work to, and end."""

import contextlib
import ctypes
import faulthandler
import json
import os
import queue
import signal
import threading

from optax_dist.coordinator.launch import channel

_PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "OPTAX_DIST_TEST_PARENT"


class WorkerChannel(channel.Channel):
  """Also receives; and ends the process with its parent, even a stopped one."""

  def __init__(self):
    super().__init__()
    self._received = queue.Queue()
    # Also works while native code holds the interpreter lock.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # A stopped process can't notice that its socket was closed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None and int(parent) != os.getppid():
      os._exit(1)
    threading.Thread(target=self._read, name="launcher", daemon=True).start()

  def receive(self):
    """Waits for a message from the parent."""
    return self._received.get()

  def _read(self):
    rest = b""
    with contextlib.suppress(OSError):
      while more := self._socket.recv(4096):
        *lines, rest = (rest + more).split(b"\n")
        for line in lines:
          self._received.put(json.loads(line))
    os._exit(1)
