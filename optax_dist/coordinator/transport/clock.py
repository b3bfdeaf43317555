"""A monotonic clock that stands still while its process does not run."""

from __future__ import annotations

import time
from collections.abc import Callable


class AwakeClock:
  """Counts the seconds in which its event loop ran.

  A process that was stopped, or whose host was suspended, can't know what happened in
  that time: the message that it waits for may have been sent long ago, and its own
  messages were missing. So time asleep counts neither against peers nor against this
  process. The owner of the clock calls `now` more often than every `longest` seconds;
  if a call is later, the excess was time asleep.

  Attributes:
    time: the time of the last call; an event loop calls `now` once in each turn.

  Example:
    >>> times = iter([0.0, 0.5, 60.5, 61.0])
    >>> clock = AwakeClock(longest=1.0, source=lambda: next(times))
    >>> clock.now(), clock.now(), clock.now()
    (0.5, 1.5, 2.0)
  """

  def __init__(
    self, longest: float, source: Callable[[], float] = time.monotonic
  ):
    """Starts the clock.

    Args:
      longest: seconds between two calls that are no absence.
      source: a monotonic clock, in seconds.
    """
    self._longest, self._source = longest, source
    self._last = self.time = source()

  def now(self) -> float:
    """The time, in seconds."""
    time_ = self._source()
    self.time += min(time_ - self._last, self._longest)
    self._last = time_
    return self.time
