"""The accepted gradients, and the commits that are made of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from optax_dist import quorum
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.coordinator.steps.rounds import Round
from optax_dist.coordinator.protocol.entries import (
  Change,
  Committed,
  Details,
  Incarnation,
  Part,
  Process,
  RoundId,
)
from optax_dist.coordinator.protocol.history import History
from optax_dist.coordinator.protocol.messages import SubmitGradient
from optax_dist.coordinator.protocol.policies.policy import Policy


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
  """A member's gradient, when it arrived, and whether it counts as finite."""

  incarnation: Incarnation
  message: SubmitGradient
  at: float
  finite: bool


class Gradients:
  """Gradients on their way into a step, and what else is in its commit.

  Attributes:
    accepted: the gradients that are accepted and not committed, by member; those of a
      member are on the same parameters.
    dropped: how many gradients were dropped, by reason.
    saving: whether all replicas are to save the next state.
  """

  def __init__(self, config: Config, policy: Policy, history: History):
    """Starts without gradients and requests of members.

    Args:
      config: the run's.
      policy: weighs gradients, and says which member computes what next.
      history: knows what was dropped, and which requests were in a commit.
    """
    self._config, self._policy, self._history = config, policy, history
    self.accepted: dict[Incarnation, list[Arrival]] = {}
    self.dropped = dict(history.dropped)
    self.saving = False
    # Hyperparameters to set with the next commit, by the process that requested them.
    self._changes: dict[Process, Change] = {}

  @property
  def first(self) -> float:
    """When the first accepted gradient arrived; infinity for none."""
    # Each member's gradients are in the order in which they arrived.
    return min((a[0].at for a in self.accepted.values()), default=math.inf)

  def of(self, members: Iterable[Incarnation]) -> list[Arrival]:
    """The accepted gradients of some members, in the order of their arrival."""
    return [arrival for i in members for arrival in self.accepted[i]]

  def drop(
    self, drop: quorum.Drop, arriving: Arrival | None
  ) -> tuple[list[Arrival], str]:
    """Drops a member's gradients.

    Args:
      drop: the decision.
      arriving: the gradient that the rules were asked about, if any.

    Returns:
      The dropped gradients, and the reason.
    """
    reason = drop.reason
    new = reason is not quorum.Reason.SUPERSEDED
    if new and arriving and arriving.incarnation == drop.incarnation:
      arrivals = [arriving]
    else:
      arrivals = self.accepted.pop(drop.incarnation)
    if reason is quorum.Reason.NON_FINITE and arrivals[0].finite:
      reason = quorum.Reason.RETURNED
    if reason is quorum.Reason.UNKNOWN_REPLICA and not arrivals[0].finite:
      reason = quorum.Reason.NON_FINITE  # Of a newcomer, which does not count.
    count = self.dropped.get(reason.value, 0) + drop.count
    self.dropped[reason.value] = count
    return arrivals, reason.value

  def set_hyperparams(self, change: Change) -> None:
    """Sets hyperparameters with the next commit, unless a commit has done so."""
    process = change.process
    known = self._changes.get(process)
    latest = (
      self._history.changes.get(process, 0) if known is None else known.number
    )
    if change.number > latest:
      # The latest request includes the values of earlier ones. It moves to the end,
      # because the last change of a name decides.
      self._changes.pop(process, None)
      self._changes[process] = change

  def parts(self, members: Iterable[quorum.Contribution]) -> tuple[Part, ...]:
    """The gradients of a step, as members and the log get them."""
    parts, arrived = [], []
    for c in members:
      for arrival in self.accepted[c.incarnation]:
        message = arrival.message
        arrived.append(message)
        parts.append(
          Part(
            c.incarnation,
            c.replica,
            message.sequence,
            c.local_step,
            c.staleness,
            message.count,
            c.weight,
            message.data,
          )
        )
    return self._policy.weigh(tuple(parts), arrived)

  def commit(
    self,
    commit: quorum.Commit,
    ended: Round | None,
    tokens: dict[Incarnation, int],
  ) -> tuple[Committed, Sequence[Arrival]]:
    """The commit of a step, with all that was requested for it, and its gradients.

    Args:
      commit: the decision.
      ended: the round that has its mean; None if gradients are sent inline.
      tokens: how many gradients the rules request from each member next.
    """
    now, seconds = self._policy.now, 0.0
    if ended is None:
      parts = self.parts(commit.members)
      id_ = RoundId(self._history.epoch, commit.step, commit.round)
    else:
      parts, id_ = ended.message.parts, ended.id
      seconds = now - ended.began
    owners = dict.fromkeys(part.incarnation for part in parts)
    arrivals = self.of(owners)
    for incarnation in owners:
      del self.accepted[incarnation]
    # Rounded to microseconds: with hundreds of members each digit makes the log larger.
    details = [
      Details(a.message.batches, a.message.compute, round(now - a.at, 6))
      for a in arrivals
    ]
    leases, skipped = self._policy.committed(parts, tokens, seconds)
    mean = None
    if self._config.inline:
      assert self._config.average is not None
      payloads = [a.message.payload for a in arrivals]
      mean = self._config.average(parts, payloads)
    entry = Committed(
      id_,
      parts,
      mean,
      self.saving,
      tuple(details),
      tuple(sorted(self.dropped.items())),
      leases,
      skipped,
      tuple(self._changes.values()),
    )
    self.saving = False
    self._changes.clear()
    return entry, arrivals
