"""Since when members wait for a step, and which gradients were dropped meanwhile."""

from __future__ import annotations

import collections
import dataclasses
import math

from optax_dist import quorum
from optax_dist.coordinator.protocol import journal_events
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.coordinator.members import Members
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox
from optax_dist.coordinator.protocol.coordinator.steps.intake import Intake
from optax_dist.coordinator.protocol.coordinator.steps.rounds import Rounds
from optax_dist.coordinator.protocol.entries import (
  Incarnation,
  ReplicaId,
  Rules,
)

# What is wrong with dropped gradients, by reason, as warnings say it.
_FAULTS = {
  str(quorum.Reason.NON_FINITE): "not finite",
  str(quorum.Reason.STALE): "stale",
  str(quorum.Reason.RETURNED): "on samples of others",
}


@dataclasses.dataclass(slots=True)
class _Dropped:
  """A member's dropped gradients, and since when they make the step wait."""

  replica: ReplicaId
  since: float = math.inf
  reasons: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )


class Stall:
  """Times a step, to warn of one that takes long and to end the run at last.

  Attributes:
    since: since when members wait for the step; None if no member waits.
  """

  def __init__(
    self,
    rules: Rules,
    intake: Intake,
    rounds: Rounds,
    members: Members,
    out: Outbox,
  ):
    """Starts without a step.

    Args:
      rules: how long a step may take.
      intake: knows which gradients have to wait.
      rounds: knows which members lack the mean of the step.
      members: the members, which are warned.
      out: where messages and the journal's lines go.
    """
    self._warning, self._timeout = rules.stall_warning, rules.timeout
    self._intake, self._rounds = intake, rounds
    self._members, self._out = members, out
    self.since: float | None = None
    # Whether members wait only because the rules may not get their gradients yet.
    self._is_queued = False
    self._warned = 0.0
    # Dropped gradients since the last commit, by member.
    self._dropped: dict[Incarnation, _Dropped] = {}

  def begin(self, since: float, excused: float = 0.0) -> None:
    """Members wait for a step.

    Args:
      since: since when they wait.
      excused: seconds that count for `timeout` but not for warnings.
    """
    self.since, self._warned, self._is_queued = since, excused, False

  def accepted(self, now: float) -> None:
    """A gradient is accepted, and its member waits for others."""
    self._is_queued = False
    if self.since is None:
      self.begin(now)

  def queued(self, any_: bool, now: float) -> None:
    """Members also wait if the rules may not get their gradients yet.

    Args:
      any_: whether there are such gradients.
      now: the time.
    """
    if any_ and self.since is None:
      self.begin(now)
      self._is_queued = True
    elif self._is_queued and not any_:
      self.since, self._is_queued = None, False

  def end(self) -> None:
    """A step is committed, or none will be."""
    self.since = None
    self._dropped.clear()

  def dropped(
    self,
    incarnation: Incarnation,
    replica: ReplicaId,
    reason: str,
    count: int,
    now: float,
  ) -> None:
    """A member has delivered gradients that were dropped.

    The step counts as waiting from then on. A first stale gradient is an exception: it
    is usual for a member that was slow.
    """
    record = self._dropped.setdefault(incarnation, _Dropped(replica))
    record.reasons[reason] += count
    again = record.reasons.total() > count
    if again or reason == quorum.Reason.NON_FINITE:
      record.since = min(record.since, now)

  def waits(self) -> None:
    """The step has begun, so that members wait since the first dropped gradient."""
    since = min((d.since for d in self._dropped.values()), default=math.inf)
    if (self.since is None or self._is_queued) and since < math.inf:
      self.begin(since)

  def removed(self, incarnation: Incarnation, accepted: bool) -> None:
    """A member is gone.

    Args:
      incarnation: the member.
      accepted: whether gradients of other members are accepted.
    """
    self._dropped.pop(incarnation, None)
    if not accepted:
      self.since = None
      self.waits()

  def _text(self, state: quorum.State) -> str:
    """What is wrong with a step, and which replicas it waits for."""
    texts = [
      f"replica {record.replica} delivered {count}"
      f" gradient{'s' if count > 1 else ''} that"
      f" {'are' if count > 1 else 'is'} {_FAULTS.get(reason, reason)}"
      for record in self._dropped.values()
      for reason, count in record.reasons.items()
    ]
    delivers = {record.replica for record in self._dropped.values()}
    delivers |= {state.member.replica for state, _ in self._intake.queue}
    missing = quorum.missing(state)
    waits = [
      f"{what}: replica {', '.join(map(str, replicas))}"
      for what, replicas in (
        ("computing", [r for r in missing.computing if r not in delivers]),
        ("aggregating", self._rounds.awaited),
        ("absent", missing.absent),
      )
      if replicas
    ]
    if waits or not texts:
      texts.append("waiting for " + ("; ".join(waits) or "nobody"))
    return "; ".join(texts)

  def deadlines(self) -> list[float]:
    """When `check` may find something."""
    if self.since is None:
      return []
    warning = self.since + self._warned + self._warning
    return [warning, self.since + self._timeout]

  def check(self, state: quorum.State, now: float) -> str:
    """Warns of a step that takes long, and names the replicas that it waits for.

    Returns:
      Why the run has to end; "" if it goes on.
    """
    if self.since is None:
      return ""
    step, waited = state.step, now - self.since
    if waited >= self._timeout:
      text = self._text(state)
      return f"Step {step} made no progress for {waited:.1f} s: {text}."
    if waited >= self._warned + self._warning:
      self._warned = waited
      dropped = self._dropped.values()
      counts = {str(d.replica): dict(d.reasons) for d in dropped}
      missing = quorum.missing(state)._asdict()
      missing["reporting"] = self._rounds.awaited
      self._out.note(
        journal_events.Stall(step, waited, missing, counts or None)
      )
      text = self._text(state)
      self._out.notify_all(self._members, msg.Stalled(step, waited, text))
    return ""

  def cannot_proceed(self, decision: quorum.CannotProceed) -> None:
    """Warns that too few replicas are left for a step."""
    step, missing = decision.step, list(decision.missing)
    have, needed, final = decision.have, decision.needed, decision.final
    self._out.note(
      journal_events.CannotProceed(step, have, needed, missing, final)
    )
    if not final:
      self._out.notify_all(self._members, msg.Stalled(step, 0.0, str(decision)))
