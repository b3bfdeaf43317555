"""The phases of a step: hooks for tests to stop, slow down or kill a replica.

There is no listener by default; a phase then costs one comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_listener: Callable[[str, object], None] | None = None
_slower = 1.0


def listen(listener: Callable[[str, object], None] | None) -> None:
  """Has `listener(phase, replica)` called whenever a replica enters a phase.

  It is called in the thread that enters the phase, and may block, raise or end
  the process. None removes the listener.

  Example:
    >>> seen = []
    >>> listen(lambda phase, replica: seen.append((phase, replica)))
    >>> reach("gather", 3)
    >>> listen(None)
    >>> seen
    [('gather', 3)]
  """
  global _listener
  _listener = listener


def slow_down(computed: float | None = None, factor: float = 0.0) -> None:
  """Makes replicas of this process compute more slowly, or waits for that time.

  Args:
    computed: seconds that a gradient has taken; waits for the remaining time.
    factor: the slow-down of all gradients from now on.

  Example:
    >>> slow_down(factor=2.0)
    >>> slow_down(0.01)  # Takes 0.01 s.
    >>> slow_down(factor=1.0)
  """
  global _slower
  _slower = factor or _slower
  if computed is not None and _slower > 1.0:
    time.sleep((_slower - 1.0) * computed)


def reach(phase: str, replica: object) -> None:
  """Reports that a replica enters a phase; the coordinator enters "committing"."""
  if _listener is not None:
    _listener(phase, replica)
