"""Which positions are in committed steps: what the log says of the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from optax_dist.ledger import spans as sp
from optax_dist.ledger.batches import Batches
from optax_dist.ledger.spans import Span, Spans


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
  """What is done, in a few numbers: it goes by log, snapshot and checkpoint.

  Attributes:
    next: all positions before it are done, but for those in `open`.
    open: sorted spans before `next` that are in no committed step (yet).
    skipped: sorted spans that were given up, because their gradients were never
      finite.

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

  @property
  def done(self) -> int:
    """How many positions are committed or were given up."""
    return self.next - sp.size(self.open)

  def commit(self, spans: Iterable[Span], skipped: Spans = ()) -> Progress:
    """A step with these positions is committed, and some are given up.

    Raises:
      ValueError: one of them was done before.
    """
    spans = (*spans, *skipped)
    found = None if skipped else self.followed_by(spans)
    if found is not None:
      return found
    after = self.with_(spans, skipped)
    if after.done - self.done != sp.size(spans):
      raise ValueError(f"Some of {spans} were in a committed step before.")
    return after

  def with_(self, spans: Iterable[Span], skipped: Spans = ()) -> Progress:
    """The same, where a step may be counted twice."""
    spans = tuple(spans)
    found = None if skipped else self.followed_by(spans)
    if found is not None:
      return found
    spans = sp.union(spans, skipped)
    following = max(self.next, spans[-1][1])
    open_ = self.open
    if following > self.next:
      open_ = sp.join(open_, ((self.next, following),))
    given_up = sp.union(self.skipped, skipped)
    return Progress(following, sp.minus(open_, spans), given_up)

  def followed_by(self, spans: Iterable[Span]) -> Progress | None:
    """The same as `commit`, if they are just what follows; None otherwise.

    They nearly always are, and this is much quicker.

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
    spans = tuple(spans)
    inner = [(a, min(b, self.next)) for a, b in spans if a < self.next]
    return not sp.minus(sp.union(inner), self.open)


# Of a run that begins.
NOTHING_DONE = Progress()


@dataclasses.dataclass(frozen=True, slots=True)
class EpochReport:
  """What became of the samples of an epoch.

  Attributes:
    epoch: which one, from 0.
    committed: how many samples are in committed steps; each in one.
    left_out: samples that don't fill a batch, in exact mode.
    skipped: samples whose gradients were never finite.
    open: samples that are in no committed step so far; after the end of a run,
      those that it did without.
  """

  epoch: int
  committed: int
  left_out: tuple[int, ...]
  skipped: tuple[int, ...]
  open: tuple[int, ...]


def report(data: Batches, progress: Progress) -> tuple[EpochReport, ...]:
  """What became of each epoch that has begun; samples by their number.

  Example:
    >>> data = Batches(num_samples=10, global_batch=4, seed=1)
    >>> report(data, Progress().commit(((0, 4),)))[0]
    EpochReport(epoch=0, committed=4, left_out=(1, 2), skipped=(), open=(0, 5, 6, 9))
  """
  found = []
  size = data.per_epoch
  end = -(-progress.next // size)
  for epoch in range(end if data.epochs is None else data.epochs):
    start, stop = epoch * size, (epoch + 1) * size
    whole = ((start, stop),)
    skipped = _within(progress.skipped, start, stop)
    behind = _within(progress.open, start, stop)
    ahead = sp.minus(whole, ((0, progress.next),))
    open_ = sp.union(behind, ahead)
    found.append(
      EpochReport(
        epoch,
        size - sp.size(skipped) - sp.size(open_),
        tuple(data.left_out(epoch).tolist()),
        _numbers(data, skipped),
        _numbers(data, open_),
      )
    )
  return tuple(found)


def _within(spans: Spans, start: int, stop: int) -> Spans:
  return sp.minus(spans, ((0, start), (stop, max(stop, _end(spans)))))


def _end(spans: Spans) -> int:
  return spans[-1][1] if spans else 0


def _numbers(data: Batches, spans: Spans) -> tuple[int, ...]:
  return tuple(sorted(data.indices(spans).tolist()))
