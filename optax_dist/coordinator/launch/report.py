"""How a launched run has ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


class LaunchError(RuntimeError):
  """A launched run can't go on.

  Attributes:
    failed: what failed: "replica 2", "the store", or "" where that
      is not known.
    code: the exit code of what failed.
  """

  def __init__(self, failed: str, message: str, code: int = 1):
    super().__init__(message)
    self.failed, self.code = failed, code


@dataclasses.dataclass(frozen=True)
class Loss:
  """A replica that ended before the run did.

  Attributes:
    replica: its number.
    restarts: how often it had been started before.
    ending: how it ended, in words.
    tail: the last lines of its output.
    seconds: when, since the launch.
    code: its exit code, as a shell has it.
  """

  replica: int
  restarts: int
  ending: str
  tail: str
  seconds: float
  code: int


@dataclasses.dataclass(frozen=True)
class Report:
  """A run that has ended.

  Attributes:
    seconds: how long it took.
    losses: replicas that ended on the way.
    restarts: how many were started in place of others.
    code: the exit code of the job: 0 if it ended well, 128 and its number after
      a signal, that of a replica which failed after the run was over.
  """

  seconds: float
  losses: Sequence[Loss]
  restarts: int
  code: int = 0
