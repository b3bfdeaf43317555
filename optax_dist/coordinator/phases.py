"""Where a replica is in a step: a place for tests to stop, slow or kill it.

Nothing listens by default, and then a phase costs one comparison.
"""

from __future__ import annotations

from collections.abc import Callable

PHASES = (
  "joining",
  "computing",
  "arrived",
  "reduce_scatter",
  "gather",
  "done",
  "applied",
  "serving",
  "fetching_snapshot",
  "checkpointing",
  "committing",
)

_listener: Callable[[str, object], None] | None = None


def listen(listener: Callable[[str, object], None] | None) -> None:
  """Has `listener(phase, replica)` called whenever a replica enters a phase.

  It is called in the thread that enters, and may block, raise or end the
  process. None ends it.

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


def reach(phase: str, replica: object) -> None:
  """A replica enters a phase; "committing" is entered by the leader."""
  if _listener is not None:
    _listener(phase, replica)
