"""What a commit is made of: the entry of the log that all members apply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from optax_dist import quorum
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.coordinator.steps.gradients import (
  Arrival,
  Gradients,
)
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
from optax_dist.coordinator.protocol.policies.policy import Policy


class Commits:
  """Makes commits.

  Attributes:
    saving: whether all are to save the next state.
  """

  def __init__(
    self, config: Config, policy: Policy, gradients: Gradients, history: History
  ):
    """Starts without requests of members.

    Args:
      config: the run's.
      policy: weighs gradients, and says who computes what next.
      gradients: those that were accepted.
      history: says which requests were in a commit.
    """
    self._config, self._policy = config, policy
    self._gradients, self._history = gradients, history
    self.saving = False
    # Hyperparameters to set with the next commit, by the process that asked.
    self._changes: dict[Process, Change] = {}

  def set_hyperparams(self, change: Change) -> None:
    """Sets them with the next commit, unless a commit has done so."""
    process = change.process
    known = self._changes.get(process)
    latest = (
      self._history.changes.get(process, 0) if known is None else known.number
    )
    if change.number > latest:
      # The latest request is the last one, and has the earlier values.
      self._changes.pop(process, None)
      self._changes[process] = change

  def parts(self, members: Iterable[quorum.Contribution]) -> tuple[Part, ...]:
    """The gradients of a step, as members are told of them."""
    parts = tuple([self._part(c) for c in members])
    accepted = self._gradients.accepted
    arrived = [accepted[part.incarnation].message for part in parts]
    return self._policy.weigh(parts, arrived)

  def _part(self, c: quorum.Contribution) -> Part:
    return Part(
      c.incarnation,
      c.replica,
      self._gradients.accepted[c.incarnation].message.sequence,
      c.local_step,
      c.staleness,
      c.count,
      c.weight,
      self._policy.data(c.incarnation),
    )

  def make(
    self,
    commit: quorum.Commit,
    ended: Round | None,
    tokens: dict[Incarnation, int],
  ) -> tuple[Committed, Sequence[Arrival]]:
    """The commit of a step, with all that was requested for it, and its gradients.

    Args:
      commit: the decision.
      ended: the round that has its mean; None if gradients are sent inline.
      tokens: how many gradients the rules ask of each member next.
    """
    now, seconds = self._policy.now, 0.0
    if ended is None:
      parts = self.parts(commit.members)
      id_ = RoundId(self._history.epoch, commit.step, commit.round)
    else:
      parts, id_ = ended.message.parts, ended.id
      seconds = now - ended.began
    arrivals = self._gradients.commit(parts)
    # Microseconds: with hundreds of members each digit counts.
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
      tuple(sorted(self._gradients.dropped.items())),
      leases,
      skipped,
      tuple(self._changes.values()),
    )
    self.saving = False
    self._changes.clear()
    return entry, arrivals
