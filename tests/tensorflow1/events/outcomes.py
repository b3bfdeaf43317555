"""The outcomes of events in TensorFlow's accumulators, queue and leader."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

from optax_dist.quorum.events import Replica


@dataclasses.dataclass(frozen=True, slots=True)
class Applied:
  """The outcome of a gradient.

  Attributes:
    tag: the name chosen by the caller.
    accepted: whether it was accepted; False: stale, which is no error, or
      faulty.
    error: the error of a faulty one; None otherwise.
    variable: the accumulator in a `SyncReplicas` that it was for.
  """

  tag: Any
  accepted: bool
  error: str | None = None
  variable: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Completed:
  """A take or dequeue that has returned.

  Attributes:
    id: id of the take or dequeue.
    kind: "take", "dequeue" or "enqueue".
    value: the tags of the gradients averaged (take), the token (dequeue).
    step: the accumulator's step when it was taken.
    shape: the shape of the mean, as far as it is known; for a sparse one the
      dense shape, -1 for an unknown number of rows.
    error: the error it returned instead.
  """

  id: Hashable
  kind: str
  value: Any = None
  step: int | None = None
  shape: tuple[int, ...] | None = None
  error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
  """The leader updates a variable with the mean of these gradients.

  Attributes:
    variable: the variable's index.
    step: the accumulator's step.
    members: (replica, local step) of each gradient, in order of arrival.
  """

  variable: int
  step: int
  members: tuple[tuple[Replica, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Advanced:
  """All variables are updated; `step` is the new global step."""

  step: int


@dataclasses.dataclass(frozen=True, slots=True)
class GotToken:
  """The worker's step has returned; `step` is its new local step."""

  replica: Replica
  step: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepFailed:
  """The worker's step, or the leader's loop (`replica` "chief"), has failed."""

  replica: Replica
  error: str


Outcome = Applied | Completed | Taken | Advanced | GotToken | StepFailed
