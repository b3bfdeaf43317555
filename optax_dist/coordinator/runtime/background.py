"""A thread that does what takes long, so that the event loop goes on."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable

Work = Callable[[], None]
Done = Callable[[BaseException | None], None]


class Background:
  """Does one thing after the other; there is no thread until there is work."""

  def __init__(self, name: str, post: Callable[[Callable[[], None]], None]):
    """Makes one.

    Args:
      name: of the thread.
      post: has a function called by the event loop.
    """
    self._name, self._post = name, post
    self._queue: queue.SimpleQueue[tuple[Work, Done] | None] = (
      queue.SimpleQueue()
    )
    self._thread: threading.Thread | None = None

  def __call__(self, work: Work, done: Done) -> None:
    """Has `work` done; `done` is then called by the event loop."""
    if self._thread is None:
      self._thread = threading.Thread(
        target=self._run, name=self._name, daemon=True
      )
      self._thread.start()
    self._queue.put((work, done))

  def close(self, patience: float) -> None:
    """Ends the thread, and waits for it, but not indefinitely."""
    if self._thread is not None:
      self._queue.put(None)
      self._thread.join(patience)

  def _run(self) -> None:
    while (item := self._queue.get()) is not None:
      work, done = item
      error: BaseException | None = None
      try:
        work()
      except BaseException as raised:
        error = raised
      self._post(functools.partial(done, error))
      # What it refers to is not kept until there is more to do.
      del item, work, done, error
