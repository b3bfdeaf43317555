"""A thread for slow work, so that the event loop is not blocked."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable

from optax_dist.coordinator.runtime import threads

Work = Callable[[], None]
Done = Callable[[], None] | None


class Background:
  """Runs work one item at a time; starts its thread when there is work.

  An error in the work is raised on the event loop, which it ends.
  """

  def __init__(self, name: str, post: Callable[[Callable[[], None]], None]):
    """Creates the queue, without a thread.

    Args:
      name: name of the thread.
      post: schedules a function on the event loop.
    """
    self._name, self._post = name, post
    self._queue: queue.SimpleQueue[tuple[Work, Done] | None] = (
      queue.SimpleQueue()
    )
    self._thread: threading.Thread | None = None

  def __call__(self, work: Work, done: Done = None) -> None:
    """Runs `work`, and then `done` on the event loop, if it is given."""
    if self._thread is None:
      run = threads.in_this_precision(self._run)
      thread = threading.Thread(target=run, name=self._name, daemon=True)
      thread.start()  # From Python 3.12 fails if the main thread has ended.
      self._thread = thread
    self._queue.put((work, done))

  def close(self, timeout: float) -> None:
    """Stops the thread, and waits for it for a limited time."""
    if self._thread is not None:
      self._queue.put(None)
      self._thread.join(timeout)

  def _run(self) -> None:
    while (item := self._queue.get()) is not None:
      work, done = item
      try:
        work()
      except BaseException as error:
        done = functools.partial(_raise, error)
      # Without `done`, the event loop has nothing to do, so it is not woken.
      if done is not None:
        self._post(done)
      # Drop references before waiting for the next item.
      del item, work, done


def _raise(error: BaseException) -> None:
  raise error
