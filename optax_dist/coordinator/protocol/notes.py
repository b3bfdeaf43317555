"""The leader's notes for the journal; docs/simulate.md describes the file.

Times are ages, in seconds before the note was made: the leader's clock means
nothing to readers of a journal.
"""

from __future__ import annotations

from typing import TypeAlias

from optax_dist.coordinator.protocol.codec import Struct
from optax_dist.coordinator.protocol.entries import (
  Committed,
  Incarnation,
  Process,
  ReplicaId,
)


class RunBegins(Struct):
  """The first line of a run; the driver adds its options."""

  step: int


class LeaderBegins(Struct):
  """A replica has become leader."""

  replica: ReplicaId
  term: int
  step: int


class MemberJoined(Struct):
  """A replica has joined.

  Attributes:
    address: address of its transport.
  """

  replica: ReplicaId
  incarnation: Incarnation
  step: int
  address: str


class MemberRemoved(Struct):
  """A replica is no longer a member: it left, or was lost."""

  replica: ReplicaId
  incarnation: Incarnation
  step: int
  left: bool
  reason: str


class MemberStuck(Struct):
  """A replica detected that its training loop is stuck, and leaves.

  Attributes:
    stacks: stacks of its threads.
  """

  replica: ReplicaId
  incarnation: Incarnation
  step: int
  reason: str
  stacks: str


class StepCommitted(Struct):
  """A step was committed.

  Attributes:
    commit: the entry of the log.
    age: seconds since its attempt began; None if unknown.
    timings: timings of its parts, as received; empty if unknown.
  """

  commit: Committed
  age: float | None
  timings: tuple[bytes, ...] = ()


class GradientDropped(Struct):
  """A gradient was dropped.

  Attributes:
    step: the global step at that time.
    age: seconds since it arrived; None if it did not.
    batches: as JSON text; "" for none.
    timings: as received; empty if unknown.
  """

  step: int
  replica: ReplicaId
  incarnation: Incarnation
  local_step: int
  count: int
  reason: str
  batches: str
  compute: float | None
  age: float | None
  timings: bytes = b""


class AttemptAbandoned(Struct):
  """An aggregation was abandoned because of one replica."""

  step: int
  attempt: int
  failed_replica: ReplicaId | None
  reason: str


class StepStalled(Struct):
  """A step is slow; names the replicas that it waits for."""

  step: int
  waited: float
  computing: tuple[ReplicaId, ...]
  reporting: tuple[ReplicaId, ...]
  absent: tuple[ReplicaId, ...]


class CannotProceed(Struct):
  """Too few replicas are left for the quorum.

  Attributes:
    have: how many replicas can contribute.
    needed: how many must contribute.
    missing: the replicas that are absent.
    final: whether no return of a lost replica would help.
  """

  step: int
  have: int
  needed: int
  missing: tuple[ReplicaId, ...]
  final: bool


class FingerprintSeen(Struct):
  """The first digest of a state that a replica has reported."""

  step: int
  replica: ReplicaId
  digest: str


class DeadlinesSeen(Struct):
  """The current deadlines, which the driver knows.

  Attributes:
    members: replicas and their processes.
  """

  members: tuple[tuple[ReplicaId, Process], ...]


class RunEnds(Struct):
  """The last line: how the run ended.

  Attributes:
    error: "" if it finished successfully.
    applied: how many gradients were part of commits.
    dropped: how many were dropped, by reason.
  """

  step: int
  reason: str
  error: str
  applied: int
  dropped: tuple[tuple[str, int], ...]


Note: TypeAlias = (
  RunBegins
  | LeaderBegins
  | MemberJoined
  | MemberRemoved
  | MemberStuck
  | StepCommitted
  | GradientDropped
  | AttemptAbandoned
  | StepStalled
  | CannotProceed
  | FingerprintSeen
  | DeadlinesSeen
  | RunEnds
)
