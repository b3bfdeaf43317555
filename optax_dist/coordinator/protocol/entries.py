"""What is decided once: the entries of the coordinator's log.

The log is all that outlives a coordinator. A record has the entries of one input, in
order, and is written before any message about them is sent (`effects.Append`). All
other communication is in `messages`.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, TypeAlias

import msgspec

from optax_dist.coordinator.protocol.codec import (
  Codec,
  Finite,
  Integer,
  Natural,
  Positive,
  Several,
  Struct,
)
from optax_dist.ledger import NOTHING_DONE, Batches, Progress, Spans

# A replica's id, chosen by its user.
ReplicaId: TypeAlias = Integer | str
# A process's name, new whenever it starts; also its name in the transport.
Process: TypeAlias = str
# The number of a membership: unique in a run, and increasing.
Incarnation: TypeAlias = Natural
# The runs that a run continues, the oldest first. For each: the run's id, and the step
# from which the next run continued.
Lineage: TypeAlias = tuple[tuple[str, Natural], ...]


def as_lineage(value: Any) -> Lineage:
  """Checks a lineage that a caller passes; None is the lineage of a new run.

  Raises:
    ValueError: the value is not a lineage.
  """
  try:
    return msgspec.convert(() if value is None else value, Lineage)
  except msgspec.ValidationError as error:
    raise ValueError(
      "lineage must be what checkpoint.restore returns, pairs of a run and a"
      f" step; got {value!r:.100}: {error}."
    ) from None


class Start(Struct):
  """A state from which a run can begin.

  Attributes:
    step: its step.
    digest: digest of its arrays.
    progress: the samples included in it.
    lineage: the runs that led to this state.
  """

  # Bounded, since the run counts on from this step in 64 bits.
  step: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
  digest: str = ""
  progress: Progress = NOTHING_DONE
  lineage: Lineage = ()

  def is_same(self, other: Start) -> bool:
    """Whether both states have the same arrays at the same step."""
    return (self.step, self.digest) == (other.step, other.digest)


class Member(Struct):
  """A replica that takes part in the run.

  Attributes:
    incarnation: the number of this membership.
    replica: the replica's id; one membership per id.
    process: the name of its process.
    address: address of its transport.
  """

  incarnation: Incarnation
  replica: ReplicaId
  process: Process
  address: str


class Departed(Struct):
  """A replica that was a member.

  Attributes:
    member: its last membership.
    left: whether it left gracefully; otherwise it was lost, and may come back.
    step: how many steps were committed when it departed; -1 if the run has begun again
      since, so that its state is no longer a state of the run.
  """

  member: Member
  left: bool
  step: Integer


class RoundId(Struct):
  """Identifies an aggregation round within the run.

  A replica contributes at most one gradient under an id, so all replicas that
  complete a round with the same id have the same mean.

  Attributes:
    epoch: epoch of the coordinator that announced the round.
    step: the step being taken.
    number: distinguishes this coordinator's rounds for the step.
    early: whether the round was announced before its gradients had been submitted.
  """

  epoch: Natural
  step: Natural
  number: Natural
  early: bool = False


class Part(Struct):
  """One member's gradient in a round or commit.

  Attributes:
    incarnation: incarnation of its replica.
    replica: the id of that replica.
    sequence: the sender's number of the submission.
    local_step: the step of the parameters it was computed on.
    staleness: its staleness, in steps.
    count: how many gradients are summed in it.
    weight: its weight in the mean.
    data: the samples that it was computed on, if a ledger leases them.
  """

  incarnation: Incarnation
  replica: ReplicaId
  sequence: Natural
  local_step: Integer
  staleness: Natural
  count: Positive
  weight: Finite
  data: Spans = ()


class Leased(Struct):
  """The samples that a member computes on next.

  Attributes:
    incarnation: the membership that they are leased to.
    spans: the samples, in order; if empty, the member waits for samples.
  """

  incarnation: Incarnation
  spans: Spans


class Details(Struct):
  """Fields of a gradient for the journal; nothing is decided by them.

  Attributes:
    batches: the batches it was computed on, as JSON text; "" for none.
    compute: seconds that computing it took, if known.
    age: seconds from its arrival at the coordinator until the commit.
  """

  batches: str
  compute: Finite | None
  age: Finite


class Rules(Struct):
  """Numbers of a run. Times are in seconds.

  Attributes:
    replicas_to_aggregate: gradients in a step.
    total_num_replicas: replicas expected at the start.
    max_staleness: largest staleness of a gradient, in steps.
    weight: None, or "inverse" for 1 / max(1, staleness).
    lower_on_leave: whether replicas that leave lower the quorum.
    lower_on_loss: whether replicas that are lost also lower it.
    inline_bytes: the size of a gradient, if gradients and means are sent inline
      in messages; None: members exchange them.
    alone: whether no two replicas may take part in one step.
    timeout: see `deadlines.of`; likewise the next two.
    transfer_timeout: how long a transfer may make no progress.
    silence_timeout: how long a peer may be silent.
    stall_warning: time to wait before the missing replicas are reported.
    fingerprint_every: steps between comparisons of all replicas; 0 for none.
    max_skipped: how many samples may be skipped because gradients on them are not
      finite, before the end of the data is an error; None for the samples of one
      step.
  """

  replicas_to_aggregate: Positive = 1
  total_num_replicas: Several = 1
  max_staleness: Natural = 0
  weight: str | None = None
  lower_on_leave: bool = True
  lower_on_loss: bool = False
  inline_bytes: Natural | None = None
  alone: bool = False
  timeout: Finite = 300.0
  transfer_timeout: Finite | None = None
  silence_timeout: Finite | None = None
  stall_warning: Finite = 10.0
  fingerprint_every: Natural = 0
  max_skipped: Natural | None = None


class Fragments(Struct):
  """The rules of Decoupled DiLoCo.

  Attributes:
    fragments: the number of fragments.
    period: the fastest learner's steps between two rounds of a fragment.
    overlap: steps that a learner trains on before it mixes in a merge.
    safety: the share of the slack that the grace window may use, from 0 to 1.
    max_staleness: how many rounds of its fragment a contribution may have missed; the
      contribution is carried into the next round, with a lower weight.
  """

  fragments: Positive
  period: Positive
  overlap: Natural = 1
  safety: Finite = 0.8
  max_staleness: Natural = 1


class Job(Struct):
  """What all replicas of a run have in common, and its coordinator has to know.

  Attributes:
    agreement: what else they must agree on, as pairs of a name and a readable
      text, of which the first line is compared.
    rules: the numbers that the coordinator works with, as `Config` has them.
    leaves: shapes and dtypes of a gradient's arrays, if gradients are sent
      inline: the coordinator averages them.
    wire: their wire format.
    data: the samples that the coordinator leases; None if it leases none.
    fragments: the rules of Decoupled DiLoCo; None for the quorum's rules alone.
    about: the run's first line in the journal, as JSON text.
    journal: path of the journal; "" for none.
    run: the run's name, if several runs share one coordinator's address.
  """

  agreement: tuple[tuple[str, str], ...]
  rules: Rules
  leaves: tuple[tuple[tuple[Natural, ...], str], ...] = ()
  wire: str = "float32"
  data: Batches | None = None
  fragments: Fragments | None = None
  about: str = "{}"
  journal: str = ""
  run: str = ""


def run_id(nonce: str, beginning: int) -> str:
  """The public id of a run, from one of its beginnings on.

  It has a digest, since the nonce itself is part of signatures. A run that begins
  again gets another id, since other steps may have the same numbers.
  """
  return f"{hashlib.sha256(nonce.encode()).hexdigest()[:12]}-{beginning}"


class Epoch(Struct):
  """A coordinator has started, has started again, or continues as if it had.

  Attributes:
    number: the epoch's number, counted from 0; it only goes up.
    nonce: a random text; the first epoch's nonce is part of all signatures between
      members.
  """

  number: Natural
  nonce: str = ""


class Began(Struct):
  """The run begins from a state, or begins again from the newest state that is left.

  All memberships end: replicas that are still alive join again.

  Attributes:
    start: the state.
    job: what all replicas have in common.
  """

  start: Start
  job: Job


class Joined(Struct):
  """A replica has joined."""

  member: Member


class Removed(Struct):
  """A membership has ended.

  Attributes:
    incarnation: its incarnation.
    left: whether it left gracefully; otherwise it was lost.
    reason: human-readable explanation.
  """

  incarnation: Incarnation
  left: bool
  reason: str


# Numbers of hyperparameters, by name.
Hyperparams: TypeAlias = tuple[tuple[str, Finite], ...]


class Change(Struct):
  """Hyperparameters that one process sets for all replicas.

  Attributes:
    process: the process.
    number: how many requests the process has made so far; each is applied once.
    values: the numbers.
  """

  process: Process
  number: Natural
  values: Hyperparams


class Committed(Struct):
  """A step: all replicas apply the mean over `parts`, in this order.

  Attributes:
    round: the one that computed the mean.
    parts: the gradients in the mean, in replica order.
    mean: the mean's bytes, if gradients are sent inline; if None, members and
      readers have the mean from their aggregation.
    save: whether the state after this step is the one that all replicas save.
    details: fields for the journal; one for each part.
    dropped: for each reason, how many gradients the run has dropped so far.
    leases: the samples that members compute on next, if a ledger leases them;
      none of these samples are in a committed step.
    skipped: samples that are abandoned because their gradients were never finite;
      in a deterministic step they count as zeros.
    changes: hyperparameters that all replicas set, in this order, before they apply
      the mean.
  """

  round: RoundId
  parts: tuple[Part, ...]
  mean: bytes | None
  save: bool
  details: tuple[Details, ...]
  dropped: tuple[tuple[str, Natural], ...]
  leases: tuple[Leased, ...] = ()
  skipped: Spans = ()
  changes: tuple[Change, ...] = ()

  @property
  def hyperparams(self) -> Hyperparams:
    """The values after all changes: the last change of a name decides."""
    latest: dict[str, float] = {}
    for change in self.changes:
      latest.update(change.values)
    return tuple(latest.items())


class Ended(Struct):
  """The run is over; nothing follows.

  Attributes:
    step: how many steps were committed.
    reason: human-readable explanation.
    error: "" if it finished successfully; otherwise the error that all replicas
      raise, "CoordinatorError" or "Diverged".
    dropped: for each reason, how many gradients the run has dropped.
  """

  step: Natural
  reason: str
  error: str
  dropped: tuple[tuple[str, Natural], ...]


class Compacted(Struct):
  """Replaces all entries before it by their result, an encoded `history.History`."""

  history: bytes


Entry: TypeAlias = (
  Epoch | Began | Joined | Removed | Committed | Ended | Compacted
)


class Record(Struct):
  """The entries of one input."""

  entries: Annotated[tuple[Entry, ...], msgspec.Meta(min_length=1)]


RECORDS: Codec[Record] = Codec(Record)
