"""Gradients that are not finite: decides whether samples or a replica are bad.

A gradient that is not finite is a strike against its samples. Samples with three
strikes, of three replicas or of all trusted ones, are abandoned. A replica is not
trusted after three such gradients in a row on different samples, or after another
replica's gradient on the same samples was finite. Then its strikes don't count, and it
gets no samples that others can take, until a gradient of its own is finite.
"""

from __future__ import annotations

from optax_dist.ledger import spans as sp
from optax_dist.ledger.events import Holder
from optax_dist.ledger.spans import Spans
from optax_dist.ledger.state import State, Streak, Strike

# How many strikes abandon a sample, and after how many such gradients in a row a
# replica is not trusted.
_STRIKES, _IN_A_ROW = 3, 3
_NO_STREAK = Streak()


def replica_of(state: State, holder: Holder) -> Holder:
  """The replica of a holder."""
  return state.replicas.get(holder, holder)


def trusted(state: State) -> set[Holder]:
  """The trusted holders: their non-finite gradients count against samples.

  If no holder is trusted, all are: then the run itself diverges. But not while other
  replicas may still come; until then, a single holder that has had no finite gradient
  isn't trusted either.
  """
  live = set(state.replicas)
  if not live:
    live = {*state.held, *(holder for holder, _ in state.waiting)}
    live |= state.streaks.keys()
  good = {holder for holder in live if not _is_suspect(state, holder)}
  if not state.expected:
    return good or live
  return good if len(good) > 1 else good & state.finite_holders


def _is_suspect(state: State, holder: Holder) -> bool:
  return state.streaks.get(holder, _NO_STREAK).times >= _IN_A_ROW


def finite(draft: State, holder: Holder, spans: Spans) -> None:
  """A gradient of this holder on these samples was finite."""
  if not spans:
    return
  draft.finite_holders |= {holder}
  if not (draft.streaks or draft.strikes):
    return
  streaks = dict(draft.streaks)
  streaks.pop(holder, None)
  for other, streak in draft.streaks.items():
    if other != holder and sp.overlap(streak.spans, spans):
      # The samples are good, so the other holder's gradient was at fault.
      streaks[other] = streak._replace(times=max(streak.times, _IN_A_ROW))
  draft.streaks, draft.proven = streaks, sp.union(draft.proven, spans)
  forget(draft, spans)


def strike(draft: State, holder: Holder, spans: Spans) -> Spans:
  """A gradient on these samples was not finite; returns the samples to abandon."""
  replica = replica_of(draft, holder)
  before = draft.streaks.get(holder, _NO_STREAK)
  new = sp.minus(spans, before.spans)
  more = sp.size(new) // draft.unit if draft.data.deterministic else bool(new)
  streak = Streak(before.times + more, sp.union(before.spans, spans))
  draft.streaks = {**draft.streaks, holder: streak}
  good = trusted(draft)
  if holder not in good:
    # Each sample counts once: the strike takes effect when the holder is trusted again.
    spans = sp.minus(spans, _struck(draft, replica))
  _add(draft, replica, spans)
  if holder not in good:
    return ()
  replicas = {replica_of(draft, holder) for holder in good}
  needed = min(_STRIKES, len(replicas))
  given_up: Spans = ()
  for piece in _pieces(draft, spans):
    by = [replica for replica in _strikers(draft, piece) if replica in replicas]
    if len(by) >= _STRIKES and len(set(by)) >= needed:
      given_up = sp.union(given_up, piece)
  forget(draft, given_up)
  return given_up


def _add(draft: State, replica: Holder, spans: Spans) -> None:
  """Adds a strike, to one on other samples: there are thousands in a bad run."""
  strikes = list(draft.strikes)
  for index, (other, before) in enumerate(strikes):
    if other == replica and not sp.overlap(before, spans):
      strikes[index] = Strike(replica, sp.union(before, spans))
      break
  else:
    strikes += [Strike(replica, spans)] if spans else []
  draft.strikes = tuple(strikes)


def are_bad(state: State, holder: Holder, spans: Spans) -> bool:
  """Whether samples count as zeros if this holder's gradient is not finite, too.

  That is for deterministic data, where all replicas get the same: two that can be
  trusted are enough.

  Args:
    state: state of the ledger.
    holder: the replica whose gradient is not finite.
    spans: the samples that would count as zeros.
  """
  good, replica = trusted(state), replica_of(state, holder)
  others = {replica_of(state, holder) for holder in good} - {replica}
  return holder in good and all(
    not others or others.intersection(_strikers(state, piece))
    for piece in _pieces(state, spans)
  )


def forget(draft: State, spans: Spans) -> None:
  """These samples are done, or good."""
  if draft.strikes:
    rest = [s._replace(spans=sp.minus(s.spans, spans)) for s in draft.strikes]
    draft.strikes = tuple(s for s in rest if s.spans)


def is_blocked(state: State, holder: Holder) -> bool:
  """Whether a replica that is not trusted gets nothing, as others can take it.

  Args:
    state: state of the ledger.
    holder: the replica.
  """
  if not state.streaks:
    return False
  good = trusted(state)
  return holder not in good and any(_may_ask(state, h) for h in good)


def avoided(state: State, holder: Holder) -> Spans:
  """Samples that are better tried by another replica."""
  if not (state.strikes or state.streaks):
    return ()
  good, replica = trusted(state), replica_of(state, holder)
  own = _struck(state, replica)
  if holder not in good:
    own = sp.minus(own, state.proven)
  others = {replica_of(state, holder) for holder in good} - {replica}
  return sp.union(*(sp.minus(own, _struck(state, other)) for other in others))


def _may_ask(state: State, holder: Holder) -> bool:
  """Whether a replica computes on more samples before the next commit."""
  held = state.held.get(holder)
  return state.data.deterministic or held is None or not held.accepted


def swap(state: State) -> Holder | None:
  """The holder that should try other samples than those of its gradient (`Swap`).

  It is needed if the only samples left are such that the gradients of the waiting
  holders were not finite on them, and all other holders have submitted. Then one of
  these has to try the samples.

  Args:
    state: state of the ledger.

  Returns:
    The holder; None if no swap is needed.
  """
  if state.data.deterministic or not (state.waiting and state.strikes):
    return None
  others = trusted(state) - {holder for holder, _ in state.waiting}
  if any(_may_ask(state, holder) for holder in others):
    return None
  for holder in state.held:
    if holder in others and sp.size(to_try(state, holder)) >= state.unit:
      return holder
  return None


def to_try(state: State, holder: Holder) -> Spans:
  """The samples that a holder should try in place of the waiting holders."""
  free = sp.union(state.pool, state.doubtful)
  left = sp.union(*(avoided(state, other) for other, _ in state.waiting))
  own = _struck(state, replica_of(state, holder))
  return sp.minus(sp.common(free, left), own)


def _struck(state: State, replica: Holder) -> Spans:
  return sp.union(*(s.spans for s in state.strikes if s.replica == replica))


def _strikers(state: State, piece: Spans) -> list[Holder]:
  return [s.replica for s in state.strikes if sp.overlap(s.spans, piece)]


def _pieces(state: State, spans: Spans) -> list[Spans]:
  """These samples, split where strikes against them begin or end."""
  edges = {e for s in state.strikes for span in s.spans for e in span}
  pieces: list[Spans] = []
  for start, stop in spans:
    inner = sorted(e for e in edges if start < e < stop)
    ends = zip([start, *inner], [*inner, stop], strict=True)
    pieces += [(piece,) for piece in ends]
  return pieces
