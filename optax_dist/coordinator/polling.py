"""Looking again and again, soon at first, until a deadline.

Where a word of shared memory changes with what is looked for, that is waited
for instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from optax_dist.coordinator import futex

_SHORTEST, _LONGEST = 20e-6, 1e-3

# The next look comes after this part of the time that was waited already.
_PATIENCE = 1 / 16

_CANCELLED_SECONDS = 0.02


class Polling:
  """One wait.

  Example:
    >>> polling = Polling(timeout=0.01)
    >>> while True:
    ...   polling.pause()
    Traceback (most recent call last):
      ...
    TimeoutError: not within 0.01 s
  """

  def __init__(
    self,
    timeout: float,
    cancelled: Callable[[], bool] | None = None,
    word: futex.Word | None = None,
  ):
    """Starts to wait.

    Args:
      timeout: seconds until `pause` raises.
      cancelled: asked now and then; if it says True, `pause` raises.
      word: changes with what is looked for.
    """
    self._word = word if futex.is_available() else None
    self._timeout = timeout
    self._cancelled = cancelled
    self._started = time.monotonic()
    self._asked = self._started

  def pause(self, seen: int = 0) -> None:
    """Sleeps for a moment; a `TimeoutError` says why there is no more time.

    Args:
      seen: what the word was before the caller looked.
    """
    now = time.monotonic()
    waited = now - self._started
    if waited >= self._timeout:
      raise TimeoutError(f"not within {self._timeout:g} s")
    if self._cancelled and now - self._asked >= _CANCELLED_SECONDS:
      self._asked = now
      if self._cancelled():
        raise TimeoutError("cancelled")
    left = self._timeout - waited
    if self._word is not None:
      self._word.wait(seen, min(_CANCELLED_SECONDS, left))
      return
    pause = min(_LONGEST, max(_SHORTEST, waited * _PATIENCE))
    time.sleep(min(pause, left))
