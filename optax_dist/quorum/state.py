"""The state of the default rules, and the replicas that are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from optax_dist.quorum import events as ev

# Shared by all states, so nobody may change it.
EMPTY: Mapping[Any, Any] = {}


class Config(NamedTuple):
  """The configuration of a run.

  Attributes:
    replicas_to_aggregate: gradients that a step takes.
    total_num_replicas: replicas expected at the start.
    max_staleness: largest staleness of a gradient, in steps.
    weight: the weight of a gradient, as a function of its staleness.
    lower_on_leave: whether graceful leaves lower the quorum.
    two_phase: whether a commit waits for its members' reports.
    expected: the ids of the replicas expected at the start; None accepts the
      first `total_num_replicas` that join.
    exact: whether a step has exactly `replicas_to_aggregate` gradients.
    window: whether a step that has enough waits for more, until `Close` or
      until all live replicas have contributed.
  """

  replicas_to_aggregate: int
  total_num_replicas: int
  max_staleness: int
  weight: Callable[[int], float] | None
  lower_on_leave: bool
  two_phase: bool
  expected: frozenset[ev.Replica] | None
  exact: bool
  window: bool


class ReplicaState(NamedTuple):
  """The state of one replica.

  Attributes:
    incarnation: how often this id has started.
    live: whether it currently takes part.
    left: whether it left gracefully.
    asked: gradients requested by its token; 0 while it waits or is not live.
    start: the first step this incarnation was given.
    counted: the last local step that counted, or -1.
  """

  incarnation: int
  live: bool
  left: bool
  asked: int
  start: int
  counted: int = -1


class Attempt(NamedTuple):
  """An aggregation in progress.

  Attributes:
    number: counts the attempts at this step, from 1.
    members: the gradients to average, in replica order.
    incarnations: of the members.
    pending: the part of `incarnations` that has not reported.
  """

  number: int
  members: tuple[ev.Contribution, ...]
  incarnations: Mapping[ev.Replica, int]
  pending: Mapping[ev.Replica, int]


class Ledger(NamedTuple):
  """The outcomes of all gradients: `arrived == applied + inside + dropped`.

  Attributes:
    arrived: gradients that arrived.
    applied: gradients that were part of a commit.
    inside: gradients accepted, and not committed yet.
    dropped: the others, by reason.
  """

  arrived: int
  applied: int
  inside: int
  dropped: dict[ev.Reason, int]


class State(NamedTuple):
  """The state of the default rules; immutable, so that old ones stay usable.

  Attributes:
    config: the configuration of the run.
    step: the global step, which is the number of commits.
    replicas: the state of each replica.
    inside: accepted gradients that are in no attempt, by replica.
    gathered: the number of gradients in `inside`.
    attempt: the aggregation in progress, or None.
    attempts: how many attempts this step has had.
    live: replicas that take part.
    working: of these, the ones that hold a token.
    awaited: expected replicas that have never joined.
    lost: replicas that were lost, and may come back.
    arrived: gradients that arrived.
    applied: gradients that were part of a commit.
    dropped: gradients that were dropped, by reason.
    finished: whether the run has ended.
    closed: whether the step's grace window is over.
  """

  config: Config
  step: int
  replicas: Mapping[ev.Replica, ReplicaState] = EMPTY
  inside: Mapping[ev.Replica, ev.Contribution] = EMPTY
  gathered: int = 0
  attempt: Attempt | None = None
  attempts: int = 0
  live: int = 0
  working: int = 0
  awaited: int = 0
  lost: int = 0
  arrived: int = 0
  applied: int = 0
  dropped: Mapping[ev.Reason, int] = EMPTY
  finished: bool = False
  closed: bool = False


class Missing(NamedTuple):
  """The replicas that the current step waits for.

  Attributes:
    computing: live replicas whose gradient has not been accepted.
    reporting: members that have not reported on the attempt.
    absent: replicas that never joined, were lost, or left.
  """

  computing: tuple[ev.Replica, ...]
  reporting: tuple[ev.Replica, ...]
  absent: tuple[ev.Replica, ...]


def init(config: Config, global_step: int) -> State:
  """The state before any replica has joined."""
  expected = config.expected
  awaited = config.total_num_replicas if expected is None else len(expected)
  return State(config, global_step, awaited=awaited)


def missing(state: State) -> Missing:
  """The replicas that the current step waits for, in order; O(n)."""
  known = state.replicas
  computing = (r for r, m in known.items() if m.asked)
  gone = (r for r, m in known.items() if not m.live)
  expected: Iterable[ev.Replica] | None = state.config.expected
  if expected is None:
    # No ids were given; they usually count from 0.
    expected = range(state.config.total_num_replicas)
  never = [r for r in expected if r not in known][: state.awaited]
  reporting = state.attempt.pending if state.attempt else ()
  return Missing(
    ev.ordered(computing), ev.ordered(reporting), ev.ordered((*gone, *never))
  )


def ledger(state: State) -> Ledger:
  """The outcomes of all gradients."""
  inside = state.gathered
  if state.attempt:
    inside += sum(c.count for c in state.attempt.members)
  return Ledger(state.arrived, state.applied, inside, dict(state.dropped))
