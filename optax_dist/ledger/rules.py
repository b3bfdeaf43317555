"""The rules of a ledger; see `optax_dist.ledger`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from optax_dist.ledger import events as ev
from optax_dist.ledger import spans as sp
from optax_dist.ledger.batches import Batches
from optax_dist.ledger.progress import Progress
from optax_dist.ledger.spans import Spans
from optax_dist.ledger.state import Held, State, left_of, limit_of

# How often samples may give a non-finite gradient.
_STRIKES = 3
_NOTHING = Held()
_FIELDS = operator.attrgetter(*State._fields)


class _Draft:
  """A mutable copy of a state while an event is applied to it."""

  __slots__ = (*State._fields, "leases")

  # The fields of State.
  data: Batches
  unit: int
  need: int
  progress: Progress
  cursor: int
  limit: int | None
  held: dict[ev.Holder, Held]
  strikes: dict[int, int]
  pool: Spans
  doubtful: Spans
  giving_up: Spans
  waiting: tuple[tuple[ev.Holder, int], ...]
  numbers: int

  def __init__(self, state: State):
    # Field by field: this is done for every gradient of a run.
    (
      self.data,
      self.unit,
      self.need,
      self.progress,
      self.cursor,
      self.limit,
      held,
      strikes,
      self.pool,
      self.doubtful,
      self.giving_up,
      self.waiting,
      self.numbers,
    ) = state
    self.held, self.strikes = dict(held), dict(strikes)
    self.leases: list[ev.Lease] = []

  def freeze(self) -> State:
    return State._make(_FIELDS(self))

  def of(self, holder: ev.Holder) -> Held:
    return self.held.get(holder, _NOTHING)

  def hold(self, holder: ev.Holder, held: Held) -> None:
    if held.out or held.inside:
      self.held[holder] = held
    else:
      self.held.pop(holder, None)

  def give_back(self, holder: ev.Holder, spans: Spans, copied: bool) -> None:
    """Returns samples that no other replica holds to the pool."""
    if copied:
      for other, held in self.held.items():
        if other != holder:
          spans = sp.minus(sp.union(spans), held.out)
          spans = sp.minus(spans, held.inside)
      spans = sp.minus(sp.union(spans), self.pool)
    if spans:
      self.pool = sp.union(self.pool, spans)

  def return_out(self, holder: ev.Holder) -> None:
    """Returns the samples it computes on to the pool."""
    held = self.of(holder)
    if held.out:
      self.hold(holder, held._replace(out=(), copied=False))
      self.give_back(holder, held.out, held.copied)

  def wait(self, holder: ev.Holder, count: int) -> None:
    self.stop_waiting(holder)
    self.waiting = (*self.waiting, (holder, count))

  def stop_waiting(self, holder: ev.Holder) -> None:
    if self.waiting:
      self.waiting = tuple(w for w in self.waiting if w[0] != holder)

  def serve(self) -> None:
    """Leases available samples to replicas that wait."""
    left = left_of(self)
    if left is not None and left < self.need * self.unit:
      return
    deterministic = self.data.deterministic
    for holder, count in self.waiting:
      spans = self.take(count)
      copied = False
      if not spans and not deterministic:
        spans, copied = self.copy(holder, count), True
      if spans:
        self.lend(holder, spans, copied)

  def lend(self, holder: ev.Holder, spans: Spans, copied: bool) -> None:
    """Leases samples to a replica that waits for some."""
    self.stop_waiting(holder)
    inside = self.of(holder).inside
    self.hold(holder, Held(spans, inside, self.numbers, copied))
    self.numbers += 1
    self.leases.append(ev.Lease(holder, spans))

  def take(self, count: int) -> Spans:
    """Takes free samples: returned ones first, then new ones."""
    unit = self.unit
    pool, cursor, limit = self.pool, self.cursor, self.limit
    most = count * unit
    if not pool and (limit is None or cursor + most <= limit):
      self.cursor = cursor + most
      return ((cursor, cursor + most),)
    later: Spans = ()
    if limit is not None and pool and pool[-1][1] > limit:
      later = sp.minus(pool, ((0, limit),))
      pool = sp.minus(pool, later)
    free = sp.size(pool) if pool else 0
    new = max(most - free, 0)
    if limit is not None:
      new = min(new, max(limit - cursor, 0))
    # As many as fill whole gradients.
    most = min(free + new, most) // unit * unit
    if most:
      first, rest = sp.head(pool, most) if pool else ((), ())
      new = most - min(free, most)
      if new:
        first = sp.join(first, ((cursor, cursor + new),))
      self.pool, self.cursor = sp.join(rest, later), cursor + new
      return first
    if not self.doubtful:
      return ()
    self.settle_doubts()
    return self.take(count)

  def settle_doubts(self) -> None:
    if self.doubtful:
      self.pool, self.doubtful = sp.union(self.pool, self.doubtful), ()

  def copy(self, holder: ev.Holder, count: int) -> Spans:
    """Samples that another replica computes on: the first gradient counts."""
    found = [
      (held.copied, held.out[0], held.number, other)
      for other, held in self.held.items()
      if held.out and other != holder
    ]
    if not found:
      return ()
    other = min(found)[-1]
    held = self.of(other)
    self.hold(other, held._replace(copied=True))
    most = min(count * self.unit, sp.size(held.out))
    return sp.head(held.out, most // self.unit * self.unit)[0]


def step(state: State, *events: ev.Event) -> tuple[State, tuple[ev.Lease, ...]]:
  """Applies events, one after the other.

  The same state and events always give the same result, and the old state stays
  usable.

  Args:
    state: from `init`, or from an earlier `step`.
    *events: the events.

  Returns:
    The next state, and the leases for holders that asked, or that have waited
    for samples freed by an event. A holder that gets none waits.

  Raises:
    ValueError: the event is impossible: a gradient on samples that are not
      leased to its replica (see `fits`), or a commit of one that was not
      accepted.
  """
  draft = _Draft(state)
  for event in events:
    _HANDLERS[type(event)](draft, event)
    if draft.waiting:
      draft.serve()
  return draft.freeze(), tuple(draft.leases)


def fits(state: State | _Draft, holder: ev.Holder, spans: Spans) -> bool:
  """Whether a gradient on these samples may count.

  It may not if they were not leased to this replica, or if another replica with
  the same lease was first.

  Args:
    state: state of the ledger.
    holder: the replica.
    spans: the samples of its gradient.

  Returns:
    Whether `Accept` is possible.
  """
  out = state.held.get(holder, _NOTHING).out
  if out == spans:
    return bool(spans)
  return bool(spans) and not sp.minus(sp.union(spans), out)


def _ask(draft: _Draft, event: ev.Ask) -> None:
  draft.return_out(event.holder)
  draft.wait(event.holder, event.count)


def _claim(draft: _Draft, event: ev.Claim) -> None:
  state, holder, spans = draft, event.holder, event.spans
  draft.return_out(holder)
  taken = [state.of(holder).inside]
  for other, held in state.held.items():
    if other != holder:
      taken += [held.out, held.inside]
  if state.data.deterministic:
    # A slot may be leased twice; the rest of such a lease stays.
    spans = sp.minus(spans, (span for part in taken for span in part))
    spans = sp.minus(spans, ((0, state.progress.next),))
  if (
    not spans
    or any(sp.overlap(part, spans) for part in taken)
    or not state.progress.is_open(spans)
    or sp.overlap(state.giving_up, spans)
    or sp.size(spans) % state.unit
    or sp.size(sp.union(spans)) != sp.size(spans)
    # An earlier leader may have given up samples that are open again.
    or (state.limit is not None and max(b for _, b in spans) > state.limit)
  ):
    draft.wait(holder, event.count)
    return
  draft.stop_waiting(holder)
  sorted_ = sp.union(spans)
  pool, end = draft.pool, sorted_[-1][1]
  if end > draft.cursor:
    pool = sp.union(pool, ((draft.cursor, end),))
  draft.pool = sp.minus(pool, sorted_)
  draft.doubtful = sp.minus(draft.doubtful, sorted_)
  draft.cursor = max(draft.cursor, end)
  draft.hold(holder, Held(spans, draft.of(holder).inside, draft.numbers))
  draft.numbers += 1


def _accept(draft: _Draft, event: ev.Accept) -> None:
  holder, spans = event.holder, event.spans
  if not fits(draft, holder, spans):
    raise ValueError(f"{spans} are not leased to {holder!r}.")
  held = draft.of(holder)
  rest = () if held.out == spans else _minus(held.out, spans)
  inside = sp.join(held.inside, spans) if held.inside else spans
  copied = held.copied
  draft.hold(holder, Held(rest, inside, held.number, copied and bool(rest)))
  if copied:
    for other, theirs in list(draft.held.items()):
      if other != holder and sp.overlap(theirs.out, spans):
        out = _minus(theirs.out, spans)
        draft.hold(other, theirs._replace(out=out))
        if draft.data.deterministic and not out:
          draft.wait(other, 1)  # It has a token, and nothing to compute.


def _copy(draft: _Draft, event: ev.Copy) -> None:
  for other, theirs in list(draft.held.items()):
    if sp.overlap(theirs.out, event.spans):
      draft.hold(other, theirs._replace(copied=True))
  draft.lend(event.holder, event.spans, True)


def _drop(draft: _Draft, event: ev.Drop) -> None:
  holder, spans = event.holder, event.spans
  held = draft.of(holder)
  mine = sp.union(held.out, held.inside)
  spans = sp.common(sp.union(spans), mine)
  if not spans:
    return
  out, inside = _minus(held.out, spans), _minus(held.inside, spans)
  draft.hold(holder, held._replace(out=out, inside=inside))
  if event.finite:
    draft.give_back(holder, spans, held.copied)
    return
  for other, theirs in list(draft.held.items()):
    if held.copied and other != holder:
      # No other replica should compute on them in vain.
      draft.hold(other, theirs._replace(out=_minus(theirs.out, spans)))
  first = spans[0][0]
  strikes = draft.strikes.get(first, 0) + 1
  if strikes < _STRIKES:
    draft.strikes[first] = strikes
    draft.doubtful = sp.union(draft.doubtful, spans)
    return
  draft.strikes.pop(first, None)
  draft.giving_up = sp.union(draft.giving_up, spans)
  draft.limit = limit_of(draft)


def _gone(draft: _Draft, event: ev.Gone) -> None:
  draft.stop_waiting(event.holder)
  held = draft.of(event.holder)
  draft.hold(event.holder, Held((), event.keep))
  returned = sp.minus(sp.union(held.out, held.inside), event.keep)
  draft.give_back(event.holder, returned, held.copied)


def _commit(draft: _Draft, event: ev.Commit) -> None:
  spans: list[tuple[int, int]] = []
  for holder, part in event.parts:
    held = draft.of(holder)
    inside: Spans = ()
    if held.inside != part:
      inside = _minus(held.inside, part)
      if sp.size(held.inside) - sp.size(inside) != sp.size(part):
        raise ValueError(f"No gradient of {holder!r} on {part} is in.")
    draft.hold(holder, Held(held.out, inside, held.number, held.copied))
    spans += part
  draft.progress = draft.progress.commit(spans, event.skipped)
  if event.skipped:
    draft.giving_up = sp.minus(draft.giving_up, event.skipped)
  draft.settle_doubts()
  draft.limit = limit_of(draft)
  if draft.data.deterministic:
    draft.waiting = ()  # All ask for a part of the next step.


def _need(draft: _Draft, event: ev.Need) -> None:
  if event.gradients != draft.need:
    draft.need = event.gradients
    draft.limit = limit_of(draft)


def _minus(spans: Spans, others: Spans) -> Spans:
  """The same as `minus`, for spans that need not be sorted."""
  return tuple(piece for span in spans for piece in sp.minus((span,), others))


_HANDLERS: dict[type, Callable[[_Draft, Any], None]] = {
  ev.Ask: _ask,
  ev.Claim: _claim,
  ev.Accept: _accept,
  ev.Drop: _drop,
  ev.Gone: _gone,
  ev.Copy: _copy,
  ev.Commit: _commit,
  ev.Need: _need,
}
