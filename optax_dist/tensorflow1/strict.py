"""TensorFlow's rules, with the events and decisions of the default rules.

This lets one simulator, journal or leader run either. TensorFlow has no
attempts, incarnations, counts or tests for finiteness: they are ignored here,
as in TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from optax_dist.quorum import events as ev
from optax_dist.quorum.arguments import check_sync_arguments
from optax_dist.quorum.state import Ledger, Missing
from optax_dist.tensorflow1 import events as tf


class StrictState(NamedTuple):
  """The state of the strict rules.

  Attributes:
    system: TensorFlow's sync replicas.
    arrived: gradients that arrived.
    applied: gradients that were part of a commit.
    stale: gradients that were dropped.
    finished: whether the leader has ended.
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

  def apply(
    self, event: ev.Event
  ) -> tuple[StrictState, tuple[ev.Decision, ...]]:
    """Applies one event; see `optax_dist.quorum.step`."""
    match event:
      case ev.Join(replica):
        new = self._replace(system=self.system.join(replica))
        return new, (ev.Token(replica, new.step),)
      case ev.Arrive(replica, local_step):
        system, outcomes = self.system.worker_step(replica, local_step)
        new, decisions = _decisions_of(self, system, outcomes)
        if system.workers[replica].blocked:
          decisions.append(ev.Wait(replica, system.global_step))
        return new, tuple(decisions)
      case ev.Leave(replica) | ev.Lost(replica):
        if self.system.workers.get(replica) is None:
          return self, ()
        return self._replace(system=self.system.lost(replica)), ()
      case ev.Finish():
        system, outcomes = self.system.close()
        new, decisions = _decisions_of(self, system, outcomes)
        finished = ev.Finished(system.global_step)
        return new._replace(finished=True), tuple(
          dict.fromkeys((*decisions, finished))
        )
    return self, ()

  def missing(self) -> Missing:
    """The replicas that can still step; TensorFlow knows no absent ones."""
    workers = self.system.workers.items()
    return Missing(ev.ordered(r for r, w in workers if not w.blocked), (), ())

  def ledger(self) -> Ledger:
    """The outcomes of all gradients, by the first variable's accumulator."""
    inside = self.system.accumulators[0].count
    dropped = {ev.Reason.STALE: self.stale} if self.stale else {}
    return Ledger(self.arrived, self.applied, inside, dropped)


def strict_quorum(
  replicas_to_aggregate: int,
  total_num_replicas: int | None = None,
  *,
  num_tokens: int = -1,
  global_step: int = 0,
) -> StrictState:
  """A quorum with TensorFlow's behavior, including its faults.

  The replicas have yet to `Join`; the leader (TensorFlow's chief) is running,
  and its tokens are enqueued.

  Args:
    replicas_to_aggregate: gradients that a step takes.
    total_num_replicas: replicas at the start; by default
      `replicas_to_aggregate`.
    num_tokens: initial tokens; -1 means `replicas_to_aggregate`.
    global_step: the step to start from.

  Returns:
    A state for `optax_dist.quorum.step`.

  Raises:
    TypeError, ValueError: a number is invalid; the message has its name, the
      constraint and the value.

  Example:
    >>> from optax_dist import quorum, tensorflow1
    >>> state = tensorflow1.strict_quorum(1)
    >>> state, _ = quorum.step(state, quorum.Join(0))
    >>> state, decisions = quorum.step(state, quorum.Arrive(0, local_step=0))
    >>> state.step
    1
  """
  k, n, _ = check_sync_arguments(replicas_to_aggregate, total_num_replicas, 0)
  system = tf.sync_replicas(
    k,
    k if n is None else n,
    num_tokens=num_tokens,
    global_step=global_step,
    workers=(),
  )
  return StrictState(system)


def _decisions_of(
  state: StrictState,
  system: tf.SyncReplicas,
  outcomes: Iterable[tf.Outcome],
) -> tuple[StrictState, list[ev.Decision]]:
  """Converts outcomes to decisions."""
  arrived, applied, stale = state.arrived, state.applied, state.stale
  decisions: list[ev.Decision] = []
  members: tuple[tuple[ev.Replica, int], ...] = ()
  for outcome in outcomes:
    match outcome:
      # Without gates all variables have the same outcomes.
      case tf.Applied((replica, at), accepted, _, 0):
        arrived += 1
        stale += not accepted
        before = state.system.global_step
        decisions.append(
          ev.Accept(replica, at, before - at, 1)
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
              ev.Contribution(replica, at, now - 1 - at, 1, 1.0, 0)
              for replica, at in members
            ),
            1,
          )
        )
      case tf.GotToken(replica, now):
        decisions.append(ev.Token(replica, now))
      case tf.StepFailed():
        decisions.append(ev.Finished(system.global_step))
  new = StrictState(system, arrived, applied, stale, state.finished)
  return new, decisions
