"""The results of a launched run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


class LaunchError(RuntimeError):
  """A launched run can't continue.

  Attributes:
    failed: what failed: "replica 2", "the store", or "" if unknown.
    code: the exit code of what failed.
  """

  def __init__(self, failed: str, message: str, code: int = 1):
    super().__init__(message)
    self.failed, self.code = failed, code


@dataclasses.dataclass(frozen=True)
class Loss:
  """A replica that ended before the run did.

  Attributes:
    replica: its index.
    restarts: how often it had been started before.
    ending: a description of how it ended.
    tail: the last lines of its output.
    seconds: time of the end, since the launch.
    code: its exit code, as in a shell.
  """

  replica: int
  restarts: int
  ending: str
  tail: str
  seconds: float
  code: int


@dataclasses.dataclass(frozen=True)
class Report:
  """The result of a run that has ended.

  Attributes:
    seconds: how long it took.
    losses: replicas that ended before the run did.
    restarts: how many replacements were started.
    code: the exit code of the job: 0 on success, 128 plus the signal's number
      after a signal, that of a replica that failed after the run was over.
  """

  seconds: float
  losses: Sequence[Loss]
  restarts: int
  code: int = 0
