"""How a ledger answers events; see `optax_dist.ledger`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optax_dist.ledger import events as ev
from optax_dist.ledger import spans as sp
from optax_dist.ledger.batches import Batches
from optax_dist.ledger.progress import Progress
from optax_dist.ledger.spans import Spans
from optax_dist.ledger.state import Held, State, left_of, limit_of
from optax_dist.quorum.persistent import PersistentMap

# So often samples may bring a gradient that is not finite.
_STRIKES = 3
_NOTHING = Held()


class _Draft:
  """A state that an event is changing: mutable, and never returned."""

  def __init__(self, state: State):
    self.__dict__.update(zip(State._fields, state, strict=True))
    self.leases: list[ev.Lease] = []
    self._copied = False

  # The fields of State; mypy cannot see them arrive through __dict__.
  data: Batches
  unit: int
  need: int
  progress: Progress
  cursor: int
  limit: int | None
  pool: Spans
  doubtful: Spans
  strikes: PersistentMap[int, int]
  giving_up: Spans
  held: dict[ev.Holder, Held]
  waiting: tuple[tuple[ev.Holder, int], ...]
  numbers: int

  def freeze(self) -> State:
    return State(*map(self.__dict__.__getitem__, State._fields))

  def set(self, **changes: Any) -> None:
    self.__dict__.update(changes)

  def of(self, holder: ev.Holder) -> Held:
    return self.held.get(holder, _NOTHING)

  def hold(self, holder: ev.Holder, held: Held) -> None:
    if not self._copied:
      # The state that the draft was made of stays as it is.
      self.held, self._copied = self.held.copy(), True
    if held.out or held.inside:
      self.held[holder] = held
    else:
      self.held.pop(holder, None)

  def give_back(self, holder: ev.Holder, spans: Spans, copied: bool) -> None:
    """Puts into the pool what nobody else holds."""
    if copied:
      for other, held in self.held.items():
        if other != holder:
          spans = sp.minus(sp.union(spans), held.out)
          spans = sp.minus(spans, held.inside)
      spans = sp.minus(sp.union(spans), self.pool)
    if spans:
      self.set(pool=sp.union(self.pool, spans))

  def return_out(self, holder: ev.Holder) -> None:
    """What it computes on returns to the pool."""
    held = self.of(holder)
    if held.out:
      self.hold(holder, held._replace(out=(), copied=False))
      self.give_back(holder, held.out, held.copied)

  def wait(self, holder: ev.Holder, count: int) -> None:
    self.stop_waiting(holder)
    self.set(waiting=(*self.waiting, (holder, count)))

  def stop_waiting(self, holder: ev.Holder) -> None:
    waiting = self.waiting
    if any(other == holder for other, _ in waiting):
      self.set(waiting=tuple(w for w in waiting if w[0] != holder))

  def serve(self) -> None:
    """Leases what there is to those who wait."""
    for holder, count in self.waiting:
      left = left_of(self)
      if left is not None and left < self.need * self.unit:
        return
      spans = self.take(count)
      copied = False
      if not spans:
        spans, copied = self.copy(holder, count), True
      if spans:
        self.stop_waiting(holder)
        number = self.numbers
        self.set(numbers=number + 1)
        held = self.of(holder)
        held = held._replace(out=spans, number=number, copied=copied)
        self.hold(holder, held)
        self.leases.append(ev.Lease(holder, spans))

  def take(self, count: int) -> Spans:
    """Takes samples that nobody holds: returned ones first, then new ones."""
    state, unit = self, self.unit
    pool, cursor, limit = state.pool, state.cursor, state.limit
    most = count * unit
    later: Spans = ()
    if limit is not None and pool and pool[-1][1] > limit:
      later = sp.minus(pool, ((0, limit),))
      pool = sp.minus(pool, later)
    free = sp.size(pool) if pool else 0
    new = max(most - free, 0)
    if limit is not None:
      new = min(new, max(limit - cursor, 0))
    # As many as make whole gradients.
    most = min(free + new, most) // unit * unit
    if most:
      first, rest = sp.head(pool, most) if pool else ((), ())
      new = most - min(free, most)
      if new:
        first = sp.join(first, ((cursor, cursor + new),))
      self.set(pool=sp.join(rest, later), cursor=cursor + new)
      return first
    if not state.doubtful:
      return ()
    self.settle_doubts()
    return self.take(count)

  def settle_doubts(self) -> None:
    state = self
    if state.doubtful:
      self.set(pool=sp.union(state.pool, state.doubtful), doubtful=())

  def copy(self, holder: ev.Holder, count: int) -> Spans:
    """Samples that another one computes on: the first one counts."""
    state = self
    found = [
      (held.copied, held.out[0], held.number, other)
      for other, held in state.held.items()
      if held.out and other != holder
    ]
    if not found:
      return ()
    other = min(found)[-1]
    held = self.of(other)
    self.hold(other, held._replace(copied=True))
    most = min(count * state.unit, sp.size(held.out))
    return sp.head(held.out, most // state.unit * state.unit)[0]


def step(state: State, event: ev.Event) -> tuple[State, tuple[ev.Lease, ...]]:
  """Applies one event.

  The same state and event always give the same answer, and the old state stays
  usable.

  Args:
    state: of `init`, or of an earlier `step`.
    event: what has happened.

  Returns:
    The next state, and the leases: of each that asked, or has waited for samples
    that this event has freed. One that gets none waits.

  Raises:
    ValueError: the event can't be: a gradient on samples that are not leased to
      its replica (see `fits`), or a commit of one that is not in.
  """
  draft = _Draft(state)
  _HANDLERS[type(event)](draft, event)
  if draft.waiting:
    draft.serve()
  return draft.freeze(), tuple(draft.leases)


def fits(state: State | _Draft, holder: ev.Holder, spans: Spans) -> bool:
  """Whether a gradient on these samples may count.

  It may not if they were not leased to this replica, or if another one that was
  leased the same has come first.

  Args:
    state: of the ledger.
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
  others = (h for other, h in state.held.items() if other != holder)
  taken = any(
    sp.overlap(held.out, spans) or sp.overlap(held.inside, spans)
    for held in others
  )
  inside = draft.of(holder).inside
  total = state.data.total
  if (
    not spans
    or taken
    or sp.overlap(inside, spans)
    or not state.progress.is_open(spans)
    or sp.overlap(state.giving_up, spans)
    or sp.size(spans) % state.unit
    or sp.size(sp.union(spans)) != sp.size(spans)
    or (total is not None and max(stop for _, stop in spans) > total)
  ):
    draft.wait(holder, event.count)
    return
  draft.stop_waiting(holder)
  state = draft
  sorted_ = sp.union(spans)
  pool, end = state.pool, sorted_[-1][1]
  if end > state.cursor:
    pool = sp.union(pool, ((state.cursor, end),))
  number = state.numbers
  draft.set(
    pool=sp.minus(pool, sorted_),
    doubtful=sp.minus(state.doubtful, sorted_),
    cursor=max(state.cursor, end),
    numbers=number + 1,
  )
  held = draft.of(holder)
  draft.hold(holder, held._replace(out=spans, number=number, copied=False))


def _accept(draft: _Draft, event: ev.Accept) -> None:
  holder, spans = event.holder, event.spans
  if not fits(draft, holder, spans):
    raise ValueError(f"{spans} are not leased to {holder!r}.")
  held = draft.of(holder)
  rest = () if held.out == spans else _minus(held.out, spans)
  inside = sp.join(held.inside, spans)
  copied = held.copied
  draft.hold(holder, Held(rest, inside, held.number, copied and bool(rest)))
  if copied:
    for other, theirs in list(draft.held.items()):
      if other != holder and sp.overlap(theirs.out, spans):
        out = _minus(theirs.out, spans)
        draft.hold(other, theirs._replace(out=out))


def _drop(draft: _Draft, event: ev.Drop) -> None:
  holder, spans = event.holder, event.spans
  held = draft.of(holder)
  mine = sp.union(held.out, held.inside)
  spans = sp.minus(sp.union(spans), sp.minus(sp.union(spans), mine))
  if not spans:
    return
  out, inside = _minus(held.out, spans), _minus(held.inside, spans)
  draft.hold(holder, held._replace(out=out, inside=inside))
  if event.finite:
    draft.give_back(holder, spans, held.copied)
    return
  state = draft
  for other, theirs in list(state.held.items()):
    if held.copied and other != holder:
      # Nobody else is to find out the same.
      draft.hold(other, theirs._replace(out=_minus(theirs.out, spans)))
  first = spans[0][0]
  strikes = state.strikes.get(first, 0) + 1
  if strikes < _STRIKES:
    draft.set(
      strikes=state.strikes.set(first, strikes),
      doubtful=sp.union(state.doubtful, spans),
    )
    return
  draft.set(
    strikes=state.strikes.delete(first),
    giving_up=sp.union(state.giving_up, spans),
  )
  draft.set(limit=limit_of(draft))


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
    inside = () if held.inside == part else _minus(held.inside, part)
    if sp.size(held.inside) - sp.size(inside) != sp.size(part):
      raise ValueError(f"No gradient of {holder!r} on {part} is in.")
    draft.hold(holder, held._replace(inside=inside))
    spans += part
  progress = draft.progress.commit(spans, event.skipped)
  draft.set(progress=progress)
  if event.skipped:
    giving_up = sp.minus(draft.giving_up, event.skipped)
    draft.set(giving_up=giving_up)
  draft.settle_doubts()
  draft.set(limit=limit_of(draft))


def _need(draft: _Draft, event: ev.Need) -> None:
  if event.gradients != draft.need:
    draft.set(need=event.gradients)
    draft.set(limit=limit_of(draft))


def _minus(spans: Spans, others: Spans) -> Spans:
  """The same as `minus`, for spans that need not be sorted."""
  return tuple(piece for span in spans for piece in sp.minus((span,), others))


_HANDLERS: dict[type, Callable[[_Draft, Any], None]] = {
  ev.Ask: _ask,
  ev.Claim: _claim,
  ev.Accept: _accept,
  ev.Drop: _drop,
  ev.Gone: _gone,
  ev.Commit: _commit,
  ev.Need: _need,
}
