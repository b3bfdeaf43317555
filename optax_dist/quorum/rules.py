"""The default rules: k fresh gradients, one per replica and step, commit.

They keep the guarantees of TensorFlow's `SyncReplicasOptimizer` and fix known
problems; docs/quorum.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optax_dist.quorum import events as ev
from optax_dist.quorum.arguments import accepts
from optax_dist.quorum.state import ReplicaState, State, missing


def step(
  state: State, event: ev.Event
) -> tuple[State, tuple[ev.Decision, ...]]:
  """Applies one event.

  The same state and event always give the same result, and the old state stays
  usable. An event copies the table of the replicas, so it costs O(n) in their
  number.

  Args:
    state: from `init`, or from an earlier `step`.
    event: the event.

  Returns:
    The next state and the decisions, in the order they take effect.

  Raises:
    ValueError: the event is impossible: a count below 1.
  """
  draft = state.copy()
  _handlers[type(event)](draft, event)
  decisions, draft.decisions = tuple(draft.decisions), []
  return draft, decisions


def _join(draft: State, event: ev.Join) -> None:
  replica = event.replica
  if draft.finished:
    draft.emit(ev.Finished(draft.step))
    return
  old = draft.replicas.get(replica)
  incarnation = event.incarnation
  if incarnation is None:
    incarnation = 0 if old is None else old.incarnation + 1
  if old is None:
    draft.awaited = max(0, draft.awaited - 1)
  else:
    if incarnation <= old.incarnation:
      return
    if old.live:
      # The replica's earlier incarnation died undetected.
      _deactivate(draft, replica, ev.Reason.LOST)
    draft.lost -= not old.left
  draft.live += 1
  draft.replicas[replica] = ReplicaState(
    incarnation, True, False, 0, draft.step
  )
  draft.request(replica, draft.quota(replica))
  draft.advance()


def _arrive(draft: State, event: ev.Arrive) -> None:
  """Accepts a gradient, or drops it, as a whole."""
  if type(event.count) is not int or event.count < 1:
    raise ValueError(f"count must be a positive integer, got {event.count!r}.")
  replica, local_step, count = event.replica, event.local_step, event.count
  record = draft.replicas.get(replica)
  reason = _fault(draft, event, record)
  if reason is not None:
    incarnation = event.incarnation
    if incarnation is None:
      incarnation = -1 if record is None else record.incarnation
    draft.drop(replica, local_step, reason, count, incarnation)
    if draft.finished:
      draft.emit(ev.Finished(draft.step))
    elif (
      record is not None
      and record.requested
      # The live incarnation of an earlier one's gradient has its token.
      and event.incarnation in (None, record.incarnation)
    ):
      requested = record.requested
      draft.request(replica, max(1, requested - draft.excess(requested)))
      suspect = draft.shared and not (draft.exact or event.finite)
      record = draft.replicas[replica]._replace(suspect=suspect)
      draft.replicas[replica] = record
      if suspect:
        draft.advance()
    return
  assert record is not None
  held = draft.accepted.get(replica)
  if held is not None and held.local_step != local_step:
    draft.unaccept(replica, ev.Reason.SUPERSEDED)
    held = None
  late = draft.step - local_step
  total = count + (held.count if held else 0)
  contribution = draft.contribution(
    replica, local_step, total, record.incarnation
  )
  draft.accepted[replica] = contribution
  draft.accepted_count += count
  draft.working -= 1
  draft.replicas[replica] = record._replace(
    requested=0, counted=local_step, suspect=False
  )
  draft.emit(ev.Accept(replica, local_step, late, count))
  draft.advance()


def _fault(
  draft: State, event: ev.Arrive, record: ReplicaState | None
) -> ev.Reason | None:
  """Why the gradient cannot count, or None."""
  if draft.finished:
    return ev.Reason.FINISHED
  if record is None or not record.live:
    return ev.Reason.UNKNOWN_REPLICA
  if event.incarnation not in (None, record.incarnation):
    return ev.Reason.OTHER_INCARNATION
  if event.local_step > draft.step:
    return ev.Reason.FUTURE
  if not record.requested:
    return ev.Reason.DUPLICATE
  if not accepts(event.local_step, draft.step, draft.config.max_staleness):
    return ev.Reason.STALE
  if event.local_step < record.start:
    return ev.Reason.OTHER_INCARNATION
  held = draft.accepted.get(event.replica)
  if event.local_step <= record.counted and (
    held is None or held.local_step != event.local_step
  ):
    return ev.Reason.DUPLICATE
  if not event.finite:
    return ev.Reason.NON_FINITE
  replaced = held.count if held and held.local_step != event.local_step else 0
  too_many = event.count > record.requested and not draft.exact
  # Others were asked for a suspect's gradients, so it may only fill what is lacking.
  too_many |= record.suspect and event.count - replaced > draft.lacks
  if too_many or draft.excess(event.count - replaced):
    return ev.Reason.OVER_QUOTA
  return None


def _leave(draft: State, event: ev.Leave) -> None:
  _depart(draft, event, ev.Reason.LEFT)


def _lost(draft: State, event: ev.Lost) -> None:
  _depart(draft, event, ev.Reason.LOST)


def _depart(draft: State, event: ev.Leave | ev.Lost, reason: ev.Reason) -> None:
  record = draft.replicas.get(event.replica)
  if draft.finished:
    return
  if record is None:
    # The replica is no longer expected.
    if not draft.awaited:
      return
    draft.awaited -= 1
    draft.lost += reason is ev.Reason.LOST
    left = reason is ev.Reason.LEFT
    record = ReplicaState(-1, False, left, 0, draft.step)
    draft.replicas[event.replica] = record
  elif event.incarnation not in (None, record.incarnation):
    return
  elif record.live:
    _deactivate(draft, event.replica, reason)
  elif reason is ev.Reason.LEFT and not record.left:
    draft.lost -= 1
    draft.replicas[event.replica] = record._replace(left=True)
  else:
    return
  if not (draft.live or draft.awaited or draft.lost):
    _finish(draft)
    return
  draft.advance()
  _check_reachable(draft)


def _deactivate(draft: State, replica: ev.Replica, reason: ev.Reason) -> None:
  """Removes the replica, along with what only it holds."""
  record = draft.replicas[replica]
  draft.live -= 1
  draft.lost += reason is ev.Reason.LOST
  draft.working -= record.requested > 0
  draft.replicas[replica] = record._replace(
    live=False, left=reason is ev.Reason.LEFT, requested=0
  )
  draft.unaccept(replica, reason)
  round_ = draft.round
  if round_ is not None and round_.has(replica):
    draft.abandon(replica, reason)


def _check_reachable(draft: State) -> None:
  """Decides `CannotProceed` if the quorum is out of reach."""
  if draft.round is not None:
    return
  needed = draft.replicas_needed
  have = draft.live + draft.awaited
  if have < needed:
    draft.emit(
      ev.CannotProceed(
        draft.step,
        have,
        needed,
        missing(draft).absent,
        final=have + draft.lost < needed,
      )
    )


def _done(draft: State, event: ev.Done) -> None:
  if _is_current(draft, event):
    draft.commit()
    draft.advance()


def _failed(draft: State, event: ev.Failed) -> None:
  if _is_current(draft, event):
    draft.abandon(event.failed_replica, ev.Reason.FAILED)
    draft.advance()
    _check_reachable(draft)


def _is_current(draft: State, event: ev.Done | ev.Failed) -> bool:
  """Whether an event is about the round in progress."""
  round_ = draft.round
  return round_ is not None and (
    (event.step, event.round) == (draft.step, round_.number)
  )


def _close(draft: State, event: ev.Close) -> None:
  """Stops waiting for the rest of a step that has enough gradients."""
  if event.step == draft.step and draft.accepted_count >= draft.quorum():
    draft.closed = True
    draft.advance()


def _return(draft: State, event: ev.Return) -> None:
  replica, accepted = event.replica, draft.accepted.get(event.replica)
  record = draft.replicas.get(replica)
  if record is None or event.incarnation not in (None, record.incarnation):
    return
  if accepted is None or draft.finished:
    return
  draft.unaccept(replica, ev.Reason.RETURNED)
  # The same step may be tried again.
  counted = accepted.local_step - 1
  draft.replicas[replica] = record._replace(counted=counted)
  draft.request(replica, draft.quota(replica))


def _finish(draft: State, event: ev.Finish | None = None) -> None:
  """Drops all accepted gradients; `finished` is a state, not an error."""
  if draft.finished:
    return
  held = [draft.accepted[r] for r in ev.ordered(draft.accepted)]
  if draft.round:
    held += draft.round.members
  for gradient in held:
    draft.drop_accepted(gradient, ev.Reason.FINISHED)
  draft.accepted, draft.accepted_count = {}, 0
  draft.round, draft.finished = None, True
  draft.emit(ev.Finished(draft.step))


_handlers: dict[type, Callable[[State, Any], None]] = {
  ev.Join: _join,
  ev.Arrive: _arrive,
  ev.Leave: _leave,
  ev.Lost: _lost,
  ev.Done: _done,
  ev.Failed: _failed,
  ev.Close: _close,
  ev.Return: _return,
  ev.Finish: _finish,
}
