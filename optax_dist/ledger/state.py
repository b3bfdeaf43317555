"""What a ledger remembers: the pool, the leases, and what is committed."""

from __future__ import annotations

from typing import Any, NamedTuple

from optax_dist.ledger import spans as sp
from optax_dist.ledger.batches import Batches
from optax_dist.ledger.events import Holder
from optax_dist.ledger.progress import Progress
from optax_dist.ledger.spans import Spans
from optax_dist.quorum.persistent import PersistentMap

EMPTY: PersistentMap[Any, Any] = PersistentMap()


class Held(NamedTuple):
  """What one replica holds.

  Attributes:
    out: what it computes on, in its order.
    inside: of gradients that are in, and in no committed step yet.
    number: of the lease; a later one has a higher one.
    copied: whether `out` may be leased to another one as well.
  """

  out: Spans = ()
  inside: Spans = ()
  number: int = 0
  copied: bool = False


class State(NamedTuple):
  """A ledger; immutable, so that old ones stay usable.

  Attributes:
    data: what is leased.
    unit: samples in one gradient.
    need: gradients in a step.
    progress: what is committed.
    cursor: the first position that was never leased.
    limit: where those end that may be leased now; None: nowhere.
    held: what each replica holds; never changed in place.
    pool: sorted spans before `cursor` that nobody holds.
    doubtful: sorted spans with which a gradient was not finite; leased again
      only when there is nothing else, or after the next commit.
    strikes: how often, by the first position of a span.
    giving_up: what was not finite too often; to be named in the next `Commit`.
    waiting: who waits for samples, and for how many gradients.
    numbers: counts leases.
  """

  data: Batches
  unit: int
  need: int
  progress: Progress
  cursor: int
  limit: int | None
  held: dict[Holder, Held]
  pool: Spans = ()
  doubtful: Spans = ()
  strikes: PersistentMap[int, int] = EMPTY
  giving_up: Spans = ()
  waiting: tuple[tuple[Holder, int], ...] = ()
  numbers: int = 0

  @property
  def left(self) -> int | None:
    """Samples that are in no committed step; None if the run goes on."""
    return left_of(self)

  @property
  def exhausted(self) -> bool:
    """Whether what is left doesn't fill a step any more."""
    left = self.left
    return left is not None and left < self.need * self.unit


def init(
  data: Batches, gradients_per_step: int, progress: Progress | None = None
) -> State:
  """A ledger before any replica has a lease.

  Args:
    data: the samples, and how many a step takes.
    gradients_per_step: how many gradients share a step's samples.
    progress: of a checkpoint, or of the log; by default nothing is committed.

  Returns:
    A state for `step`.

  Raises:
    ValueError: the gradients of a step don't divide `data.global_batch`.
  """
  progress = Progress() if progress is None else progress
  unit = data.unit(gradients_per_step)
  state = State(
    data,
    unit,
    gradients_per_step,
    progress,
    progress.next,
    0,
    {},
    progress.open,
  )
  return state._replace(limit=limit_of(state))


def left_of(state: Any) -> int | None:
  """Samples that are in no committed step; None if the run goes on."""
  total = state.data.total
  if total is None:
    return None
  return total - state.progress.done - sp.size(state.giving_up)


def limit_of(state: Any) -> int | None:
  """Where the positions end that may be leased now."""
  done = state.progress.done + sp.size(state.giving_up)
  return limit_after(state.data, done, state.need * state.unit)


def limit_after(data: Batches, done: int, samples: int) -> int | None:
  """The same, once so many are done and a step takes so many."""
  size = data.per_epoch
  total = None if data.epochs is None else size * data.epochs
  if data.mode == "streaming":
    return total
  # An epoch is open until what is left of it is no step of its own.
  limit = -(-(done + samples) // size) * size
  return limit if total is None else min(limit, total)
