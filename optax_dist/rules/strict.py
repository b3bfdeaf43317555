"""TensorFlow's rules behind the events and decisions of the default ones.

So one simulator, journal or chief can run either. TensorFlow knows no
attempts, no incarnations, no counts and no test for finiteness: those are
ignored here, as it would.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from optax_dist.rules import events as ev
from optax_dist.rules import tensorflow as tf
from optax_dist.rules.state import Ledger, Missing


class StrictState(NamedTuple):
  """The state of the strict rules.

  Attributes:
    system: TensorFlow's sync replicas.
    arrived: gradients that arrived.
    applied: gradients that were part of a commit.
    stale: gradients that were dropped.
    finished: whether the chief has ended.
  """

  system: tf.SyncReplicas
  arrived: int = 0
  applied: int = 0
  stale: int = 0
  finished: bool = False

  @property
  def step(self) -> int:
    """The global step."""
    return self.system.global_step


def step(
  state: StrictState, event: ev.Event
) -> tuple[StrictState, tuple[ev.Decision, ...]]:
  """Applies one event; see `optax_dist.rules.step`."""
  match event:
    case ev.Join(replica):
      new = state._replace(system=state.system.join(replica))
      return new, (ev.Token(replica, new.step),)
    case ev.Arrive(replica, local_step):
      system, outcomes = state.system.worker_step(replica, local_step)
      new, decisions = _told(state, system, outcomes)
      if system.workers.get(replica).blocked:
        decisions.append(ev.Wait(replica, system.global_step))
      return new, tuple(decisions)
    case ev.Leave(replica) | ev.Lost(replica):
      if state.system.workers.get(replica) is None:
        return state, ()
      return state._replace(system=state.system.lost(replica)), ()
    case ev.Finish():
      system, outcomes = state.system.close()
      new, decisions = _told(state, system, outcomes)
      told = ev.Finished(system.global_step)
      return new._replace(finished=True), tuple(
        dict.fromkeys((*decisions, told))
      )
  return state, ()


def missing(state: StrictState) -> Missing:
  """Who could still step; TensorFlow does not know who is absent."""
  workers = state.system.workers.items()
  return Missing(ev.ordered(r for r, w in workers if not w.blocked), (), ())


def ledger(state: StrictState) -> Ledger:
  """Where every gradient went, as the first variable's accumulator saw it."""
  inside = state.system.accumulators[0].count
  dropped = {ev.Reason.STALE: state.stale} if state.stale else {}
  return Ledger(state.arrived, state.applied, inside, dropped)


def _told(
  state: StrictState,
  system: tf.SyncReplicas,
  outcomes: Iterable[tf.Outcome],
) -> tuple[StrictState, list[ev.Decision]]:
  """Says in decisions what came of an event."""
  arrived, applied, stale = state.arrived, state.applied, state.stale
  decisions: list[ev.Decision] = []
  members: tuple[tuple[ev.Replica, int], ...] = ()
  for outcome in outcomes:
    match outcome:
      # Without gates every variable fares as the first one does.
      case tf.Applied((replica, at), accepted, _, 0):
        arrived += 1
        stale += not accepted
        before = state.system.global_step
        decisions.append(
          ev.Accept(replica, at, before - at)
          if accepted
          else ev.Drop(replica, at, ev.Reason.STALE)
        )
      case tf.Taken(0, _, taken):
        members = taken
        applied += len(taken)
      case tf.Advanced(now):
        decisions.append(
          ev.Commit(
            now - 1,
            tuple(
              ev.Contribution(replica, at, now - 1 - at)
              for replica, at in members
            ),
          )
        )
      case tf.GotToken(replica, now):
        decisions.append(ev.Token(replica, now))
      case tf.StepFailed():
        decisions.append(ev.Finished(system.global_step))
  new = StrictState(system, arrived, applied, stale, state.finished)
  return new, decisions
