"""The rules of a ledger; see `optax_dist.ledger`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optax_dist.ledger import events as ev
from optax_dist.ledger import not_finite
from optax_dist.ledger import spans as sp
from optax_dist.ledger.spans import Spans
from optax_dist.ledger.state import Held, State, limit_of

_NOTHING = Held()


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
  draft = state.copy()
  for event in events:
    _HANDLERS[type(event)](draft, event)
    if draft.waiting:
      _serve(draft)
  leases, draft.leases = tuple(draft.leases), []
  return draft, leases


def fits(state: State, holder: ev.Holder, spans: Spans) -> bool:
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


def _ask(draft: State, event: ev.Ask) -> None:
  _check_count(event.count)
  _return_out(draft, event.holder)
  _wait(draft, event.holder, event.count)


def _check_count(count: int) -> None:
  if type(count) is not int or count < 1:
    raise ValueError(f"count must be a positive integer, got {count!r}.")


def _claim(draft: State, event: ev.Claim) -> None:
  _check_count(event.count)
  state, holder, spans = draft, event.holder, event.spans
  _return_out(draft, holder)
  taken = [_held(state, holder).accepted]
  for other, held in state.held.items():
    if other != holder:
      taken += [held.out, held.accepted]
  if not state.can_have(spans):
    spans = ()
  if state.data.deterministic:
    # A slot may be leased twice; the rest of such a lease stays.
    spans = sp.minus(spans, (span for part in taken for span in part))
    spans = sp.minus(spans, ((0, state.progress.next),))
  if (
    not spans
    or any(sp.overlap(part, spans) for part in taken)
    or not state.progress.is_open(spans)
    or sp.overlap(state.abandoned, spans)
    or sp.size(spans) % state.unit
    # An earlier coordinator may have abandoned samples that are open again now, so that
    # its limit was higher.
    or (state.limit is not None and max(b for _, b in spans) > state.limit)
  ):
    _wait(draft, holder, event.count)
    return
  _stop_waiting(draft, holder)
  sorted_ = sp.union(spans)
  pool, end = draft.pool, sorted_[-1][1]
  if end > draft.cursor:
    pool = sp.union(pool, ((draft.cursor, end),))
  draft.pool = sp.minus(pool, sorted_)
  draft.doubtful = sp.minus(draft.doubtful, sorted_)
  draft.cursor = max(draft.cursor, end)
  _hold(
    draft, holder, Held(spans, _held(draft, holder).accepted, draft.numbers)
  )
  draft.numbers += 1


def _accept(draft: State, event: ev.Accept) -> None:
  holder, spans = event.holder, event.spans
  if not fits(draft, holder, spans):
    raise ValueError(f"{spans} are not leased to {holder!r}.")
  held = _held(draft, holder)
  if event.zeros:
    not_finite.strike(draft, holder, event.zeros)
  # Last, since finite gradients among them restore the trust in the holder.
  if holder not in draft.finite_holders or draft.streaks or draft.strikes:
    not_finite.finite(draft, holder, sp.minus(sp.union(spans), event.zeros))
  rest = () if held.out == spans else _minus(held.out, spans)
  accepted = sp.join(held.accepted, spans) if held.accepted else spans
  copied = held.copied
  _hold(draft, holder, Held(rest, accepted, held.number, copied and bool(rest)))
  if copied:
    for other, theirs in list(draft.held.items()):
      if other != holder and sp.overlap(theirs.out, spans):
        out = _minus(theirs.out, spans)
        _hold(draft, other, theirs._replace(out=out))
        if draft.data.deterministic and not out:
          _wait(draft, other, 1)  # It keeps its token, without samples.


def _copy(draft: State, event: ev.Copy) -> None:
  for other, theirs in list(draft.held.items()):
    if sp.overlap(theirs.out, event.spans):
      _hold(draft, other, theirs._replace(copied=True))
  _assign(draft, event.holder, event.spans, True)


def _drop(draft: State, event: ev.Drop) -> None:
  holder, spans = event.holder, event.spans
  if event.finite:
    not_finite.finite(draft, holder, sp.union(spans))
  held = _held(draft, holder)
  mine = sp.union(held.out, held.accepted)
  spans = sp.common(sp.union(spans), mine)
  if not spans:
    return
  out, accepted = _minus(held.out, spans), _minus(held.accepted, spans)
  _hold(draft, holder, held._replace(out=out, accepted=accepted))
  given_up: Spans = ()
  if event.finite is False:
    given_up = not_finite.strike(draft, holder, spans)
  if event.finite is not False or draft.data.deterministic:
    _give_back(draft, holder, spans, held.copied)
    return
  for other, theirs in list(draft.held.items()):
    if held.copied and given_up and other != holder:
      # No other replica should compute on them in vain.
      _hold(draft, other, theirs._replace(out=_minus(theirs.out, given_up)))
  rest = sp.minus(spans, given_up)
  if held.copied:
    rest = _held_by_nobody(draft, holder, rest)
  draft.doubtful = sp.union(draft.doubtful, rest)
  if given_up:
    draft.abandoned = sp.union(draft.abandoned, given_up)
    draft.limit = limit_of(draft)


def _holder_lost(draft: State, event: ev.HolderLost) -> None:
  _stop_waiting(draft, event.holder)
  draft.finite_holders -= {event.holder}
  if event.holder in draft.streaks:
    draft.streaks = {**draft.streaks}
    del draft.streaks[event.holder]
  held = _held(draft, event.holder)
  draft.held.pop(event.holder, None)
  returned = sp.union(held.out, held.accepted)
  _give_back(draft, event.holder, returned, held.copied)


def _swap(draft: State, event: ev.Swap) -> None:
  holder = event.holder
  _return_out(draft, holder)  # Samples that it was to add to its sum.
  back = _held(draft, holder).accepted
  left = not_finite.to_try(draft, holder)
  most = min(sp.size(back), sp.size(left)) // draft.unit * draft.unit
  spans, _ = sp.head(left, most)
  not_finite.finite(draft, holder, sp.union(back))
  draft.pool = sp.minus(sp.union(draft.pool, back), spans)
  draft.doubtful = sp.minus(draft.doubtful, spans)
  _hold(draft, holder, Held())
  _assign(draft, holder, spans, False)


def _commit(draft: State, event: ev.Commit) -> None:
  spans: list[tuple[int, int]] = []
  for holder, part in event.parts:
    held = _held(draft, holder)
    accepted: Spans = ()
    if held.accepted != part:
      accepted = _minus(held.accepted, part)
      if sp.size(held.accepted) - sp.size(accepted) != sp.size(part):
        raise ValueError(f"No gradient of {holder!r} on {part} is in.")
    _hold(draft, holder, Held(held.out, accepted, held.number, held.copied))
    spans += part
  draft.progress = draft.progress.commit(spans, event.skipped)
  if event.skipped:
    draft.abandoned = sp.minus(draft.abandoned, event.skipped)
  draft.proven = ()
  if draft.strikes:
    not_finite.forget(draft, sp.union(spans, event.skipped))
  _settle_doubts(draft)
  draft.limit = limit_of(draft)
  if draft.data.deterministic:
    draft.waiting = ()  # Holders ask anew, for slots of the next step.


def _members(draft: State, event: ev.Members) -> None:
  draft.replicas, draft.expected = dict(event.replicas), event.expected
  if event.need is not None and event.need != draft.need:
    draft.need = event.need
    draft.limit = limit_of(draft)


def _held(draft: State, holder: ev.Holder) -> Held:
  return draft.held.get(holder, _NOTHING)


def _hold(draft: State, holder: ev.Holder, held: Held) -> None:
  if held.out or held.accepted:
    draft.held[holder] = held
  else:
    draft.held.pop(holder, None)


def _give_back(
  draft: State, holder: ev.Holder, spans: Spans, copied: bool
) -> None:
  """Returns samples that no other replica holds to the pool."""
  if copied:
    spans = _held_by_nobody(draft, holder, spans)
  if spans:
    draft.pool = sp.union(draft.pool, spans)


def _held_by_nobody(draft: State, holder: ev.Holder, spans: Spans) -> Spans:
  """The samples of a copied lease that no other holder has."""
  for other, held in draft.held.items():
    if other != holder:
      spans = sp.minus(sp.union(spans), held.out)
      spans = sp.minus(spans, held.accepted)
  return sp.minus(sp.union(spans), sp.union(draft.pool, draft.doubtful))


def _return_out(draft: State, holder: ev.Holder) -> None:
  """Returns the samples it computes on to the pool."""
  held = _held(draft, holder)
  if held.out:
    _hold(draft, holder, held._replace(out=(), copied=False))
    _give_back(draft, holder, held.out, held.copied)


def _wait(draft: State, holder: ev.Holder, count: int) -> None:
  _stop_waiting(draft, holder)
  draft.waiting = (*draft.waiting, (holder, count))


def _stop_waiting(draft: State, holder: ev.Holder) -> None:
  if draft.waiting:
    draft.waiting = tuple(w for w in draft.waiting if w[0] != holder)


def _serve(draft: State) -> None:
  """Leases available samples to replicas that wait."""
  if draft.exhausted:
    return
  deterministic = draft.data.deterministic
  for holder, count in draft.waiting:
    blocked = not_finite.is_blocked(draft, holder)
    spans = () if blocked else _take_free(draft, holder, count)
    copied = False
    if not spans and not deterministic:
      spans, copied = _to_copy(draft, holder, count), True
    if spans:
      _assign(draft, holder, spans, copied)


def _assign(
  draft: State, holder: ev.Holder, spans: Spans, copied: bool
) -> None:
  """Leases samples to a replica that waits for some."""
  _stop_waiting(draft, holder)
  accepted = _held(draft, holder).accepted
  _hold(draft, holder, Held(spans, accepted, draft.numbers, copied))
  draft.numbers += 1
  draft.leases.append(ev.Lease(holder, spans))


def _take_free(draft: State, holder: ev.Holder, count: int) -> Spans:
  """Takes free samples: returned ones first, then new ones."""
  unit = draft.unit
  pool, cursor, limit = draft.pool, draft.cursor, draft.limit
  most = count * unit
  if not pool and (limit is None or cursor + most <= limit):
    draft.cursor = cursor + most
    return ((cursor, cursor + most),)
  avoided = not_finite.avoided(draft, holder)
  later = sp.common(pool, avoided) if avoided else ()
  if limit is not None and pool and pool[-1][1] > limit:
    later = sp.union(later, sp.minus(pool, ((0, limit),)))
  if later:
    pool = sp.minus(pool, later)
  free = sp.size(pool) if pool else 0
  new = max(most - free, 0)
  if limit is not None:
    new = min(new, max(limit - cursor, 0))
  # Rounded down to whole gradients.
  most = min(free + new, most) // unit * unit
  if most:
    first, rest = sp.head(pool, most) if pool else ((), ())
    new = most - min(free, most)
    if new:
      first = sp.join(first, ((cursor, cursor + new),))
    draft.pool = sp.union(rest, later) if later else rest
    draft.cursor = cursor + new
    return first
  doubts = sp.minus(draft.doubtful, avoided)
  if not doubts:
    return ()
  draft.pool = sp.union(draft.pool, doubts)
  draft.doubtful = sp.minus(draft.doubtful, doubts)
  return _take_free(draft, holder, count)


def _settle_doubts(draft: State) -> None:
  if draft.doubtful:
    draft.pool, draft.doubtful = sp.union(draft.pool, draft.doubtful), ()


def _to_copy(draft: State, holder: ev.Holder, count: int) -> Spans:
  """Samples that another replica computes on: the first gradient counts."""
  avoided = not_finite.avoided(draft, holder)
  candidates = [
    (held.copied, held.out[0], held.number, other)
    for other, held in draft.held.items()
    if held.out and other != holder and not sp.overlap(held.out, avoided)
  ]
  if not candidates:
    return ()
  other = min(candidates)[-1]
  held = _held(draft, other)
  _hold(draft, other, held._replace(copied=True))
  most = min(count * draft.unit, sp.size(held.out))
  return sp.head(held.out, most // draft.unit * draft.unit)[0]


def _minus(spans: Spans, others: Spans) -> Spans:
  """The same as `minus`, for spans that need not be sorted."""
  return tuple(piece for span in spans for piece in sp.minus((span,), others))


_HANDLERS: dict[type, Callable[[State, Any], None]] = {
  ev.Ask: _ask,
  ev.Claim: _claim,
  ev.Accept: _accept,
  ev.Drop: _drop,
  ev.HolderLost: _holder_lost,
  ev.Copy: _copy,
  ev.Swap: _swap,
  ev.Commit: _commit,
  ev.Members: _members,
}
