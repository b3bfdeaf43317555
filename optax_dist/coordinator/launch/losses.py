"""Replicas that ended before the run did, and which of them explains its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Loss:
  """A replica that ended before the run did.

  Attributes:
    replica: its index.
    ending: a description of how it ended.
    tail: the last lines of its output.
    seconds: time of the end, since the launch.
    code: its exit code, as in a shell.
  """

  replica: int
  ending: str
  tail: str
  seconds: float
  code: int

  def explain(self, what: str) -> str:
    """Why a run can't continue, for people.

    Args:
      what: the reason in a few words.
    """
    told = f"{what}: replica {self.replica} {self.ending} after {self.seconds:.1f} s."
    if self.tail:
      told += f" The last lines of its output:\n{self.tail}"
    return f"{told}\nTo go on, start the job again from its last checkpoint."


def cause(firsts: Sequence[Loss]) -> Loss:
  """The first of the failures because of which a run can't continue.

  Args:
    firsts: of each replica the first of its failures in a row. What it raises
      after a restart often follows from that: the run is over, or its store is
      gone.
  """
  first = min(firsts, key=lambda loss: loss.seconds)
  # A replica that was killed makes others fail at nearly the same time.
  for loss in firsts:
    killed = loss.seconds - first.seconds < 1.0 and loss.code > 128
    if killed and first.code <= 128:
      return loss
  return first
