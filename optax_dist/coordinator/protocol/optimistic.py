"""Attempts that members begin by themselves, before the leader announces them.

If all members are sure to take part, each knows the attempt without being told,
and a step takes a round trip less. The leader sees by the id that all members
have submitted under whether they have; if not, it announces another attempt.
"""

from __future__ import annotations

from collections.abc import Iterable

from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.entries import (
  AttemptId,
  Incarnation,
  Part,
)
from optax_dist.coordinator.protocol.inputs import Submitted
from optax_dist.coordinator.protocol.membership import View
from optax_dist.coordinator.protocol.messages import Attempt
from optax_dist.quorum.events import ordered


def parts(
  config: Config,
  view: View,
  me: Incarnation,
  step: int,
  pending: Submitted,
  count: int,
) -> tuple[Part, ...]:
  """The members of the next attempt, if a member knows them.

  Args:
    config: configuration of the member.
    view: the decisions of the log, as far as it was read.
    me: its incarnation.
    step: the step of its state, with everything applied that was read.
    pending: what it submits.
    count: how many gradients of that the leader doesn't have.

  Returns:
    One part for each member, in order; empty if they are not known.
  """
  members = view.members
  if (
    config.inline
    or config.alone
    or config.deterministic  # Only the leader knows who has which slots.
    or config.policy is not None  # Only the leader knows the weights.
    or not pending.finite
    or (count, pending.total) != (1, 1)
    or pending.local_step != step
    or step != view.step
    or not 2 <= len(members) <= config.replicas_to_aggregate
    or config.replicas_to_aggregate > config.total_num_replicas
  ):
    return ()
  by_id = {m.replica: m for m in members.values()}
  return tuple(
    Part(
      by_id[r].incarnation,
      r,
      pending.sequence if by_id[r].incarnation == me else 0,
      step,
      0,
      1,
      1.0,
    )
    for r in ordered(by_id)
  )


def begun(
  message: Attempt, ids: Iterable[AttemptId | None], view: View, step: int
) -> AttemptId | None:
  """The id under which all members have already begun an attempt.

  Args:
    message: the attempt, as the leader would announce it.
    ids: those that its members have submitted under.
    view: the decisions in the log.
    step: the leader's step.

  Returns:
    The id, or None if they have not all begun it.
  """
  found, *others = set(ids)
  if (
    found is None
    or others
    or found.term != view.term
    or found.step != step
    or found.membership != view.membership
    or view.members.keys() != {p.incarnation for p in message.parts}
  ):
    return None
  return found
