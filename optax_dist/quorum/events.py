"""The events of a sync-replicas run, and the decisions of its rules."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

Replica = int | str


class Reason(enum.StrEnum):
  """Why a gradient was dropped."""

  STALE = "stale"
  FUTURE = "future"
  DUPLICATE = "duplicate"
  NON_FINITE = "non_finite"
  OTHER_INCARNATION = "other_incarnation"
  UNKNOWN_REPLICA = "unknown_replica"
  OVER_QUOTA = "over_quota"
  SUPERSEDED = "superseded"
  FAILED = "failed"
  ABANDONED = "abandoned"
  LOST = "lost"
  LEFT = "left"
  FINISHED = "finished"
  RETURNED = "returned"


# Events.


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
  """A replica is ready for its first token.

  Attributes:
    replica: its id.
    incarnation: how often this id has started, to tell a restarted process
      from its dead predecessor, which can't join any more; None counts up by one.
  """

  replica: Replica
  incarnation: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Arrive:
  """A replica has a gradient.

  Attributes:
    replica: the sender.
    local_step: the global step of the parameters it was computed on.
    finite: whether every element of it is finite.
    incarnation: the sender's incarnation; None where it does not matter.
    count: how many gradients of this step are summed in it.
  """

  replica: Replica
  local_step: int
  finite: bool = True
  incarnation: int | None = None
  count: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Leave:
  """A replica leaves permanently and gracefully: out of data, or finished."""

  replica: Replica
  incarnation: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
  """A replica is lost without notice; it may come back."""

  replica: Replica
  incarnation: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
  """All members that must have the mean of a round have it."""

  step: int
  round: int


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
  """A round has no mean.

  Attributes:
    step: the step of the round.
    round: the number of the round.
    failed_replica: the member whose gradient to leave out of the next round.
  """

  step: int
  round: int
  failed_replica: Replica


@dataclasses.dataclass(frozen=True, slots=True)
class Close:
  """The grace window of a step is over: the step is taken with the gradients so far.

  Attributes:
    step: the step.
  """

  step: int


@dataclasses.dataclass(frozen=True, slots=True)
class Return:
  """An accepted gradient is dropped, and its replica computes another one.

  It has no effect on a gradient that is in a round.
  """

  replica: Replica
  incarnation: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Finish:
  """The run is over: nothing more will be committed."""


Event = Join | Arrive | Leave | Lost | Done | Failed | Close | Return | Finish


# Decisions.


@dataclasses.dataclass(frozen=True, slots=True)
class Contribution:
  """An accepted gradient, as a member of a round or commit.

  Attributes:
    replica: the replica.
    local_step: the step of the parameters it was computed on.
    staleness: its staleness, in steps.
    count: how many gradients are summed in it.
    weight: its weight in the mean (1.0 without a `weight` policy).
    incarnation: the replica's incarnation when it arrived.
  """

  replica: Replica
  local_step: int
  staleness: int
  count: int
  weight: float
  incarnation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Accept:
  """The gradient is accepted, as a whole."""

  replica: Replica
  local_step: int
  staleness: int
  count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
  """The gradient is dropped, as a whole; no byte of it need be moved.

  Attributes:
    replica: the replica.
    local_step: the step of the parameters it was computed on.
    reason: why.
    count: how many gradients are summed in it.
    incarnation: the replica's incarnation when it arrived; -1 if unknown.
  """

  replica: Replica
  local_step: int
  reason: Reason
  count: int = 1
  incarnation: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
  """The replica computes on the parameters of `step`.

  Attributes:
    replica: the replica.
    step: the step of the parameters.
    count: how many gradients to sum before it arrives.
  """

  replica: Replica
  step: int
  count: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class StartRound:
  """The members aggregate, until `Done` or `Failed`."""

  step: int
  round: int
  members: tuple[Contribution, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Abandon:
  """The round is void and has no effect."""

  step: int
  round: int
  failed_replica: Replica


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
  """The mean over `members` (in replica order) is applied by all replicas.

  Attributes:
    step: the global step before the update; after it, it is `step + 1`.
    members: the averaged gradients.
    round: the number of the round that succeeded.
  """

  step: int
  members: tuple[Contribution, ...]
  round: int


@dataclasses.dataclass(frozen=True, slots=True)
class CannotProceed:
  """Too few replicas are left to reach the quorum.

  Attributes:
    step: the step that cannot be committed.
    have: replicas that can still contribute.
    needed: replicas that must.
    missing: the absent replicas.
    final: True if no return of a lost replica can fix it.
  """

  step: int
  have: int
  needed: int
  missing: tuple[Replica, ...]
  final: bool

  def __str__(self) -> str:
    names = ", ".join(map(str, self.missing)) or "none"
    if self.final:
      what_next = (
        "lower replicas_to_aggregate, or let leaves lower it"
        " (lower_on_leave=True)"
      )
    elif self.missing:
      what_next = "the step waits until they have joined again"
    else:
      what_next = "the step waits until more replicas join"
    return (
      f"step {self.step} needs {self.needed} replicas and {self.have} can "
      f"contribute; missing: {names}; {what_next}."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
  """The run has ended at `step`; the replica stops, without an error."""

  step: int


Decision = (
  Accept
  | Drop
  | Token
  | StartRound
  | Abandon
  | Commit
  | CannotProceed
  | Finished
)


def ordered(replicas: Iterable[Replica]) -> tuple[Replica, ...]:
  """Sorts ids, numbers before names."""
  ids = list(replicas)
  try:
    return tuple(sorted(ids))
  except TypeError:  # Ids of both kinds, integers and texts.
    return tuple(sorted(ids, key=lambda r: (isinstance(r, str), r)))
