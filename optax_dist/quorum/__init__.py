"""The rules of synchronous training with backup replicas, as pure values.

No jax, no clock, no I/O: `step(state, event)` returns the next state and the
decisions. A live coordinator, a simulator and the replay of a journal run the same
rules. docs/quorum.md describes the events and decisions.

Example:
  Two gradients of three replicas are enough for a step; the third is stale.

  >>> from optax_dist import quorum
  >>> state = quorum.init(2, 3, two_phase=False)
  >>> for replica in range(3):
  ...   state, decisions = quorum.step(state, quorum.Join(replica))
  >>> decisions
  (Token(replica=2, step=0, count=1),)
  >>> state, _ = quorum.step(state, quorum.Arrive(0, local_step=0))
  >>> state, decisions = quorum.step(state, quorum.Arrive(2, local_step=0))
  >>> for decision in decisions:
  ...   print(type(decision).__name__)
  Accept
  Commit
  Token
  Token
  >>> state, decisions = quorum.step(state, quorum.Arrive(1, local_step=0))
  >>> decisions[0].reason.value, state.step
  ('stale', 1)
"""

from __future__ import annotations

from collections.abc import Callable

from optax_dist._internal import checks
from optax_dist.quorum.arguments import (
  UNBOUNDED,
  accepts,
  check_sync_arguments,
)
from optax_dist.quorum.events import (
  Abandon,
  Accept,
  Arrive,
  CannotProceed,
  Close,
  Commit,
  Contribution,
  Decision,
  Done,
  Drop,
  Event,
  Failed,
  Finish,
  Finished,
  Join,
  Leave,
  Lost,
  Reason,
  Replica,
  Return,
  StartRound,
  Token,
)
from optax_dist.quorum.rules import step
from optax_dist.quorum.state import Config, Missing, State, missing, needed

__all__ = [
  "UNBOUNDED",
  "Abandon",
  "Accept",
  "Arrive",
  "CannotProceed",
  "Close",
  "Commit",
  "Config",
  "Contribution",
  "Decision",
  "Done",
  "Drop",
  "Event",
  "Failed",
  "Finish",
  "Finished",
  "Join",
  "Leave",
  "Lost",
  "Missing",
  "Reason",
  "Replica",
  "Return",
  "StartRound",
  "State",
  "Token",
  "accepts",
  "check_sync_arguments",
  "init",
  "inverse_staleness",
  "missing",
  "needed",
  "step",
]


def init(
  replicas_to_aggregate: int,
  total_num_replicas: int | None = None,
  *,
  max_staleness: int | None = 0,
  weight: Callable[[int], float] | None = None,
  lower_on_leave: bool = False,
  two_phase: bool = True,
  global_step: int = 0,
  exact: bool = False,
  window: bool = False,
) -> State:
  """The state before any event.

  Args:
    replicas_to_aggregate: gradients that a step takes. If it exceeds
      `total_num_replicas`, each replica is asked for several gradients of the
      same step, and submits their sum and count once.
    total_num_replicas: replicas expected at the start; by default
      `replicas_to_aggregate`.
    max_staleness: largest staleness, in steps, at which a gradient counts; None
      for no limit.
    weight: the weight of a gradient in the mean, as a function of its
      staleness; it is part of the commit. By default all weights are 1.
    lower_on_leave: whether replicas that leave for good lower the quorum to the
      remaining ones; otherwise `CannotProceed` names them.
    two_phase: whether a commit waits for `Done`.
    global_step: the step to start from.
    exact: whether a step has exactly `replicas_to_aggregate` gradients, however
      few or many replicas there are: a replica that has submitted some is asked
      for more at once, and a sum that would exceed the number is dropped
      (`over_quota`).
    window: whether a step that has `replicas_to_aggregate` gradients waits for
      more, until `Close`.

  Returns:
    A state for `step`.

  Raises:
    ValueError: an argument is invalid; the message has its name, the constraint
      and the value.
  """
  k, n, late = check_sync_arguments(
    replicas_to_aggregate, total_num_replicas, max_staleness
  )
  n = k if n is None else n
  if weight is not None:
    checks.function("weight", weight)
  # A coordinator that has no state yet begins before the first step.
  global_step = checks.count("global_step", global_step, least=-UNBOUNDED)
  flags = {
    "lower_on_leave": lower_on_leave,
    "two_phase": two_phase,
    "exact": exact,
    "window": window,
  }
  for name, value in flags.items():
    checks.flag(name, value)
  if exact and late:
    raise ValueError(
      f"max_staleness must be 0 for an exact number of gradients, got {late}."
    )
  config = Config(k, n, late, weight, lower_on_leave, two_phase, exact, window)
  return State(config, global_step, awaited=n)


def inverse_staleness(staleness: int) -> float:
  """The weight of staleness-aware SGD: 1/staleness, and 1 for a fresh one.

  Source: Zhang, Gupta, Lian and Liu, Staleness-aware Async-SGD for
  Distributed Deep Learning, IJCAI 2016.

  Example:
    >>> [inverse_staleness(s) for s in (0, 1, 2, 4)]
    [1.0, 1.0, 0.5, 0.25]
  """
  return 1.0 / max(staleness, 1)
