"""How a launched run has ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


class LaunchError(RuntimeError):
  """A launched run can't go on.

  Attributes:
    failed: what failed: "replica 2", "the store", or "" where that
      is not known.
  """

  def __init__(self, failed: str, message: str):
    super().__init__(message)
    self.failed = failed


@dataclasses.dataclass(frozen=True)
class Loss:
  """A replica's process that ended before the run did.

  Attributes:
    replica: its number.
    incarnation: how often it had been started before.
    ending: how it ended, in words.
    tail: the last lines of its output.
    seconds: when, since the launch.
  """

  replica: int
  incarnation: int
  ending: str
  tail: str
  seconds: float


@dataclasses.dataclass(frozen=True)
class Report:
  """A run that ended well.

  Attributes:
    seconds: how long it took.
    losses: processes that ended on the way.
    restarts: how many were started in place of others.
  """

  seconds: float
  losses: Sequence[Loss]
  restarts: int
