"""The only thread that uses a replica's transport."""

from __future__ import annotations

import collections
import logging
import os
import threading
from collections.abc import Callable

from optax_dist.coordinator.runtime import background, threads
from optax_dist.coordinator.runtime import endpoint as endpoints
from optax_dist.coordinator.transport import interface as transports

_log = logging.getLogger("optax_dist.coordinator")
# Seconds to wait for a closing thread.
_CLOSE_SECONDS = 5.0


class EventLoop:
  """Polls a transport, and runs functions that other threads post.

  Attributes:
    background: does slow work in a thread of its own.
    closing: why the loop ends; "" while it goes on.
    due: when to call `run_pending` at the latest; by the transport's clock.
    posted: the functions that it has yet to run.
    process: the id of its process.
    wake: makes it call `run_pending` soon; callable from any thread.
  """

  def __init__(
    self,
    endpoint: endpoints.Endpoint,
    replica: int | str,
    handle: Callable[[transports.Event], None],
    run_pending: Callable[[], None],
    failed: Callable[[BaseException], None],
  ):
    """Creates the loop; nothing happens before `start`.

    Args:
      endpoint: its transport, and where its coordinator is; closed in the end.
      replica: the replica's id.
      handle: handles an event of the transport.
      run_pending: does what follows from events and posted functions.
      failed: called with an error that ends the loop.
    """
    self.closing, self.wake = "", endpoint.transport.wake
    self._endpoint, self._replica = endpoint, replica
    self._handle, self._run_pending = handle, run_pending
    self.due, self._failed = 0.0, failed
    name = f"optax-dist-{replica}"
    self.background = background.Background(f"{name}-work", self.call_soon)
    target = threads.in_this_precision(self._run)
    self._thread = threading.Thread(target=target, name=name, daemon=True)
    self.posted: collections.deque[Callable[[], None]] = collections.deque()
    self._closed = False
    self.process = os.getpid()

  def start(self) -> None:
    """Starts the thread."""
    self._thread.start()

  def call_soon(self, action: Callable[[], None]) -> None:
    """Runs a function in the loop's thread; callable from any thread."""
    self.posted.append(action)
    self.wake()

  def run_posted(self) -> None:
    """Runs posted functions; called in the loop's thread, or before that starts."""
    while self.posted:
      self.posted.popleft()()

  @property
  def is_forked(self) -> bool:
    """Whether this is a forked child, which has no event loop."""
    return os.getpid() != self.process

  def close(self, reason: str) -> None:
    """Stops the threads and waits for them; unsent messages are lost."""
    if self.is_forked:
      return
    self.call_soon(lambda: setattr(self, "closing", reason))
    if self._thread is threading.current_thread():
      return
    if self._thread.ident is None:
      self._end()
    # A thread stuck in foreign code must not block the caller.
    else:
      self._thread.join(_CLOSE_SECONDS)
    self.background.close(_CLOSE_SECONDS)

  def _run(self) -> None:
    transport = self._endpoint.transport
    try:
      self._run_pending()
      while not self.closing:
        for event in transport.poll(max(0.0, self.due - transport.now())):
          self._handle(event)
        self._run_pending()
    except BaseException as error:
      _log.debug("replica %r fails", self._replica, exc_info=True)
      self.closing = f"it has raised {error!r:.200}"
      self._failed(error)
    finally:
      self._end()

  def _end(self) -> None:
    if self._closed:
      return
    self._closed = True
    try:
      self._endpoint.close(self.closing)
    except Exception:
      _log.exception("replica %r could not close all", self._replica)
    self.posted.clear()
