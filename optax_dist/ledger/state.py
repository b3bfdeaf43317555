"""The state of a ledger: the pool, the leases, and the committed positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from optax_dist._internal import checks
from optax_dist.ledger import spans as sp
from optax_dist.ledger.batches import Batches
from optax_dist.ledger.events import Holder, Lease
from optax_dist.ledger.progress import Progress
from optax_dist.ledger.spans import Spans


class Held(NamedTuple):
  """The samples that one replica holds.

  Attributes:
    out: samples it computes on, in its order.
    accepted: samples of its accepted gradients that are not committed yet.
    number: number of the lease; later leases have higher ones.
    copied: whether `out` may also be leased to another replica.
  """

  out: Spans = ()
  accepted: Spans = ()
  number: int = 0
  copied: bool = False


class Strike(NamedTuple):
  """Samples on each of which a gradient of a replica was not finite."""

  replica: Holder
  spans: Spans


class Streak(NamedTuple):
  """The gradients of a holder that were not finite, since its last finite one.

  Attributes:
    times: how many there were on different samples.
    spans: their samples, sorted.
  """

  times: int = 0
  spans: Spans = ()


@dataclasses.dataclass
class State:
  """The state of a ledger: a value, for `step` changes a copy of it.

  Attributes:
    data: the data that is leased.
    unit: samples in one gradient.
    need: gradients in a step.
    progress: the committed samples.
    cursor: the first position that was never leased.
    limit: the end of the positions that may be leased now; None for no limit.
    held: what each replica holds.
    replicas: the replica of each holder that takes part; empty before any `Members`.
    expected: how many replicas may still come.
    strikes: gradients that were not finite, by sample.
    streaks: by holder, which of its latest gradients were not finite.
    finite_holders: holders that have had a finite gradient.
    proven: samples with a finite gradient since the last commit.
    pool: sorted spans before `cursor` that no replica holds.
    doubtful: sorted spans with a non-finite gradient; leased again only if
      there is nothing else, or after the next commit.
    abandoned: spans with too many such gradients, to be named in the next `Commit`.
    waiting: replicas that wait for samples, and for how many gradients.
    numbers: number of leases so far.
    leases: the leases that result from the events being applied.
  """

  data: Batches
  unit: int
  need: int
  progress: Progress
  cursor: int
  limit: int | None
  held: dict[Holder, Held]
  replicas: Mapping[Holder, Holder] = dataclasses.field(default_factory=dict)
  expected: int = 0
  strikes: tuple[Strike, ...] = ()
  streaks: dict[Holder, Streak] = dataclasses.field(default_factory=dict)
  finite_holders: frozenset[Holder] = frozenset()
  proven: Spans = ()
  pool: Spans = ()
  doubtful: Spans = ()
  abandoned: Spans = ()
  waiting: tuple[tuple[Holder, int], ...] = ()
  numbers: int = 0
  leases: list[Lease] = dataclasses.field(default_factory=list)

  def copy(self) -> State:
    """A state that may be changed."""
    # Much faster than `dataclasses.replace`: it is done for every gradient.
    draft = object.__new__(State)
    draft.__dict__.update(self.__dict__)
    draft.held = dict(self.held)
    draft.leases = []
    return draft

  @property
  def left(self) -> int | None:
    """Samples that are not in a committed step; None if there is no limit."""
    total = self.data.total
    if total is None:
      return None
    return total - self.progress.done - sp.size(self.abandoned)

  @property
  def free(self) -> int:
    """Samples of a deterministic step that no replica holds."""
    assert self.limit is not None
    return sp.size(self.pool) + self.limit - self.cursor

  def can_have(self, spans: Spans) -> bool:
    """Whether a gradient can be on these samples: each once, and whole slots."""
    slot = self.unit if self.data.deterministic else 1
    return sp.size(sp.union(spans)) == sp.size(spans) and all(
      start < stop and start % slot == stop % slot == 0 for start, stop in spans
    )

  @property
  def exhausted(self) -> bool:
    """Whether the remaining samples no longer fill a step."""
    left = self.left
    return left is not None and left < self.need * self.unit


def init(
  data: Batches, gradients_per_step: int, progress: Progress | None = None
) -> State:
  """Creates a ledger without leases.

  Args:
    data: the samples, and how many a step takes.
    gradients_per_step: how many gradients share a step's samples.
    progress: from a checkpoint or the log; by default nothing is committed.

  Returns:
    A state for `step`.

  Raises:
    ValueError: the gradients of a step don't divide `data.global_batch`.
  """
  progress = Progress() if progress is None else progress
  checks.kind("data", data, Batches, "Batches")
  checks.kind("progress", progress, Progress, "a Progress, or None")
  gradients_per_step = checks.count("gradients_per_step", gradients_per_step)
  unit = data.unit(gradients_per_step)
  state = State(
    data,
    unit,
    gradients_per_step,
    progress,
    progress.next,
    0,
    {},
    pool=progress.open,
  )
  state.limit = limit_of(state)
  return state


def limit_of(state: State) -> int | None:
  """The end of the positions that may be leased now."""
  data = state.data
  done = state.progress.done + sp.size(state.abandoned)
  samples = state.need * state.unit
  size = data.per_epoch
  total = None if data.epochs is None else size * data.epochs
  if data.deterministic:
    limit = done + samples
  elif data.mode == "streaming":
    return total
  else:
    # An epoch stays open until the rest of it is too small for a step.
    limit = -(-(done + samples) // size) * size
  return limit if total is None else min(limit, total)
