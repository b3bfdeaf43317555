"""The journal's records, which a coordinator writes.

docs/simulate.md describes the file, which has one JSON object per record: its
`kind`, its time, and its fields. Optional fields are null when unknown.

All other times in a record are durations, or ages: seconds before the record's time.
No host's clock means anything to the readers of a journal.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from optax_dist.coordinator.protocol.codec import Finite, Seconds
from optax_dist.coordinator.protocol.entries import Committed, Ended
from optax_dist.ledger import Span

#: Version of the journal's format.
VERSION = 1

# A replica's id as the journal has it: any whole number, or a text.
_Id: TypeAlias = int | str


@typing.dataclass_transform(frozen_default=True)
class Record(msgspec.Struct, frozen=True, tag_field="kind"):
  """The base of records; their fields have no order in the file."""


class Run(Record, tag="run"):
  """The first record of a run.

  The core writes only the step. The coordinator's driver adds the rest: the caller's
  options, and when the run began.
  """

  version: int
  strategy: str
  step: int
  unix_time: Finite | None = None
  replicas_to_aggregate: int | None = None
  total_num_replicas: int | None = None
  max_staleness: int | None = None
  lower_on_leave: bool | None = None
  lower_on_loss: bool | None = None
  weight: str | None = None
  wire: str | None = None
  inline: bool | None = None
  gradient_bytes: int | None = None
  cores: int | None = None
  data: dict[str, Any] | None = None
  config: dict[str, Any] | None = None


class Coordinator(Record, tag="coordinator"):
  """A coordinator has started, or started again.

  Attributes:
    epoch: how many coordinators have started before.
  """

  step: int
  epoch: int | None = None


class Join(Record, tag="join"):
  """A replica has joined.

  Attributes:
    address: address of its transport.
  """

  replica: _Id
  step: int
  incarnation: int | None = None
  address: str | None = None


class Leave(Record, tag="leave"):
  """A replica has left by its own wish."""

  replica: _Id
  step: int
  incarnation: int | None = None


class Lost(Record, tag="lost"):
  """A replica was removed."""

  replica: _Id
  step: int
  incarnation: int | None = None
  reason: str | None = None


class Audit(Record, tag="audit"):
  """Two replicas have computed different gradients of the same micro-batch.

  Attributes:
    slot: the micro-batch's number in the step.
    digests: each replica's digest of the gradient.
    evicted: the replicas that differ from two that agree; empty if no other replica
      was left to decide.
  """

  step: int
  slot: int
  digests: dict[str, str]
  evicted: list[_Id]


class Stuck(Record, tag="stuck"):
  """A replica detected that its training loop is stuck, and leaves.

  Attributes:
    stacks: stacks of its threads.
  """

  replica: _Id
  step: int
  reason: str
  stacks: str
  incarnation: int | None = None


class Process(Record, tag="process"):
  """A launcher's record: which process a replica is, or how that process ended."""

  replica: _Id
  host: str
  pid: int
  ended: str | None = None


class Timings(msgspec.Struct, frozen=True):
  """How a replica spent its time up to a submission.

  In seconds. `waited`, `exchanged` and `applied` happen after a submission, so they can
  only be sent with the next one: they refer to the previous submission, and are 0 if
  there was none.

  Attributes:
    total: from the beginning of the computation until it was submitted.
    compiled: the part of `total` in which JAX traced and compiled.
    cpu: CPU time of all of the process's threads during `total`; more than `total` if
      several cores were busy.
    encoded: time to encode the gradient as bytes; if the gradient is encoded while it
      is sent, time to check that it is finite.
    waited: from the previous submission until the computation could continue.
    exchanged: the part of `waited` from the start of the exchange to its mean.
    applied: the part of `waited` that the update took.
    bytes_in: bytes of means and states received since the last submission.
    bytes_out: bytes of gradients, means and states sent since then.
  """

  total: Seconds
  compiled: Seconds
  cpu: Seconds
  encoded: Seconds
  waited: Seconds
  exchanged: Seconds
  applied: Seconds
  bytes_in: int | None = None
  bytes_out: int | None = None


class Member(msgspec.Struct, frozen=True):
  """A gradient in a `Commit`.

  Attributes:
    batches: the label that its replica gave its data, as JSON text.
    compute: seconds that computing it took.
    age: seconds since it arrived at the coordinator.
    data: the samples that it was computed on, if they are leased.
  """

  replica: _Id
  local_step: int
  staleness: int
  count: int
  weight: Finite
  incarnation: int | None = None
  batches: str | None = None
  compute: Finite | None = None
  age: Finite | None = None
  timings: Timings | None = None
  data: tuple[Span, ...] | None = None


class Commit(Record, tag="commit"):
  """A step was committed.

  Attributes:
    members: its gradients, in replica order.
    skipped: samples that the step abandons because their gradients were never finite;
      with deterministic data they count as zeros.
    hyperparams: set before the mean was applied (`Replica.set_hyperparams`).
  """

  step: int
  round: int
  members: tuple[Member, ...]
  epoch: int | None = None
  skipped: tuple[Span, ...] | None = None
  hyperparams: dict[str, Finite] | None = None


class Drop(Record, tag="drop"):
  """A gradient was dropped; the attributes are those of `Member`."""

  step: int
  replica: _Id
  local_step: int
  count: int
  reason: str
  incarnation: int | None = None
  batches: str | None = None
  compute: Finite | None = None
  age: Finite | None = None
  timings: Timings | None = None


class Abandon(Record, tag="abandon"):
  """An aggregation was abandoned because of one replica."""

  step: int
  round: int
  failed_replica: _Id | None = None
  reason: str | None = None


class Stall(Record, tag="stall"):
  """A step is slow.

  Attributes:
    missing: the replicas that the step waits for, by what they do: computing,
      reporting, absent.
    dropped: how many gradients were dropped since the last step, by replica and
      reason.
  """

  step: int
  waited: Finite
  missing: dict[str, Any]
  dropped: dict[str, dict[str, int]] | None = None


class NotFinite(Record, tag="not_finite"):
  """A replica's gradients are not finite, again and again.

  Attributes:
    gradients: how many in a row.
  """

  replica: _Id
  step: int
  gradients: int
  incarnation: int | None = None


class CannotProceed(Record, tag="cannot_proceed"):
  """Too few replicas are left for the quorum.

  Attributes:
    have: how many replicas can contribute.
    needed: how many must contribute.
    missing: the replicas that are absent.
    final: whether the quorum is lost even if lost replicas return.
  """

  step: int
  have: int
  needed: int
  missing: list[Any]
  final: bool


class Fingerprint(Record, tag="fingerprint"):
  """The first digests of a step that a replica has reported.

  Attributes:
    params: digest of the parameters.
    state: digest of the whole state.
  """

  step: int
  replica: _Id
  params: str | None = None
  state: str | None = None


class Gap(Record, tag="gap"):
  """Lines are missing before this one: the file could not be written.

  Attributes:
    lines: how many.
    seconds: for how long the file could not be written; None if that is not known.
  """

  lines: int
  seconds: Finite | None = None


class Finish(Record, tag="finish"):
  """The last record: how the run ended.

  Attributes:
    ledger: how many gradients were applied, and dropped by reason; None after
      an error.
    load: the load of the coordinator's host.
  """

  step: int
  reason: str | None = None
  ledger: dict[str, Any] | None = None
  load: Finite | None = None


RECORDS: dict[str, type[Record]] = {
  str(kind.__struct_config__.tag): kind for kind in Record.__subclasses__()
}


def finished(ended: Ended, applied: int) -> Finish:
  """The record of the run's end in the log.

  Args:
    ended: its entry.
    applied: how many gradients were part of commits.
  """
  counts = {"applied": applied, "dropped": dict(ended.dropped)}
  return Finish(ended.step, ended.reason, None if ended.error else counts)


def committed(
  commit: Committed, timings: Sequence[Timings | None] | None = None
) -> Commit:
  """The record of a step in the log.

  Args:
    commit: its entry.
    timings: the timings that each part's replica reported; None if unknown.
  """
  timings = timings or (None,) * len(commit.parts)
  members = tuple(
    Member(
      part.replica,
      part.local_step,
      part.staleness,
      part.count,
      part.weight,
      part.incarnation,
      details.batches or None,
      details.compute,
      details.age,
      measured,
      part.data or None,
    )
    for part, details, measured in zip(
      commit.parts, commit.details, timings, strict=True
    )
  )
  round_ = commit.round
  return Commit(
    round_.step,
    round_.number,
    members,
    round_.epoch,
    commit.skipped or None,
    dict(commit.hyperparams) or None,
  )
