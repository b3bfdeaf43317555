"""The positions in committed steps, as recorded in the log."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from optax_dist.ledger import spans as sp
from optax_dist.ledger.batches import Batches
from optax_dist.ledger.spans import Span, Spans


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
  """The committed positions, in compact form for log, snapshot and checkpoint.

  Attributes:
    next: all positions before it are done, except for those in `open`.
    open: sorted spans before `next` that are not in a committed step (yet).
    skipped: sorted spans that were abandoned because their gradients were never
      finite; in a deterministic run these are slots that counted as zeros.
    data: in a checkpoint, the data that the positions belong to; None otherwise.

  Example:
    >>> progress = Progress().commit(((4, 8),))
    >>> progress
    Progress(next=8, open=((0, 4),), skipped=())
    >>> progress.commit(((0, 4),)).done
    8
  """

  next: int = 0
  open: Spans = ()
  skipped: Spans = ()
  data: Batches | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  @property
  def done(self) -> int:
    """The number of positions that are committed or were abandoned."""
    return self.next - sp.size(self.open)

  def check(self, data: Batches | None = None) -> None:
    """Refuses a progress that no run can have.

    Args:
      data: the run's data; None if it is not known.

    Raises:
      ValueError: the message says what is wrong.

    Example:
      >>> Progress(next=4, open=((2, 6),)).check()
      Traceback (most recent call last):
        ...
      ValueError: open is not sorted spans of positions before next=4, but ((2, 6),).
    """
    whole = sp.union(((0, self.next),))
    if self.next < 0:
      raise ValueError(f"next is not a position from 0, but {self.next}.")
    for name in ("open", "skipped"):
      spans = getattr(self, name)
      if sp.union(spans) != spans or sp.minus(spans, whole):
        raise ValueError(
          f"{name} is not sorted spans of positions before next={self.next}, but"
          f" {spans!r:.100}."
        )
    both = sp.common(self.open, self.skipped)
    if both:
      raise ValueError(
        f"open and skipped have positions in common: {both!r:.100}."
      )
    if data is not None and self.data is not None:
      had, has = self.data.order, data.order
      differ = [name for name in has if had[name] != has[name]]
      if differ:
        before, now = (
          ", ".join(f"{name}={order[name]}" for name in differ)
          for order in (had, has)
        )
        raise ValueError(
          f"it is of data with {before}, and this has {now}, so other samples are"
          " at its positions. Give the same data, or leave progress out to begin"
          " with an epoch."
        )
    total = None if data is None else data.total
    if total is not None and self.next > total:
      raise ValueError(
        f"next={self.next} is beyond the {total} positions of the data. Is it of"
        " other data, or of more epochs?"
      )

  def commit(self, spans: Iterable[Span], skipped: Spans = ()) -> Progress:
    """Adds a committed step with these positions, and skipped ones.

    Args:
      spans: the positions.
      skipped: sorted; in or outside of `spans`.

    Raises:
      ValueError: a position was done before.
    """
    spans = tuple(spans)
    spans += sp.minus(skipped, spans)
    longer = None if skipped else self.followed_by(spans)
    if longer is not None:
      return longer
    after = self.with_(spans, skipped)
    if after.done - self.done != sp.size(spans):
      raise ValueError(f"Some of {spans} were in a committed step before.")
    return after

  def with_(self, spans: Iterable[Span], skipped: Spans = ()) -> Progress:
    """Like `commit`, but a step may be added twice."""
    spans = sp.union(spans, skipped)
    following = max(self.next, spans[-1][1])
    open_ = sp.join(self.open, ((self.next, following),))
    given_up = sp.union(self.skipped, skipped)
    return Progress(following, sp.minus(open_, spans), given_up)

  def followed_by(self, spans: Iterable[Span]) -> Progress | None:
    """Like `commit`, if the spans directly follow; None otherwise.

    This is nearly always so, and much faster.

    Example:
      >>> Progress(4).followed_by(((4, 6), (6, 8)))
      Progress(next=8, open=(), skipped=())
      >>> Progress(4).followed_by(((6, 8), (4, 6)))
    """
    following = self.next
    for start, stop in spans:
      if start != following:
        return None
      following = stop
    return Progress(following, self.open, self.skipped)

  def is_open(self, spans: Iterable[Span]) -> bool:
    """Whether none of these positions is done."""
    others = sp.minus(sp.union(spans), self.open)
    return all(start >= self.next for start, _ in others)


# The progress at the start of a run.
NOTHING_DONE = Progress()


@dataclasses.dataclass(frozen=True, slots=True)
class EpochReport:
  """The outcome of an epoch's samples.

  Attributes:
    epoch: the epoch, from 0.
    committed: how many samples are in committed steps, exactly once each.
    left_out: samples that don't fill a batch, in exact mode.
    skipped: samples whose gradients were never finite; in a deterministic run they
      count as zeros.
    open: samples that are not in a committed step so far; after the end of a
      run, samples that were not used, or were abandoned after the last step.
  """

  epoch: int
  committed: int
  left_out: tuple[int, ...]
  skipped: tuple[int, ...]
  open: tuple[int, ...]


def report(data: Batches, progress: Progress) -> tuple[EpochReport, ...]:
  """The outcome of each epoch that has begun, with samples by index.

  Example:
    >>> data = Batches(num_samples=10, global_batch=4, seed=1)
    >>> report(data, Progress().commit(((0, 4),)))[0]
    EpochReport(epoch=0, committed=4, left_out=(1, 2), skipped=(), open=(0, 5, 6, 9))
  """
  reports = []
  size = data.per_epoch
  end = -(-progress.next // size)
  for epoch in range(end if data.epochs is None else data.epochs):
    start, stop = epoch * size, (epoch + 1) * size
    whole = ((start, stop),)
    skipped = sp.common(progress.skipped, whole)
    behind = sp.common(progress.open, whole)
    ahead = sp.minus(whole, ((0, progress.next),))
    open_ = sp.union(behind, ahead)
    reports.append(
      EpochReport(
        epoch,
        size - sp.size(skipped) - sp.size(open_),
        tuple(data.left_out(epoch).tolist()),
        _numbers(data, skipped),
        _numbers(data, open_),
      )
    )
  return tuple(reports)


def described(data: Batches, spans: Spans, most: int = 20) -> str:
  """Names the samples at some positions, human-readable.

  Example:
    >>> data = Batches(num_samples=4, global_batch=2, epochs=2, shuffle=False)
    >>> described(data, ((1, 2), (4, 8)), most=3)
    'sample 1 of epoch 0; samples 0, 1 of epoch 1 and 2 others'
  """
  texts, size = [], data.per_epoch
  shown, rest = sp.head(spans, most)
  for epoch in range(shown[0][0] // size, (shown[-1][1] - 1) // size + 1):
    whole = ((epoch * size, (epoch + 1) * size),)
    numbers = _numbers(data, sp.common(shown, whole))
    if numbers:
      plural = "s" if len(numbers) > 1 else ""
      listed = ", ".join(map(str, numbers))
      texts.append(f"sample{plural} {listed} of epoch {epoch}")
  more = f" and {sp.size(rest)} others" if rest else ""
  return "; ".join(texts) + more


def _numbers(data: Batches, spans: Spans) -> tuple[int, ...]:
  return tuple(sorted(data.indices(spans).tolist()))
