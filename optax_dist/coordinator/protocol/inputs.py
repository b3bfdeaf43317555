"""What happens to a replica: the inputs of `Leader.step` and `Follower.step`.

The driver makes them, one at a time and in the order in which things happened,
and adds the time: seconds of one clock that never goes back. The core never asks
for the time, and never waits. `Handle`s are the driver's own: it gets back what
it gave, unread.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable
from typing import Literal, TypeAlias, TypeVar

from optax_dist.coordinator.protocol.entries import (
  AttemptId,
  Incarnation,
  Process,
  StoreValue,
  Work,
)
from optax_dist.coordinator.protocol.messages import Arrive, Message
from optax_dist.ledger import Spans

# An array or arrays in the driver's hands.
Handle: TypeAlias = Hashable
# Done: it stands there now. Conflict: something else stood there. Unknown: it
# may or may not have been put, for the answer did not come (in time).
PutAnswer: TypeAlias = Literal["done", "conflict", "unknown"]


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
  """The replica begins: looks for the run, and asks to join it.

  Attributes:
    nonce: a random text that names the run, should this be its first process.
  """

  nonce: str


@dataclasses.dataclass(frozen=True, slots=True)
class TimePassed:
  """The time that `deadline()` has named is here. Early or late does no harm."""


# From the transport.


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
  """A peer's message; those of one connection come in order, each once."""

  peer: Process
  message: Message


@dataclasses.dataclass(frozen=True, slots=True)
class Arrivals:
  """Several gradients that came one after the other: as each by itself.

  To a leader with hundreds of followers most that comes is a gradient that
  completes nothing, and many at once cost little more than one.

  Attributes:
    received: messages that are `Arrive`, two or more.
  """

  received: tuple[Received, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Malformed:
  """A peer, whose identity is proved, has sent what `codec` refuses."""

  peer: Process
  error: str


@dataclasses.dataclass(frozen=True, slots=True)
class PeerLost:
  """The connection to a peer has ended, or could not be made.

  Attributes:
    peer: whose.
    how: "refused" if it has another secret, run or version; other kinds (left,
      broken, silent, unreachable) are alike to the core.
    reason: in words, for people.
  """

  peer: Process
  how: str
  reason: str


# From the store.


@dataclasses.dataclass(frozen=True, slots=True)
class PutAnswered:
  """The answer to `Put`. There is exactly one, however late.

  An attempt to put that is still under way when "unknown" is answered may land
  at any later time; the core reckons with that.
  """

  request: int
  answer: PutAnswer


@dataclasses.dataclass(frozen=True, slots=True)
class GetAnswered:
  """The answer to `Get`. There is exactly one, however late.

  Attributes:
    request: of the `Get`.
    known: False: the store did not answer (in time); it will be asked again.
    value: what stands there; None where nothing does, or what does is not
      readable (`occupied`).
    occupied: whether something stands there that no replica of this run wrote.
  """

  request: int
  known: bool
  value: StoreValue | None
  occupied: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class StoreLost:
  """The store is of no use any more: it was started anew, for instance."""

  reason: str


# From the aggregation.


@dataclasses.dataclass(frozen=True, slots=True)
class Averaged:
  """The answer to `Average`: the mean's bytes. To the leader."""

  task: int
  mean: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Aggregated:
  """`Aggregate` or `Collect` has succeeded: the whole mean is here."""

  attempt: AttemptId
  mean: Handle


@dataclasses.dataclass(frozen=True, slots=True)
class AggregateFailed:
  """`Aggregate` or `Collect` has failed. Not said after `Cancel`.

  Attributes:
    attempt: which one.
    failed_replica: the member whose bytes did not come; None if none is to blame.
    reason: in words, for people.
  """

  attempt: AttemptId
  failed_replica: Incarnation | None
  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotFetched:
  """The answer to `FetchSnapshot`: the state, not in use yet.

  Attributes:
    transfer: of the `FetchSnapshot`.
    step: how many steps it has.
    state: to be named in `Restore`.
  """

  transfer: int
  step: int
  state: Handle


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotFailed:
  """The other answer to `FetchSnapshot`."""

  transfer: int
  reason: str


# From the training loop.


@dataclasses.dataclass(frozen=True, slots=True)
class Submitted:
  """The training loop submits a gradient, and waits for its outcome.

  It is answered by one `Resolved` or `Taken`, and there is one submission at a
  time. After `Taken` the next one contains it, and there may be a `Resolved` for
  it as well, if it was decided before that next one could be.

  Attributes:
    sequence: counts the submissions of this replica, from 0.
    extends: the sequence of the `Taken` submission that it contains; -1: none.
    admission: of the latest `Admitted` when the gradient was computed.
    local_step: the step of the parameters it was computed on.
    total: how many gradients are summed in it.
    finite: whether every number of it is finite.
    payload: its bytes, where gradients are sent inline and it is finite.
    gradient: otherwise; the driver keeps it until `Resolved`.
    batches: for the journal, as JSON text.
    compute: seconds that computing it took, if known.
    timings: for the journal, as the driver encodes them.
    data: the samples of the gradients, in the order in which they were summed.
    work: what is in it, where it is a contribution to a fragment.
  """

  sequence: int
  extends: int
  admission: int
  local_step: int
  total: int
  finite: bool
  payload: bytes
  gradient: Handle
  batches: str = ""
  compute: float | None = None
  timings: bytes = b""
  data: Spans = ()
  work: Work | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LeaveWanted:
  """The replica is to leave gracefully; answered by `Left`, or the run's end.

  If nobody can take note of it, `Left` is said after a while all the same.
  """

  reason: str = "left"


@dataclasses.dataclass(frozen=True, slots=True)
class FinishWanted:
  """The run is to end for all; answered by `Finished`."""

  reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class SaveWanted:
  """All are to save after the next commit; shown by `Publish.save`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Aborted:
  """The training loop ends by an exception, while the process lives on.

  The others learn it at once; nothing is waited for. The driver carries out the
  effects, and then closes the transport.

  Attributes:
    reason: in words.
    stacks: of its threads, if it is stuck; for the journal.
  """

  reason: str
  stacks: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class FingerprintTaken:
  """The answer to `TakeFingerprint`."""

  step: int
  digest: str


Input: TypeAlias = (
  Started
  | TimePassed
  | Received
  | Arrivals
  | Malformed
  | PeerLost
  | PutAnswered
  | GetAnswered
  | StoreLost
  | Averaged
  | Aggregated
  | AggregateFailed
  | SnapshotFetched
  | SnapshotFailed
  | Submitted
  | LeaveWanted
  | FinishWanted
  | SaveWanted
  | Aborted
  | FingerprintTaken
)

_T = TypeVar("_T")


def together(given: Iterable[_T]) -> list[_T | Received | Arrivals]:
  """The same inputs, with gradients that follow one another as `Arrivals`."""
  found: list[_T | Received | Arrivals] = []
  for arrives, group in itertools.groupby(given, _arrives):
    run = list(group)
    if arrives and len(run) > 1:
      found.append(Arrivals(tuple(run)))  # type: ignore[arg-type]
    else:
      found += run
  return found


def _arrives(given: object) -> bool:
  return type(given) is Received and type(given.message) is Arrive
