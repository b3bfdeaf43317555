"""Waits for the sockets of a process, and can be woken from other threads."""

from __future__ import annotations

import contextlib
import selectors
import socket
from typing import Any

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Poller:
  """The sockets of which something is waited for.

  Attributes:
    woken: whether `wake` was called since this was last set to False.
  """

  def __init__(self) -> None:
    self.woken = False
    self._selector = selectors.DefaultSelector()
    self._wake_read, self._wake_write = socket.socketpair()
    self._wake_write.setblocking(False)
    self.watch(self._wake_read, READ, None)

  def watch(self, sock: socket.socket, mask: int, owner: Any) -> None:
    """Waits for a socket, which does not block from now on.

    Args:
      sock: the socket.
      mask: READ, WRITE, or both.
      owner: what `wait` returns for it.

    Raises:
      OSError: it can't be watched.
    """
    sock.setblocking(False)
    self._selector.register(sock, mask, owner)

  def change(self, sock: socket.socket, mask: int, owner: Any) -> None:
    """Waits for something else of a socket."""
    self._selector.modify(sock, mask, owner)

  def unwatch(self, sock: socket.socket) -> None:
    """Does not wait for a socket any more."""
    with contextlib.suppress(KeyError, ValueError):
      self._selector.unregister(sock)

  def wait(self, seconds: float) -> list[tuple[Any, int]]:
    """Waits at most so long; returns whose socket is ready, and for what."""
    ready = []
    for key, mask in self._selector.select(0.0 if self.woken else seconds):
      if key.data is not None:
        ready.append((key.data, mask))
        continue
      self.woken = True
      try:
        while len(self._wake_read.recv(4096)) == 4096:
          pass
      except BlockingIOError:
        pass
    return ready

  def wake(self) -> None:
    """Ends the current `wait`, or else the next one; from any thread."""
    # Not `suppress`, which is slower: this is done in every step.
    try:  # noqa: SIM105
      self._wake_write.send(b"\0")
    except OSError:
      pass

  def close(self) -> None:
    """Closes its own descriptors."""
    self._wake_read.close()
    self._wake_write.close()
    self._selector.close()
